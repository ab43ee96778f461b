"""Statistics of the log's files and columns, and checks that reject an unusable log.

Shapes: R rows of a vocabulary.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys_core.errors import InputError
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine import FileStatistics, LogCounts, Vocabulary
from recsys_core.ingest.row_checks import BadRow, BadRowPolicy, reject_bad_rows
from recsys_core.manifests import SPLITS, ColumnStatistics, IngestedFile, LogPart, SourceFile
from recsys_core.parquet.sources import Source
from recsys_core.units import DAY_US

TIMES_ADVICE = "check interactions.timestamp_unit; if it is right, fix the clock of the job that writes these rows"
FUTURE_ADVICE = f"{TIMES_ADVICE}, or raise interactions.max_future_days"
FUTURE_REASON = "in the future"
MAX_USUAL_ID_CHARACTERS = 1_000
"""A longer id is reported as unusual."""
UNUSUAL_CHARACTERS = r"[\p{Cc}\p{Cf}]"
"""Control characters, and format characters such as direction marks."""


def latest_valid_time_us(config: InteractionsConfig) -> int:
    """Return the latest time, in microseconds, that does not make a row bad."""
    return time.time_ns() // 1_000 + int(config.max_future_days * DAY_US)


def columns_by_role(config: InteractionsConfig) -> dict[str, str]:
    """Return the columns whose smallest and largest values are reported, by role: position, label or weight."""
    column_by_role = {
        "position": config.timestamp_column or config.order_column,
        "label": config.label_column,
        "weight": config.weight_column,
    }
    return {role: column for role, column in column_by_role.items() if column is not None}


def reject_bad_log(
    config: InteractionsConfig,
    statistics: Sequence[FileStatistics],
    *,
    sources: Sequence[Source],
    check_names: Sequence[str],
    find_first_bad_row: Callable[[int], BadRow],
) -> None:
    """Raise InputError for a file whose number of rows differs from its footer, or for the first bad row.

    Bad rows are accepted if on_bad_rows is drop and at most max_bad_share of the rows are bad.

    Args:
        statistics: statistics of each source.
        check_names: names of all checks.
        find_first_bad_row: returns the first bad row of the source with the given index.
    """
    for source, file_statistics in zip(sources, statistics, strict=True):
        if file_statistics.num_rows != source.record.num_rows:
            raise InputError(
                f"{source.name}: damaged: the footer declares {source.record.num_rows:,} rows, but the file has "
                f"{file_statistics.num_rows:,}; write the file again"
            )
    reject_bad_rows(
        {
            name: sum(file_statistics.num_bad_rows_by_check.get(name, 0) for file_statistics in statistics)
            for name in check_names
        },
        num_bad_rows=sum(file_statistics.num_bad_rows for file_statistics in statistics),
        num_rows=sum(file_statistics.num_rows for file_statistics in statistics),
        policy=BadRowPolicy("interactions", config.on_bad_rows, config.max_bad_share),
        find_first_bad_row=lambda: find_first_bad_row(
            next(index for index, file_statistics in enumerate(statistics) if file_statistics.num_bad_rows)
        ),
    )


def reject_unusable_log(config: InteractionsConfig, counts: LogCounts, *, first_file_name: str) -> None:
    """Raise InputError if there are no events, no training or test events, or only one user or item."""
    if counts.num_read_events == 0 and config.label_column:
        raise InputError(
            f"{first_file_name}: column {config.label_column!r}: no event reaches interactions.label_threshold, "
            f"{config.label_threshold}; lower it"
        )
    if counts.num_read_events == 0:
        raise InputError(f"{first_file_name}: all rows of the log are bad; see interactions.on_bad_rows")
    if not any(counts.num_events_by_split):
        raise InputError(f"{first_file_name}: interactions.filter removes all events; relax it")
    num_events_by_split = dict(zip(SPLITS, counts.num_events_by_split, strict=True))
    split_sizes_text = ", ".join(f"{num_events:,} {split}" for split, num_events in num_events_by_split.items())
    for split in ("train", "test"):
        if not num_events_by_split[split]:
            raise InputError(
                f"{first_file_name}: the split {config.split.kind!r} leaves no {split} events ({split_sizes_text}); "
                "change interactions.split"
            )
    for side, column in (("user", config.user_column), ("item", config.item_column)):
        if side in counts.sides_with_one_id:
            raise InputError(f"{first_file_name}: column {column!r}: the log has a single {side}; a model needs at least two")


def bad_row_counts(files: Sequence[IngestedFile]) -> dict[str, int]:
    """Return the number of dropped rows by check. A check is named `<column>: <reason>`."""
    return sum((Counter(ingested_file.num_bad_rows_by_reason) for ingested_file in files), Counter())


def column_statistics(
    config: InteractionsConfig,
    files: Sequence[IngestedFile],
    *,
    vocabularies_and_counts: Sequence[tuple[Vocabulary, NDArray[np.int64]]],
    num_nulls_by_context_column: Mapping[str, int],
    num_events: int,
) -> dict[str, ColumnStatistics]:
    """Return the statistics of each column in `files`.

    Args:
        vocabularies_and_counts: each vocabulary with the number of events of each id, int64 [R].
        num_nulls_by_context_column: number of events with a null. Such an event is not a bad row.
        num_events: number of events after the filters.
    """
    num_bad_rows_by_check = bad_row_counts(files)
    statistics: dict[str, ColumnStatistics] = {}
    for column in config.columns:
        num_nulls = sum(
            count for check_name, count in num_bad_rows_by_check.items() if check_name.startswith(f"{column}: null")
        )
        num_bad_rows = sum(count for check_name, count in num_bad_rows_by_check.items() if check_name.startswith(f"{column}: "))
        column_spans = [ingested_file.spans[column] for ingested_file in files if column in ingested_file.spans]
        min_value = max_value = None
        if column_spans:
            is_time = column == config.timestamp_column
            min_value = _as_text(min(file_min for file_min, _ in column_spans), is_time=is_time)
            max_value = _as_text(max(file_max for _, file_max in column_spans), is_time=is_time)
        statistics[column] = ColumnStatistics(
            num_nulls=num_nulls, num_out_of_range=num_bad_rows - num_nulls, min_value=min_value, max_value=max_value
        )
    # A null in a checked column makes a row bad, so it is already counted with the bad rows.
    checked_columns = {config.user_column, config.item_column, *columns_by_role(config).values()}
    for column, num_nulls in num_nulls_by_context_column.items():
        if column not in checked_columns:
            statistics[column] = ColumnStatistics(num_nulls=num_nulls, num_checked_values=num_events)
    for vocabulary, event_count_R in vocabularies_and_counts:
        column = config.user_column if vocabulary.side == "user" else config.item_column
        ids_with_event = vocabulary.ids.filter(pa.array(event_count_R > 0))
        id_counts = {"num_distinct": len(ids_with_event), "num_unusual_ids": _num_unusual_ids(ids_with_event)}
        statistics[column] = statistics[column].model_copy(update=id_counts)
    return statistics


def current_files(parts: Sequence[LogPart], *, input_files: Collection[SourceFile]) -> list[IngestedFile]:
    """Return the files in `parts` that are still input files and have not changed."""
    return [file for part in parts for file in part.files if file.source in input_files]


def _num_unusual_ids(ids: pa.ChunkedArray) -> int:
    """Return the number of very long ids and of ids with control or format characters."""
    if not pa.types.is_string(ids.type):
        return 0
    is_long = pc.greater(pc.utf8_length(ids), MAX_USUAL_ID_CHARACTERS)
    is_unusual = pc.or_(is_long, pc.match_substring_regex(ids, UNUSUAL_CHARACTERS))
    return int(pc.sum(is_unusual, min_count=0).as_py())


def iso_time(time_us: int) -> str:
    """Return an ISO 8601 time in UTC, to the second.

    >>> iso_time(1_763_600_000_000_000)
    '2025-11-20T00:53:20+00:00'
    """
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="seconds")


def _as_text(value: float, *, is_time: bool) -> str:
    return iso_time(int(value)) if is_time else f"{value + 0.0:g}"  # the sum turns -0.0 into 0.0
