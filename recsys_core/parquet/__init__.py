"""Reading parquet that nightjar did not write: find the files, reject damaged ones, query them with DuckDB.

Other packages import from these modules:

- `sources`: `open_sources` finds files and checks their footers; `Source` is one of them.
- `columns`: types of columns and ids, checked over all files of a table.
- `guards`: `check_expansion` against decompression bombs, `verify_pages` and `verify_sidecars` against damaged bytes.
- `local_copies`: `local_files` gives a local file for each source, local or remote.
- `duckdb_session`: a bounded DuckDB `database`, and SQL for scanning files.

`locations` and `footers` are internal; of `locations` only `is_uri` is used elsewhere.
"""
