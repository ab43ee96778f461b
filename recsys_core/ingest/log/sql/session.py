"""SqlSession: the database session that the steps of the log ingest need."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa


class SqlSession(Protocol):
    """Executes the SQL that all engines share. All queries are in DuckDB's dialect.

    They may call the function `ordering_hash(text)`, which returns the upper 63 bits of DuckDB's hash of a text.
    """

    def fetch_rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return all rows of a small result."""

    def create_view(self, name: str, query: str) -> None:
        """Create or replace the view `name`. Its query is evaluated at each use."""

    def create_table(self, name: str, query: str) -> None:
        """Create the table `name`, or replace it. `query` may read the old table."""

    def create_id_table(self, name: str, *, id_type: str) -> None:
        """Create the empty table `name` with the columns id, code and previous_row. id_type: SQL type of the ids."""

    def append(self, name: str, query: str) -> None:
        """Append the rows of `query` to the table `name`. Both have the same column order."""

    def numbered(self, query: str, *, order_sql: str) -> str:
        """Return SQL for the rows of `query` with the column `number`: the index of the row in the order of `order_sql`."""

    def column_names(self, name: str) -> list[str]:
        """Return the columns of a table or view."""

    def scan_sql(self, path: Path, *, with_row_number: bool = False) -> str:
        """Return SQL for the rows of a parquet file or part that nightjar wrote.

        with_row_number: whether to add the column `file_row_number`, the index of the row in the file. A folder has none.
        """

    def stream(self, query: str) -> Iterator[pa.RecordBatch]:
        """Yield the result of `query` in the order of its ORDER BY. No batch is empty."""

    def write_part(self, query: str, path: Path) -> None:
        """Write the result of `query` as a part: a parquet file, or a folder of parquet files, at `path`."""

    def write_file(self, query: str, path: Path) -> None:
        """Write the result of `query`, in the order of its ORDER BY, to one parquet file."""


def fetch_count(session: SqlSession, query: str) -> int:
    """Return the single number that `query` selects."""
    ((count,),) = session.fetch_rows(query)
    return int(count)


def first_rows_sql(rows_sql: str, *, window_sql: str, num_rows: int = 1) -> str:
    """Return SQL for the first `num_rows` rows of each partition of a window."""
    numbered_sql = f"SELECT *, row_number() OVER ({window_sql}) AS row_in_window FROM {rows_sql}"
    return f"SELECT * EXCLUDE (row_in_window) FROM ({numbered_sql}) AS numbered WHERE row_in_window <= {num_rows}"
