"""DuckDB sessions with bounded memory, which spill to a folder, and SQL fragments for scanning parquet files."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

from recsys_core.disk import disk_full_error
from recsys_core.errors import InputError, first_line

DAMAGED_FILE_ERRORS = (duckdb.Error, duckdb.IOException, duckdb.InvalidInputException)
"""Classes of the errors that DuckDB raises for a damaged file.

Compare them with `type(error)`, not with isinstance: a broken page header raises duckdb.Error itself, which is also the base
class of errors that only a bug in nightjar causes.
"""
SQL_TYPE = {"int64": "BIGINT", "string": "VARCHAR"}
"""SQL type of a column of ids, by IdType."""


@contextmanager
def database(
    *, memory_limit: str, num_threads: int | None, spill_folder: Path, subject: str, setting: str = "interactions.memory_limit"
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an in-memory database that spills data beyond its memory limit to disk.

    Args:
        spill_folder: folder for the spilled data.
        subject: what the queries process, for messages: a plural noun such as "the events".
        setting: config key of memory_limit, for messages.

    Raises:
        InputError: memory_limit or the disk is too small, or a file is damaged.
    """
    connection_settings: dict[str, Any] = {"memory_limit": memory_limit, "temp_directory": str(spill_folder)}
    if num_threads is not None:
        connection_settings["threads"] = num_threads
    try:
        with duckdb.connect(config=connection_settings) as connection:
            yield connection
    except duckdb.OutOfMemoryException as error:
        message = first_line(error)
        # DuckDB raises OutOfMemoryException also if the disk of the spill folder is full.
        if "failed to offload" in message.lower() or ("temp" in message.lower() and "director" in message.lower()):
            raise disk_full_error(spill_folder, reason=f"DuckDB spills {subject} beyond {setting} to this folder") from error
        raise InputError(f"{setting} is {memory_limit}, which is too little: {message}") from error
    except duckdb.Error as error:
        message = first_line(error)
        if "no space left" in message.lower():
            raise disk_full_error(spill_folder.parent, reason=f"{subject} do not fit") from error
        if type(error) not in DAMAGED_FILE_ERRORS:
            raise
        raise InputError(f"{subject}: {message}") from error


def fetch_count(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    """Return the single number that `query` selects."""
    ((count,),) = connection.sql(query).fetchall()
    return int(count)


def quoted(text: str, *, quote: str = '"') -> str:
    """Quote `text` as an SQL identifier in double quotes, or as an SQL string in single quotes.

    >>> print(quoted("it's", quote="'"))
    'it''s'
    """
    return quote + text.replace(quote, 2 * quote) + quote


def scan_sql(path: Path, *, options_sql: str = "") -> str:
    """Return the SQL call read_parquet(...) for one file. Folder names such as key=value do not become columns.

    >>> print(scan_sql(Path("it's.parquet"), options_sql="file_row_number = true"))
    read_parquet('it''s.parquet', hive_partitioning = false, file_row_number = true)
    """
    return f"read_parquet({_quoted_path_sql(path)}, hive_partitioning = false{', ' + options_sql if options_sql else ''})"


def scan_all_sql(paths: Sequence[Path]) -> str:
    """Return the SQL call read_parquet(...) for several input files as one table. A column that a file lacks is null."""
    # Without can_have_nan, DuckDB 2.0 concludes from pyarrow's statistics that a column has no NaN (duckdb/duckdb#25521).
    paths_sql = ", ".join(map(_quoted_path_sql, paths))
    return f"read_parquet([{paths_sql}], union_by_name = true, hive_partitioning = false, can_have_nan = true)"


def _quoted_path_sql(path: Path) -> str:
    """Quote a path, and escape *, ? and [, which read_parquet would expand.

    >>> print(_quoted_path_sql(Path("log/day[1].parquet")))
    'log/day[[]1].parquet'
    """
    return quoted(re.sub(r"[*?\[]", r"[\g<0>]", str(path)), quote="'")
