"""Words that all queries of the ingest share."""

from collections.abc import Sequence
from pathlib import Path

from recsys_core.parquet.sources import literal

SPLITS = ("train", "validation", "test")
"""A split's code is its position here; a user's events are stored in this order."""
SQL_TYPE = {"int64": "BIGINT", "string": "VARCHAR"}


def quoted(name: str, *, mark: str = '"') -> str:
    """`name` as an SQL identifier, or with mark "'" as a string.

    >>> print(quoted("it's", mark="'"))
    'it''s'
    """
    return mark + name.replace(mark, 2 * mark) + mark


def scan(path: Path, *, options: str = "") -> str:
    """read_parquet of one local file; folders that are called key=value are no columns of it.

    >>> print(scan(Path("it's.parquet"), options="file_row_number = true"))
    read_parquet('it''s.parquet', hive_partitioning = false, file_row_number = true)
    """
    return f"read_parquet({quoted(literal(path), mark=chr(39))}, hive_partitioning = false{', ' + options if options else ''})"


def scan_all(paths: Sequence[Path]) -> str:
    """read_parquet of the user's files as one table; what they lack is null."""
    names = ", ".join(quoted(literal(path), mark="'") for path in paths)
    # Without can_have_nan DuckDB 2.0 takes pyarrow's statistics for proof that there is none (duckdb/duckdb#25521).
    return f"read_parquet([{names}], union_by_name = true, hive_partitioning = false, can_have_nan = true)"
