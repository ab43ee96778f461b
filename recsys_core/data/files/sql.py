"""Words that all queries of the ingest share."""

from pathlib import Path

from recsys_core.data.files.sources import literal

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
