"""Row checks of the feature tables, in DuckDB: null, duplicate and too large ids, and unusable values and weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import duckdb

from recsys_core.ingest.features.feature_schema import FeatureTable
from recsys_core.ingest.row_checks import FIX_ROWS, BadRow, RowCheck, first_bad_row, reject_bad_rows
from recsys_core.parquet.duckdb_session import quoted, scan_all_sql
from recsys_core.units import FLOAT32_MAX, INT64_MAX


def reject_bad_table(connection: duckdb.DuckDBPyConnection, table: FeatureTable, *, paths: Sequence[Path]) -> None:
    """Raise InputError for the first bad row of a feature table. Duplicate ids are checked last.

    Args:
        paths: a local file for each source of the table.
    """
    checks = list(_row_checks(table))
    if checks:
        counts_sql = ", ".join(f"count(*) FILTER ({check.failure_sql})" for check in checks)
        any_failure_sql = " OR ".join(f"coalesce({check.failure_sql}, false)" for check in checks)
        query = f"SELECT count(*) FILTER ({any_failure_sql}), {counts_sql} FROM {scan_all_sql(paths)}"
        ((num_bad, *check_counts),) = connection.sql(query).fetchall()
        _reject_failures(connection, table, checks, check_counts, num_bad=num_bad, paths=paths)
    if table.id_column is not None:
        column_sql = quoted(table.id_column)
        duplicates_sql = (
            f"SELECT {column_sql} AS id, count(*) AS rows FROM {scan_all_sql(paths)} GROUP BY 1 HAVING count(*) > 1"
        )
        ((num_bad,),) = connection.sql(f"SELECT coalesce(sum(rows), 0)::BIGINT FROM ({duplicates_sql})").fetchall()
        is_duplicate_sql = f"{column_sql} IN (SELECT id FROM ({duplicates_sql}))"
        check = RowCheck(table.id_column, "the id of more than one row", is_duplicate_sql, "keep one row for each id")
        _reject_failures(connection, table, [check], [num_bad], num_bad=num_bad, paths=paths)


def _reject_failures(
    connection: duckdb.DuckDBPyConnection,
    table: FeatureTable,
    checks: Sequence[RowCheck],
    check_counts: Sequence[int],
    *,
    num_bad: int,
    paths: Sequence[Path],
) -> None:
    def find_first() -> BadRow:
        for source, path in zip(table.sources, paths, strict=True):
            # Not DuckDB's file_row_number, because the file may have a column of this name.
            rows_sql = f'(SELECT row_number() OVER () - 1 AS "nightjar row", * FROM {scan_all_sql([path])})'
            bad_row = first_bad_row(connection, checks, rows_sql=rows_sql, row_sql='"nightjar row"', source=source)
            if bad_row is not None:
                return bad_row
        raise AssertionError(f"{table.setting}: {num_bad} bad rows were counted, but none is in the files")

    reject_bad_rows(
        {check.name: count for check, count in zip(checks, check_counts, strict=True)},
        num_bad=num_bad,
        num_rows=sum(source.record.rows for source in table.sources),
        policy=None,
        find_first=find_first,
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
