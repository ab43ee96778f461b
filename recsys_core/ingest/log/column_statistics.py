"""Statistics of the log's columns over all input files: nulls, out-of-range values, value ranges, and unusual ids."""

from collections.abc import Sequence
from pathlib import Path

import duckdb

from recsys_core.dataset.layout import vocabulary_file
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.filters import iso_time
from recsys_core.ingest.log.log_schema import InteractionsInput
from recsys_core.manifests import ColumnFacts, IngestedFile, LogPart
from recsys_core.parquet.duckdb_session import scan_sql

MAX_USUAL_ID_CHARACTERS = 1_000
"""Largest number of characters of an id; a longer id is reported as unusual."""


def bad_row_counts(parts: Sequence[LogPart], log: InteractionsInput) -> dict[str, int]:
    """Return the number of dropped rows by check. A check is named `<column>: <reason>`."""
    num_bad_by_check: dict[str, int] = {}
    for ingested_file in _current_files(parts, log):
        for check_name, count in ingested_file.bad_rows.items():
            num_bad_by_check[check_name] = num_bad_by_check.get(check_name, 0) + count
    return num_bad_by_check


def column_statistics(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    log: InteractionsInput,
    *,
    parts: Sequence[LogPart],
    output_folder: Path,
) -> dict[str, ColumnFacts]:
    """Return the statistics of each column. `output_folder` holds users.parquet and items.parquet."""
    num_bad_by_check, current_files = bad_row_counts(parts, log), _current_files(parts, log)
    statistics: dict[str, ColumnFacts] = {}
    for column in config.columns:
        num_nulls = sum(count for check_name, count in num_bad_by_check.items() if check_name.startswith(f"{column}: null"))
        num_bad_rows = sum(count for check_name, count in num_bad_by_check.items() if check_name.startswith(f"{column}: "))
        bounds_by_file = [ingested_file.spans[column] for ingested_file in current_files if column in ingested_file.spans]
        min_value = max_value = None
        if bounds_by_file:
            is_time = column == config.timestamp_column
            min_value = _as_text(min(low for low, _ in bounds_by_file), is_time=is_time)
            max_value = _as_text(max(high for _, high in bounds_by_file), is_time=is_time)
        statistics[column] = ColumnFacts(
            nulls=num_nulls, out_of_range=num_bad_rows - num_nulls, min_value=min_value, max_value=max_value
        )
    for side, column, id_type in (
        ("user", config.user_column, log.user_id_type),
        ("item", config.item_column, log.item_id_type),
    ):
        # Cc and Cf: control characters, and format characters such as direction marks.
        is_unusual_sql = (
            rf"length(id) > {MAX_USUAL_ID_CHARACTERS} OR regexp_matches(id, '[\p{{Cc}}\p{{Cf}}]')"
            if id_type == "string"
            else "false"
        )
        ((num_ids, num_unusual),) = connection.sql(
            f"SELECT count(*) FILTER (events > 0), count(*) FILTER (events > 0 AND ({is_unusual_sql})) "
            f"FROM {scan_sql(output_folder / vocabulary_file(side))}"
        ).fetchall()
        statistics[column] = statistics[column].model_copy(update={"distinct": num_ids, "unusual_ids": num_unusual})
    return statistics


def _current_files(parts: Sequence[LogPart], log: InteractionsInput) -> list[IngestedFile]:
    """Return those files of the parts that are still input files. Other files of a part are outdated."""
    current_sources = set(log.split_code_by_file)
    return [file for part in parts for file in part.files if file.source in current_sources]


def _as_text(value: float, *, is_time: bool) -> str:
    return iso_time(int(value)) if is_time else f"{value:g}"
