"""Input parquet files, which other programs wrote: find them, reject damaged files, and query them with DuckDB.

Modules for other packages:

- `sources`: `open_sources` finds files and checks their footers; a `Source` is one such file.
- `columns`: checks of the types of columns and ids in all files of a table.
- `guards`: `check_expansion` rejects decompression bombs; `verify_pages` rejects damaged files.
- `local_copies`: `local_files` yields a local file for each source, local or remote; `read_batches` streams such a file.
- `duckdb_session`: a bounded DuckDB `database`, and SQL for scanning files.

`locations` and `footers` are internal.
"""
