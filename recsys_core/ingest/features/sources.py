"""Sources of feature values: the feature tables of users and items, and the context columns of the events.

A source checks its rows and creates a DuckDB table `joined`, which FeatureColumn describes. All features are then encoded in
the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import ITEM_COLUMNS_FILE, ITEM_TITLES_FILE, vocabulary_file
from recsys_core.errors import InputError
from recsys_core.ingest.features.feature_column import BATCH_ROWS
from recsys_core.ingest.features.feature_schema import FeatureTable
from recsys_core.ingest.row_checks import FIX_ROWS, BadRow, RowCheck, first_bad_row, reject_bad_rows
from recsys_core.manifests import FeatureTableStatistics, InteractionsManifest
from recsys_core.parquet.duckdb_session import SQL_TYPE, quoted, scan_all_sql, scan_sql
from recsys_core.parquet.local_copies import local_files
from recsys_core.units import FLOAT32_MAX, INT64_MAX


@dataclass(frozen=True)
class TableSource:
    """A feature table, whose rows are joined with the ids of all users or all items."""

    counted_row_sql: ClassVar[str] = "TRUE"
    """SQL condition on the rows whose values count for a vocabulary: all rows."""
    table: FeatureTable
    num_rows: int
    """Number of users or items."""
    ids_path: Path
    """Parquet file with the ids of the users or items, in the order of their rows."""

    def load(
        self, connection: duckdb.DuckDBPyConnection, *, output_folder: Path, scratch_folder: Path
    ) -> FeatureTableStatistics:
        """Create table `joined` with the rows of the feature table whose id is in `ids_path`.

        For items, also write the files with the titles and the filter columns.
        """
        table = self.table
        assert table.id_column is not None and table.id_type is not None
        with local_files(table.sources, columns=table.columns, scratch_folder=scratch_folder) as paths:
            _reject_bad_table(connection, table, paths=paths)
            catalogue_sql = scan_sql(self.ids_path, options_sql="file_row_number = true")
            connection.execute(
                "CREATE TABLE joined AS "
                "SELECT catalogue.row, catalogue.in_training, feature_table.* EXCLUDE (feature_table_id) "
                f"FROM (SELECT id, file_row_number AS row, train_count > 0 AS in_training FROM {catalogue_sql}) catalogue "
                f"JOIN (SELECT CAST({quoted(table.id_column)} AS {SQL_TYPE[table.id_type]}) AS feature_table_id, "
                f"{_value_columns_sql(table)} FROM {scan_all_sql(paths)}) feature_table "
                "ON catalogue.id = feature_table.feature_table_id"
            )
        ((num_matched_rows,),) = connection.sql("SELECT count(*) FROM joined").fetchall()
        num_table_rows = sum(source.record.num_rows for source in table.sources)
        if num_matched_rows == 0:
            raise InputError(
                f"{table.sources[0].name}: column {table.id_column!r}: none of the {num_table_rows:,} ids is an id of the "
                f"{table.owner_kind}s of the log; check that both use the same ids"
            )
        if table.title_column is not None:
            titles = connection.sql("SELECT row, title FROM joined WHERE title IS NOT NULL ORDER BY row").to_arrow_table()
            pq.write_table(titles, output_folder / ITEM_TITLES_FILE)
        if table.owner_kind == "item":
            filter_columns_sql = "".join(
                f", f{column_index} AS {quoted(column)}" for column_index, column in enumerate(table.filter_sql_type_by_column)
            )
            filter_values = connection.sql(f"SELECT row{filter_columns_sql} FROM joined ORDER BY row").to_arrow_table()
            pq.write_table(filter_values, output_folder / ITEM_COLUMNS_FILE)
        return FeatureTableStatistics(
            num_rows=num_table_rows,
            num_not_in_catalogue=num_table_rows - num_matched_rows,
            num_without_row=self.num_rows - num_matched_rows,
        )


@dataclass(frozen=True)
class ContextSource:
    """The context columns of the events, in the order of the event store."""

    counted_row_sql: ClassVar[str] = "in_training"  # values in validation and test events do not count for a vocabulary
    table: FeatureTable
    num_rows: int
    """Number of events."""
    event_store: EventStore

    def load(self, connection: duckdb.DuckDBPyConnection, *, output_folder: Path, scratch_folder: Path) -> None:
        """Create table `joined` with the context columns of every event."""
        paths = [source.path for source in self.table.sources]
        _reject_bad_table(connection, self.table, paths=paths)
        connection.register("events", _read_events(paths, columns=self.table.columns, event_store=self.event_store))
        connection.execute(
            'CREATE TABLE joined AS SELECT "nightjar row" AS row, "nightjar in_training" AS in_training, '
            f"{_value_columns_sql(self.table)} FROM events"
        )


FeatureSource = TableSource | ContextSource


def feature_sources(tables: Sequence[FeatureTable], interactions: InteractionsManifest) -> Iterator[FeatureSource]:
    """Yield the source of each feature table."""
    num_rows_by_owner_kind = {"user": interactions.num_users, "item": interactions.num_items}
    for table in tables:
        if table.owner_kind == "context":
            yield ContextSource(table, interactions.num_events, EventStore.open(interactions))
        else:
            ids_path = interactions.path(vocabulary_file(table.owner_kind))
            yield TableSource(table, num_rows_by_owner_kind[table.owner_kind], ids_path)


def _value_columns_sql(table: FeatureTable) -> str:
    """Return SQL for columns of `joined`: title, f<n> for filter columns, v<n> and w<n> for values and weights of features."""
    columns_sql = [] if table.title_column is None else [f"CAST({quoted(table.title_column)} AS VARCHAR) AS title"]
    for column_index, (column, sql_type) in enumerate(table.filter_sql_type_by_column.items()):
        # All times are stored in UTC, also times that the file has in another zone.
        value_sql = f"CAST({_number_sql(table, column)} AS {sql_type})"
        value_sql = f"({value_sql} AT TIME ZONE 'UTC')" if sql_type == "TIMESTAMPTZ" else value_sql
        columns_sql.append(f"{value_sql} AS f{column_index}")
    for feature_index, feature in enumerate(table.features):
        value_type = table.value_type_by_feature.get(feature.name)
        sql_type = ("DOUBLE" if value_type is None else SQL_TYPE[value_type]) + ("[]" if feature.is_list else "")
        # The last bits of a number matter only for its bucket.
        is_bucketed = feature.kind == "numeric" and not feature.standardise
        value_sql = _number_sql(table, feature.source_column) if is_bucketed else quoted(feature.source_column)
        columns_sql.append(f"CAST({value_sql} AS {sql_type}) AS v{feature_index}")
        if feature.weight_column is not None:
            columns_sql.append(f"CAST({quoted(feature.weight_column)} AS FLOAT[]) AS w{feature_index}")
    return ", ".join(columns_sql)


def _number_sql(table: FeatureTable, column: str) -> str:
    """Return SQL for a column. If a file has it in single precision, the SQL returns its numbers as text.

    The text of a number in single precision is the number that a request has: 39.99, and not 39.9900016784668. If other files
    have double precision, DuckDB reads all numbers as DOUBLE, and a number that equals a FLOAT gets the text of this FLOAT.
    """
    column_sql = quoted(column)
    single_precision_flags = [pa.types.is_float32(source.schema.field(column).type) for source in table.sources]
    if not any(single_precision_flags):
        return column_sql
    float_sql = f"TRY_CAST({column_sql} AS FLOAT)"
    return f"CASE WHEN {float_sql} = {column_sql} THEN CAST({float_sql} AS VARCHAR) ELSE CAST({column_sql} AS VARCHAR) END"


def _read_events(paths: Sequence[Path], *, columns: Sequence[str], event_store: EventStore) -> pa.RecordBatchReader:
    """Stream the context columns of all shards, the index of each event, and whether it is a training event."""
    file_schema = pq.read_schema(paths[0])
    fields = [file_schema.field(name) for name in columns]
    schema = pa.schema([*fields, ("nightjar row", pa.int64()), ("nightjar in_training", pa.bool_())])

    def event_batches() -> Iterator[pa.RecordBatch]:
        start_event = 0
        files = (pq.ParquetFile(path) for path in paths)
        for batch in chain.from_iterable(file.iter_batches(BATCH_ROWS, columns=list(columns)) for file in files):
            stop_event = start_event + batch.num_rows
            event_index = pa.array(np.arange(start_event, stop_event))
            is_training = pa.array(event_store.is_training(slice(start_event, stop_event)))
            batch_columns = [*(batch.column(name) for name in columns), event_index, is_training]
            yield pa.RecordBatch.from_arrays(batch_columns, schema=schema)
            start_event = stop_event

    return pa.RecordBatchReader.from_batches(schema, event_batches())


def _reject_bad_table(connection: duckdb.DuckDBPyConnection, table: FeatureTable, *, paths: Sequence[Path]) -> None:
    """Raise InputError for the first bad row of a feature table. Duplicate ids are checked last.

    Args:
        paths: a local file for each source of the table.
    """
    checks = list(_row_checks(table))
    if checks:
        counts_sql = ", ".join(f"count(*) FILTER ({check.failure_sql})" for check in checks)
        any_failure_sql = " OR ".join(f"coalesce({check.failure_sql}, false)" for check in checks)
        query = f"SELECT count(*) FILTER ({any_failure_sql}), {counts_sql} FROM {scan_all_sql(paths)}"
        ((num_bad_rows, *check_counts),) = connection.sql(query).fetchall()
        _reject_failures(connection, table, checks, check_counts, num_bad_rows=num_bad_rows, paths=paths)
    if table.id_column is not None:
        column_sql = quoted(table.id_column)
        duplicates_sql = (
            f"SELECT {column_sql} AS id, count(*) AS rows FROM {scan_all_sql(paths)} GROUP BY 1 HAVING count(*) > 1"
        )
        ((num_bad_rows,),) = connection.sql(f"SELECT coalesce(sum(rows), 0)::BIGINT FROM ({duplicates_sql})").fetchall()
        is_duplicate_sql = f"{column_sql} IN (SELECT id FROM ({duplicates_sql}))"
        check = RowCheck(table.id_column, "the id of more than one row", is_duplicate_sql, "keep one row for each id")
        _reject_failures(connection, table, [check], [num_bad_rows], num_bad_rows=num_bad_rows, paths=paths)


def _reject_failures(
    connection: duckdb.DuckDBPyConnection,
    table: FeatureTable,
    checks: Sequence[RowCheck],
    check_counts: Sequence[int],
    *,
    num_bad_rows: int,
    paths: Sequence[Path],
) -> None:
    """Raise InputError for the first row that fails a check, unless `num_bad_rows` is 0."""

    def find_first_bad_row() -> BadRow:
        for source, path in zip(table.sources, paths, strict=True):
            # The rows are numbered without DuckDB's file_row_number, because the file may have a column of this name.
            rows_sql = f'(SELECT row_number() OVER () - 1 AS "nightjar row", * FROM {scan_all_sql([path])})'
            bad_row = first_bad_row(
                lambda query: connection.sql(query).fetchall(),
                checks,
                rows_sql=rows_sql,
                row_sql='"nightjar row"',
                source=source,
            )
            if bad_row is not None:
                return bad_row
        raise AssertionError(f"{table.setting}: {num_bad_rows} bad rows were counted, but none is in the files")

    reject_bad_rows(
        {check.name: count for check, count in zip(checks, check_counts, strict=True)},
        num_bad_rows=num_bad_rows,
        num_rows=sum(source.record.num_rows for source in table.sources),
        policy=None,
        find_first_bad_row=find_first_bad_row,
    )


def _row_checks(table: FeatureTable) -> Iterator[RowCheck]:
    if table.id_column is not None:
        column_sql = quoted(table.id_column)
        yield RowCheck(table.id_column, "null", f"{column_sql} IS NULL", "drop these rows")
        if table.id_type == "int64":
            yield RowCheck(table.id_column, "too large for int64", f"{column_sql} > {INT64_MAX}", "write the ids as strings")
    for feature in table.features:
        column_sql = quoted(feature.source_column)
        if table.value_type_by_feature.get(feature.name) == "int64":
            is_too_large_sql = f"{column_sql} > {INT64_MAX}"
            if feature.is_list:
                is_too_large_sql = f"len(list_filter({column_sql}, lambda x: x > {INT64_MAX})) > 0"
            yield RowCheck(feature.source_column, "too large for int64", is_too_large_sql, "write the values as strings")
        if feature.weight_column is not None:
            weight_sql = quoted(feature.weight_column)
            yield RowCheck(
                feature.weight_column,
                f"not as long as the list in {feature.source_column!r}",
                f"coalesce(len({column_sql}), 0) <> coalesce(len({weight_sql}), 0)",
                "write one weight for each value",
            )
            # DuckDB orders NaN above all numbers, so the comparison with FLOAT32_MAX also finds NaN.
            yield RowCheck(
                feature.weight_column,
                "a list with a weight that is null, negative, or not finite in float32",
                f"len(list_filter({weight_sql}, lambda x: x IS NULL OR x < 0 OR x > {FLOAT32_MAX})) > 0",
                FIX_ROWS,
            )
