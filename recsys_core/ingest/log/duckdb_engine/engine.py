"""DuckdbEngine: the log ingest in one in-memory database that spills to disk.

The steps share tables and views: `raw`, the rows of the new files (raw_log.py); <side>_ids and <side>s, the codes and rows of
the ids (vocabulary.py); `log`, the events after the filters and the split (filters.py); known_negatives (known_negatives.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import duckdb
import pyarrow as pa

from recsys_core.errors import InputError, shown_names
from recsys_core.ingest.log.config import InteractionsConfig, LogFilter
from recsys_core.ingest.log.duckdb_engine.checks import explain_read_errors, row_checks, scan_files
from recsys_core.ingest.log.duckdb_engine.filters import extra_column_names, load_log
from recsys_core.ingest.log.duckdb_engine.known_negatives import sorted_negatives
from recsys_core.ingest.log.duckdb_engine.raw_log import raw_log_sql, write_events
from recsys_core.ingest.log.duckdb_engine.vocabulary import add_ids, assign_rows, create_id_table, write_codes
from recsys_core.ingest.log.engine import FileStatistics, LogCounts, LogFiles, Vocabulary
from recsys_core.ingest.log.log_statistics import columns_by_role, reject_bad_log
from recsys_core.ingest.row_checks import BadRow, first_bad_row, pass_sql
from recsys_core.manifests import IdType, InteractionsManifest, LogPart, SourceFile
from recsys_core.parquet.duckdb_session import database

BATCH_ROWS = 1_000_000


class DuckdbEngine:
    """The LogEngine that runs in DuckDB. Its results do not depend on the number of threads."""

    version = f"duckdb {duckdb.__version__}"

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        config: InteractionsConfig,
        *,
        id_types: Mapping[str, IdType],
        continued_run: InteractionsManifest | None,
    ) -> None:
        self._connection, self._config, self._id_types = connection, config, id_types
        num_ids_without_row = [
            create_id_table(connection, side, id_type=id_type, continued_run=continued_run)
            for side, id_type in id_types.items()
        ]
        # If no id can be without an event, `assign_rows` does not have to look for such ids.
        self._is_filtered = any(num_ids_without_row) or config.filter != LogFilter() or config.explicit_negatives
        self._positive_row_sql: str | None = None
        if config.label_threshold is not None:
            self._positive_row_sql = f"label::DOUBLE >= {config.label_threshold!r}"
        self._sides_with_other_codes: set[str] = set()

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
            yield cls(connection, config, id_types=id_types, continued_run=continued_run)

    def read_part(self, files: LogFiles, *, part_path: Path) -> Sequence[FileStatistics]:
        """Scan the files once to check them, once for the ids of each side, and once to write the part; see LogEngine."""
        with explain_read_errors(self._config, files):
            self._connection.execute(f"CREATE OR REPLACE TEMP VIEW raw AS {raw_log_sql(self._config, files)}").fetchall()
            statistics, kept_row_sql = self._check_rows(files)
            positive_row_sql = self._positive_row_sql if self._config.explicit_negatives else None
            try:
                for side, id_type in self._id_types.items():
                    add_ids(
                        self._connection, side, id_type=id_type, kept_row_sql=kept_row_sql, positive_row_sql=positive_row_sql
                    )
                num_complete = write_events(
                    self._connection,
                    self._config,
                    part_path=part_path,
                    kept_row_sql=kept_row_sql,
                    positive_row_sql=positive_row_sql,
                    id_type_by_side=self._id_types,
                )
            except duckdb.ConstraintException:  # an id is null although the statistics of its file claim that none is
                num_complete = 0
            num_written = sum(
                file.num_rows - file.num_bad if self._config.explicit_negatives else file.num_events for file in statistics
            )
            if num_complete != num_written:
                self._reject_false_statistics(files)
        return statistics

    def load(self, parts: Sequence[LogPart], *, folder: Path, split_code_by_file: Mapping[SourceFile, int]) -> LogCounts:
        """Create the table or view `log`; see LogEngine."""
        counts = load_log(self._connection, self._config, parts=parts, folder=folder, split_code_by_file=split_code_by_file)
        self._is_filtered = self._is_filtered or bool(counts.num_removed_by_reason)
        return counts

    def assign_rows(self, side: str, *, vector_ids_path: Path | None) -> Vocabulary:
        """Create table <side>s; see LogEngine."""
        vocabulary, codes_are_rows = assign_rows(
            self._connection,
            side,
            is_filtered=self._is_filtered,
            vector_ids_path=vector_ids_path,
            add_vector_ids=side == "item",
        )
        if not codes_are_rows:
            self._sides_with_other_codes.add(side)
        return vocabulary

    def sorted_events(self) -> Iterator[pa.RecordBatch]:
        """Sort `log`, and stream it; see LogEngine."""
        extra_columns_sql = [f"log.{column_name}" for column_name in extra_column_names(self._connection, "log")]
        row_columns_sql, joins_sql = [], ""
        for side in ("user", "item"):
            code_sql = f'log."{side}"'
            if side in self._sides_with_other_codes:
                joins_sql += f" JOIN {side}s ON {code_sql} = {side}s.code"
                code_sql = f"{side}s.row"
            row_columns_sql.append(f"{code_sql} AS {side}_row")
        select_list = ", ".join([*row_columns_sql, "log.split AS split", "log.position AS position", *extra_columns_sql])
        order_sql = ", ".join(["user_row", "split", "position", "item_row", *extra_columns_sql])
        events = self._connection.sql(f"SELECT {select_list} FROM log{joins_sql} ORDER BY {order_sql}")
        batches: pa.RecordBatchReader = events.to_arrow_reader(BATCH_ROWS)
        yield from batches

    def sorted_negatives(self) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Sort table `known_negatives`, and stream it; see LogEngine."""
        num_negatives, negatives = sorted_negatives(self._connection, is_ordered=self._config.is_ordered)
        return num_negatives, iter(negatives.to_arrow_reader(BATCH_ROWS))

    def write_codes(self, side: str, path: Path) -> None:
        """Export table <side>_ids; see LogEngine."""
        write_codes(self._connection, side, path)

    def _reject_false_statistics(self, files: LogFiles) -> None:
        """Raise InputError for a null that DuckDB does not find because the statistics of its file claim that none exists."""
        self._connection.execute("SET disabled_optimizers = 'statistics_propagation'")  # the checks take twice as long
        self._check_rows(files)
        raise InputError(
            f"{shown_names([source.name for source in files.sources], max_names=5)}: the statistics of a file contradict its "
            "content; write the files again"
        )

    def _check_rows(self, files: LogFiles) -> tuple[list[FileStatistics], str]:
        """Return the statistics of each file, and SQL that is true for the rows to write; raise InputError for bad rows."""
        checks = row_checks(self._config, type_by_column=files.type_by_column)
        roles = list(columns_by_role(self._config))
        statistics = scan_files(
            self._connection, checks, num_files=len(files.sources), roles=roles, positive_row_sql=self._positive_row_sql
        )

        def find_first(file_index: int) -> BadRow:
            rows_sql, source = f"(SELECT * FROM raw WHERE source = {file_index})", files.sources[file_index]
            bad_row = first_bad_row(self._connection, checks, rows_sql=rows_sql, row_sql="row", source=source)
            assert bad_row is not None
            return bad_row

        check_names = [check.name for check in checks]
        reject_bad_log(self._config, statistics, sources=files.sources, check_names=check_names, find_first=find_first)
        # The checks take a second per 20 million rows, so they are not repeated if no row is bad.
        has_bad_rows = any(file_statistics.num_bad for file_statistics in statistics)
        conditions_sql = [pass_sql(checks)] if has_bad_rows else []
        if self._positive_row_sql is not None and not self._config.explicit_negatives:
            conditions_sql.append(self._positive_row_sql)
        return statistics, " AND ".join(conditions_sql) or "true"
