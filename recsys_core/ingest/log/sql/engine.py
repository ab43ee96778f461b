"""SqlEngine: the steps of the log ingest in SQL, for a LogEngine whose database has a SqlSession.

The steps share tables and views:

- `raw`: the rows of the new files (checks.py).
- <side>_ids and <side>s: the codes and rows of the user ids and item ids (vocabulary.py).
- `log`: the events after the filters, with their split (filters.py).
- `known_negatives` (known_negatives.py).
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa

from recsys_core.errors import InputError, shown_names
from recsys_core.ingest.log.config import InteractionsConfig, LogFilter
from recsys_core.ingest.log.engine import FileStatistics, LogCounts, LogFiles, Vocabulary
from recsys_core.ingest.log.log_statistics import columns_by_role, reject_bad_log
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.ingest.log.sql.checks import first_bad_row_of_table, label_lower_bound, row_checks, scan_files
from recsys_core.ingest.log.sql.filters import extra_column_names, load_log
from recsys_core.ingest.log.sql.known_negatives import count_and_select_negatives
from recsys_core.ingest.log.sql.session import SqlSession, fetch_count
from recsys_core.ingest.log.sql.vocabulary import add_ids, assign_rows, create_id_table, row_sql_type, write_codes
from recsys_core.ingest.row_checks import BadRow, first_bad_row, pass_sql
from recsys_core.manifests import IdType, InteractionsManifest, LogPart, SourceFile
from recsys_core.parquet.duckdb_session import SQL_TYPE


class SqlEngine:
    """The methods of a LogEngine. A subclass implements the steps whose SQL differs between databases."""

    def __init__(
        self,
        session: SqlSession,
        config: InteractionsConfig,
        *,
        id_types: Mapping[str, IdType],
        continued_manifest: InteractionsManifest | None,
    ) -> None:
        self._session, self._config, self._id_types = session, config, id_types
        num_ids_without_row = [
            create_id_table(session, side, id_type=id_type, continued_manifest=continued_manifest)
            for side, id_type in id_types.items()
        ]
        # An idle id has no event. If no id can be idle, `assign_rows` does not look for idle ids.
        self._may_have_idle_ids = any(num_ids_without_row) or config.filter != LogFilter() or config.explicit_negatives
        self._positive_row_sql: str | None = None
        self._sides_with_codes_unlike_rows: set[str] = set()

    @abstractmethod
    def _create_raw(self, files: LogFiles) -> None:
        """Create the view `raw` of the rows of `files`, with `position` and, for times, `before_1970`; see checks.py."""

    @abstractmethod
    def _explain_read_errors(self, files: LogFiles) -> AbstractContextManager[None]:
        """Replace an error about the content of a file by an InputError that names the file and the column."""

    @abstractmethod
    def _id_condition_sql(self, side: str, *, id_sql: str) -> str:
        """Return the SQL condition that joins the ids in `id_sql` with table <side>_ids. The alias of the table is u or i."""

    @abstractmethod
    def _draw_sql(self, split: FileSplit) -> str:
        """Return SQL for a number below 1,000,000, from the ids of a row of `raw`; see `draw` of LogPart."""

    @abstractmethod
    def _ignore_file_statistics(self) -> None:
        """Make later queries ignore the statistics in the files."""

    def read_part(self, files: LogFiles, *, part_path: Path) -> Sequence[FileStatistics]:
        """Scan the files four times: for the checks, for the user ids, for the item ids, and for the part; see LogEngine."""
        config = self._config
        if config.label_column is not None and config.label_threshold is not None:
            threshold = label_lower_bound(config.label_threshold, files.type_by_column[config.label_column])
            self._positive_row_sql = f"label::DOUBLE >= {threshold!r}"
        with self._explain_read_errors(files):
            self._create_raw(files)
            statistics, is_part_row_sql = self._check_rows(files)
            num_complete_rows = self._write_part(part_path, is_part_row_sql=is_part_row_sql)
            num_expected_rows = sum(
                file_statistics.num_rows - file_statistics.num_bad_rows
                if config.explicit_negatives
                else file_statistics.num_events
                for file_statistics in statistics
            )
            if num_complete_rows != num_expected_rows:
                self._reject_false_statistics(files)
        return statistics

    def load(self, parts: Sequence[LogPart], *, folder: Path, split_code_by_file: Mapping[SourceFile, int]) -> LogCounts:
        """Create the table or view `log`; see LogEngine."""
        counts = load_log(self._session, self._config, parts=parts, folder=folder, split_code_by_file=split_code_by_file)
        self._may_have_idle_ids = self._may_have_idle_ids or bool(counts.num_removed_by_reason)
        return counts

    def assign_rows(self, side: str, *, vector_ids_path: Path | None) -> Vocabulary:
        """Create table <side>s; see LogEngine."""
        vocabulary, codes_are_rows = assign_rows(
            self._session,
            side,
            may_have_idle_ids=self._may_have_idle_ids,
            vector_ids_path=vector_ids_path,
            add_vector_ids=side == "item",
        )
        if not codes_are_rows:
            self._sides_with_codes_unlike_rows.add(side)
        return vocabulary

    def sorted_events(self) -> Iterator[pa.RecordBatch]:
        """Sort `log`, and stream its rows; see LogEngine."""
        extra_names = extra_column_names(self._session, "log")
        row_columns_sql, joins_sql = [], ""
        for side in ("user", "item"):
            code_sql = f'log."{side}"'
            if side in self._sides_with_codes_unlike_rows:
                joins_sql += f" JOIN {side}s ON {code_sql} = {side}s.code"
                code_sql = f'{side}s."row"'
            row_columns_sql.append(f"{code_sql} AS {side}_row")
        extra_columns_sql = [f"log.{name}" for name in extra_names]
        select_list = ", ".join([*row_columns_sql, "log.split AS split", "log.position AS position", *extra_columns_sql])
        order_sql = ", ".join(["user_row", "split", "position", "item_row", *extra_names])
        return self._session.stream(f"SELECT * FROM (SELECT {select_list} FROM log{joins_sql}) AS events ORDER BY {order_sql}")

    def sorted_negatives(self) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Sort table `known_negatives`, and stream its rows; see LogEngine."""
        num_negatives, negatives_sql = count_and_select_negatives(self._session, is_ordered=self._config.is_ordered)
        return num_negatives, self._session.stream(negatives_sql)

    def write_codes(self, side: str, path: Path) -> None:
        """Export table <side>_ids; see LogEngine."""
        write_codes(self._session, side, path)

    def _check_rows(self, files: LogFiles) -> tuple[list[FileStatistics], str]:
        """Return the statistics of each file, and SQL that is true for the rows of the part; raise InputError for bad rows."""
        checks = row_checks(self._config, type_by_column=files.type_by_column)
        roles = list(columns_by_role(self._config))
        statistics = scan_files(
            self._session, checks, num_files=len(files.sources), roles=roles, positive_row_sql=self._positive_row_sql
        )

        def find_first_bad_row(file_index: int) -> BadRow:
            rows_sql, source = f"(SELECT * FROM raw WHERE source = {file_index})", files.sources[file_index]
            if source.table is not None:
                return first_bad_row_of_table(self._session, self._config, checks, rows_sql=rows_sql, table_name=source.name)
            bad_row = first_bad_row(self._session.fetch_rows, checks, rows_sql=rows_sql, row_sql='"row"', source=source)
            assert bad_row is not None
            return bad_row

        check_names = [check.name for check in checks]
        reject_bad_log(
            self._config, statistics, sources=files.sources, check_names=check_names, find_first_bad_row=find_first_bad_row
        )
        # The checks take a second per 20 million rows, so they are not repeated if no row is bad.
        has_bad_rows = any(file_statistics.num_bad_rows for file_statistics in statistics)
        conditions_sql = [pass_sql(checks)] if has_bad_rows else []
        if self._positive_row_sql is not None and not self._config.explicit_negatives:
            conditions_sql.append(self._positive_row_sql)
        return statistics, " AND ".join(conditions_sql) or "true"

    def _write_part(self, part_path: Path, *, is_part_row_sql: str) -> int:
        """Write the rows of `raw` that `is_part_row_sql` selects to a part, with codes in place of ids.

        Return the number of written rows that have a position and, with a weight column, a weight.
        """
        config, session = self._config, self._session
        positive_row_sql = self._positive_row_sql if config.explicit_negatives else None
        for side, id_type in self._id_types.items():
            add_ids(session, side, id_type=id_type, is_part_row_sql=is_part_row_sql, positive_row_sql=positive_row_sql)
        extra_columns_sql = ["TRY_CAST(weight AS FLOAT) AS weight"] if config.weight_column else []
        extra_columns_sql += [f"context_{index}" for index in range(len(config.context_columns))]
        extra_columns_sql += [] if positive_row_sql is None else [f"NOT ({positive_row_sql}) AS is_negative"]
        if isinstance(config.split, FileSplit) and config.split.validation_share > 0:
            extra_columns_sql.append(f"{self._draw_sql(config.split)} AS draw")
        code_columns_sql = [f'{side[0]}.code::{row_sql_type(session, side)} AS "{side}"' for side in self._id_types]
        columns_sql = ["source::INTEGER AS source", *code_columns_sql, "position", *extra_columns_sql]
        joins_sql = []
        for side, id_type in self._id_types.items():
            # TRY_CAST: the database may cast a bad row before the filter removes it.
            condition_sql = self._id_condition_sql(side, id_sql=f'TRY_CAST(raw."{side}" AS {SQL_TYPE[id_type]})')
            joins_sql.append(f"JOIN {side}_ids AS {side[0]} ON {condition_sql}")
        session.write_part(f"SELECT {', '.join(columns_sql)} FROM raw {' '.join(joins_sql)} WHERE {is_part_row_sql}", part_path)
        is_complete_sql = "position IS NOT NULL" + (" AND weight IS NOT NULL" if config.weight_column else "")
        return fetch_count(session, f"SELECT count(*) FILTER ({is_complete_sql}) FROM {session.scan_sql(part_path)}")

    def _reject_false_statistics(self, files: LogFiles) -> None:
        """Raise InputError for a null that the checks missed because the file's statistics claim that it has no nulls."""
        self._ignore_file_statistics()
        self._check_rows(files)
        raise InputError(
            f"{shown_names([source.name for source in files.sources], max_names=5)}: the statistics of a file contradict its "
            "content; write the files again"
        )
