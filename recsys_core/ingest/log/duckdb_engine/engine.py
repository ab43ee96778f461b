"""DuckdbEngine: the log ingest in one in-memory database that spills to disk."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Self

import duckdb

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.duckdb_engine.raw_log import draw_sql, raw_log_sql
from recsys_core.ingest.log.duckdb_engine.read_errors import explain_read_errors
from recsys_core.ingest.log.duckdb_engine.session import DuckdbSession
from recsys_core.ingest.log.engine import LogFiles
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.ingest.log.sql.engine import SqlEngine
from recsys_core.manifests import IdType, InteractionsManifest
from recsys_core.parquet.duckdb_session import database


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
        continued_run: InteractionsManifest | None,
        spill_folder: Path,
    ) -> Iterator[Self]:
        """Open a database within config.memory_limit; see LogEngine."""
        with database(
            memory_limit=config.memory_limit, num_threads=config.threads, spill_folder=spill_folder, subject="interactions"
        ) as connection:
            yield cls(DuckdbSession(connection), config, id_types=id_types, continued_run=continued_run)

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
            # An id is null, but the statistics of its file claim that none is. With 0 rows, the caller rejects the files.
            return 0

    def _ignore_file_statistics(self) -> None:
        # This optimizer trusts the statistics. It is disabled only here, because the checks take twice as long without it.
        self._session.execute("SET disabled_optimizers = 'statistics_propagation'")
