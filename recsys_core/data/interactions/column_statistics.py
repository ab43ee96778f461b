"""What is known about the columns of the log once it is read, summed over tonight's files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import duckdb

from recsys_core.data.interactions.config import InteractionsConfig
from recsys_core.data.interactions.filters import as_time
from recsys_core.data.interactions.schema import InteractionsInput
from recsys_core.manifests import ColumnFacts, LogPart, ReadFile
from recsys_core.parquet.duckdb_session import scan

LONG_ID = 1_000


def bad_rows(parts: Sequence[LogPart], found: InteractionsInput) -> dict[str, int]:
    """Dropped rows by `<column>: <reason>`."""
    total: dict[str, int] = {}
    for file in _files(parts, found):
        for name, count in file.bad_rows.items():
            total[name] = total.get(name, 0) + count
    return total


def column_facts(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    found: InteractionsInput,
    *,
    parts: Sequence[LogPart],
    out: Path,
) -> dict[str, ColumnFacts]:
    """Per column: nulls, values out of range, ids, smallest and largest value."""
    bad, files = bad_rows(parts, found), list(_files(parts, found))
    facts: dict[str, ColumnFacts] = {}
    for column in config.columns:
        nulls = sum(count for name, count in bad.items() if name.startswith(f"{column}: null"))
        others = sum(count for name, count in bad.items() if name.startswith(f"{column}: ")) - nulls
        spans = [file.spans[column] for file in files if column in file.spans]
        low, high = (min(span[0] for span in spans), max(span[1] for span in spans)) if spans else (None, None)
        first, last = (_told(value, timed=column == config.timestamp_column) for value in (low, high))
        facts[column] = ColumnFacts(nulls=nulls, out_of_range=others, first=first, last=last)
    for side, column, kind in (
        ("user", config.user_column, found.user_id_type),
        ("item", config.item_column, found.item_id_type),
    ):
        strange = rf"length(id) > {LONG_ID} OR regexp_matches(id, '[\p{{Cc}}\p{{Cf}}]')" if kind == "string" else "false"
        ((distinct, odd),) = connection.sql(
            f"SELECT count(*) FILTER (events > 0), count(*) FILTER (events > 0 AND ({strange})) "
            f"FROM {scan(out / f'{side}s.parquet')}"
        ).fetchall()
        facts[column] = facts[column].model_copy(update={"distinct": distinct, "odd": odd})
    return facts


def _files(parts: Sequence[LogPart], found: InteractionsInput) -> Iterator[ReadFile]:
    live = found.splits
    return (file for part in parts for file in part.files if file.source in live)


def _told(value: float | None, *, timed: bool) -> str | None:
    if value is None:
        return None
    return as_time(int(value)) if timed else f"{value:g}"
