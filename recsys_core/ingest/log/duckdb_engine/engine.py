"""The log ingest in DuckDB: a LogEngine, and the SqlSession of its in-memory database, which spills to disk."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.duckdb_engine.raw_log import draw_sql, raw_log_sql
from recsys_core.ingest.log.duckdb_engine.read_errors import explain_read_errors
from recsys_core.ingest.log.engine import LogFiles
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.ingest.log.sql.engine import SqlEngine
from recsys_core.manifests import IdType, InteractionsManifest
from recsys_core.parquet.duckdb_session import database, quoted, scan_sql

BATCH_ROWS = 1_000_000


class DuckdbSession:
    """The SqlSession of a DuckDB connection; see SqlSession."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.connection = connection
        self.execute("CREATE MACRO ordering_hash(text) AS (hash(text) >> 1)::BIGINT")

    def execute(self, statement: str) -> None:
        """Execute a statement to its end."""
        self.connection.execute(statement).fetchall()

    def fetch_rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return all rows of a small result."""
        return self.connection.sql(query).fetchall()

    def create_view(self, name: str, query: str) -> None:
        """Create or replace a view."""
        self.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {query}")

    def create_table(self, name: str, query: str) -> None:
        """Create or replace a table. It is first created under another name, because `query` may read the old table."""
        self.execute(f"CREATE TABLE next_{name} AS {query}")
        self.execute(f"DROP TABLE IF EXISTS {name}")
        self.execute(f"ALTER TABLE next_{name} RENAME TO {name}")

    def create_id_table(self, name: str, *, id_type: str) -> None:
        """Create an empty table whose ids must not be null."""
        self.execute(f"CREATE TABLE {name} (id {id_type} NOT NULL, code BIGINT, previous_row BIGINT)")

    def append(self, name: str, query: str) -> None:
        """Insert rows into a table."""
        self.execute(f"INSERT INTO {name} {query}")

    def numbered(self, query: str, *, order_sql: str) -> str:
        """Return a subquery that sorts the rows and then numbers them. An ordered window function would take a third longer."""
        return f"(SELECT *, row_number() OVER () - 1 AS number FROM (SELECT * FROM ({query}) ORDER BY {order_sql}))"

    def column_names(self, name: str) -> list[str]:
        """Return the columns of a table or view."""
        return self.connection.table(name).columns

    def scan_sql(self, path: Path, *, with_row_number: bool = False) -> str:
        """Return a call of read_parquet."""
        return scan_sql(path, options_sql="file_row_number = true" if with_row_number else "")

    def stream(self, query: str) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a streaming result."""
        batches: pa.RecordBatchReader = self.connection.sql(query).to_arrow_reader(BATCH_ROWS)
        yield from batches

    def write_part(self, query: str, path: Path) -> None:
        """Write one compressed parquet file. Dictionaries would take time without making columns of codes or times smaller."""
        self._copy(query, path, options_sql=", COMPRESSION lz4_raw, PARQUET_VERSION v2, DICTIONARY_SIZE_LIMIT 1000")

    def write_file(self, query: str, path: Path) -> None:
        """Write one parquet file."""
        self._copy(query, path)

    def _copy(self, query: str, path: Path, *, options_sql: str = "") -> None:
        self.execute(f"COPY ({query}) TO {quoted(str(path), quote=chr(39))} (FORMAT parquet{options_sql})")


class DuckdbEngine(SqlEngine):
    """The LogEngine that runs in DuckDB. Its results do not depend on the number of threads."""

    version = f"duckdb {duckdb.__version__}"
    _session: DuckdbSession

    @classmethod
    @contextmanager
    def open(
        cls,
        config: InteractionsConfig,
        *,
        id_types: Mapping[str, IdType],
        continued_manifest: InteractionsManifest | None,
        spill_folder: Path,
    ) -> Iterator[Self]:
        """Open a database within config.memory_limit; see LogEngine."""
        with database(
            memory_limit=config.memory_limit, num_threads=config.threads, spill_folder=spill_folder, subject="interactions"
        ) as connection:
            yield cls(DuckdbSession(connection), config, id_types=id_types, continued_manifest=continued_manifest)

    def _create_raw(self, files: LogFiles) -> None:
        self._session.create_view("raw", raw_log_sql(self._config, files))

    def _explain_read_errors(self, files: LogFiles) -> AbstractContextManager[None]:
        return explain_read_errors(self._config, files)

    def _id_condition_sql(self, side: str, *, id_sql: str) -> str:
        # If all ids have different hashes, the condition compares hashes, which is a third faster.
        ((num_ids, num_hashes),) = self._session.fetch_rows(f"SELECT count(*), count(DISTINCT hash(id)) FROM {side}_ids")
        alias = side[0]
        return f"hash({id_sql}) = hash({alias}.id)" if num_hashes == num_ids else f"{id_sql} = {alias}.id"

    def _draw_sql(self, split: FileSplit) -> str:
        return draw_sql(split)

    def _write_part(self, part_path: Path, *, is_part_row_sql: str) -> int:
        try:
            return super()._write_part(part_path, is_part_row_sql=is_part_row_sql)
        except duckdb.ConstraintException:
            # An id is null, but the statistics of its file claim that no id is. The caller rejects the files if 0 is returned.
            return 0

    def _ignore_file_statistics(self) -> None:
        # The optimizer trusts the statistics. The checks take twice as long without it, so it is disabled only here.
        self._session.execute("SET disabled_optimizers = 'statistics_propagation'")
