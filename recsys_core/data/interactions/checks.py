"""What can be wrong with a row of the log, as SQL over the view `raw` (see log_parts): counted in one scan, then named."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa

from recsys_core.data.interactions.config import InteractionsConfig
from recsys_core.errors import InputError, shown
from recsys_core.parquet.sources import Source
from recsys_core.units import DAY_US, FLOAT32_MAX, INT64_MAX

MEND = "drop these rows, or mend what writes them"
CLOCK = "is interactions.timestamp_unit right? else mend the clock that writes them, or raise interactions.max_future_days"


FUTURE = "in the future"


@dataclass(frozen=True)
class Check:
    """A fault of a row: `condition` is SQL over `raw`, true (not null) where the row has it."""

    column: str
    reason: str
    condition: str
    hint: str

    @property
    def name(self) -> str:
        """How manifests count it."""
        return f"{self.column}: {self.reason}"


def row_checks(config: InteractionsConfig, *, schema: Mapping[str, pa.DataType], now_us: int | None = None) -> list[Check]:
    """All checks of this log. `schema` has the type of each column; `now_us` is the current time in microseconds."""
    checks: list[Check] = []
    for alias, id_column in (("user", config.user_column), ("item", config.item_column)):
        checks += _id_checks(alias, id_column, schema[id_column])
    if config.timestamp_column is not None:
        checks += _time_checks(config.timestamp_column, latest=latest_time(config, now_us=now_us))
    numbers = {"sequence": config.order_column, "label": config.label_column, "weight": config.weight_column}
    for alias, name in numbers.items():
        if name is not None:
            checks += _number_checks(alias, name, schema[name])
    if config.order_column is not None and pa.types.is_uint64(schema[config.order_column]):
        checks.append(Check(config.order_column, "over int64", f"sequence > {INT64_MAX}", MEND))
    if config.label_range is not None and config.label_column is not None:
        low, high = config.label_range
        outside = f"isfinite(label::DOUBLE) AND (label::DOUBLE < {low!r} OR label::DOUBLE > {high!r})"  # NaN is above all
        checks.append(Check(config.label_column, f"outside of {low:g} to {high:g}", outside, "see interactions.label_range"))
    if config.weight_column is not None:
        checks.append(
            Check(config.weight_column, "negative", "weight < 0 AND isfinite(weight::DOUBLE)", "a weight is 0 or more")
        )
        large = f"weight::DOUBLE > {FLOAT32_MAX!r} AND isfinite(weight::DOUBLE)"
        checks.append(Check(config.weight_column, "too large for float32", large, MEND))
    return checks


def latest_time(config: InteractionsConfig, *, now_us: int | None = None) -> int:
    """The latest time that is no bad row, in microseconds."""
    now = time.time_ns() // 1_000 if now_us is None else now_us
    return now + int(config.max_future_days * DAY_US)


def good_rows(checks: Sequence[Check]) -> str:
    """SQL that is true for the rows without a fault."""
    return " AND ".join(f"NOT coalesce({check.condition}, false)" for check in checks)


@dataclass(frozen=True)
class FileFacts:
    """What one scan found in a file: rows, rows with any fault, rows per check, smallest and largest good values."""

    rows: int = 0
    bad: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def scan_rows(
    connection: duckdb.DuckDBPyConnection, checks: Sequence[Check], *, files: int, numbers: Sequence[str], threshold: str
) -> list[FileFacts]:
    """The facts of all `files`, in one scan.

    Args:
        numbers: aliases in `raw` whose span is wanted.
        threshold: SQL for the good rows that stay events; the span of `position` is theirs.
    """
    good = good_rows(checks)
    counts = [f"count(*) FILTER ({check.condition})" for check in checks]
    stays = {"position": f"{good}{threshold}"}
    spans = [f"{end}({alias}::DOUBLE) FILTER ({stays.get(alias, good)})" for alias in numbers for end in ("min", "max")]
    values = ", ".join(["source", "count(*)", f"count(*) FILTER (NOT ({good}))", *counts, *spans])
    facts = [FileFacts()] * files  # a file without rows is not among the groups
    for source, rows, bad, *rest in connection.sql(f"SELECT {values} FROM raw GROUP BY source").fetchall():
        ends = rest[len(checks) :]
        facts[source] = FileFacts(
            rows,
            bad,
            {check.name: count for check, count in zip(checks, rest, strict=False) if count},
            {
                alias: pair
                for alias, pair in zip(numbers, zip(ends[::2], ends[1::2], strict=True), strict=True)
                if pair[0] is not None
            },
        )
    return facts


def refuse_bad_rows(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    checks: Sequence[Check],
    found: Sequence[FileFacts],
    *,
    sources: Sequence[Source],
) -> None:
    """InputError for the first bad row under on_bad_rows: fail, and above max_bad_share under drop."""
    rows, bad = sum(each.rows for each in found), sum(each.bad for each in found)
    if not bad or (config.on_bad_rows == "drop" and bad <= config.max_bad_share * rows):
        return
    check, source, row = _first_bad(connection, checks, found)
    count = sum(each.counts.get(check.name, 0) for each in found)
    way_out = f"{check.hint}; or set interactions.on_bad_rows to drop"
    if config.on_bad_rows == "drop":
        way_out = (
            f"{bad:,} of {rows:,} rows are bad, a share of {bad / rows:.4f}, above interactions.max_bad_share, "
            f"{config.max_bad_share:g}; mend them, or raise it"
        )
    value = value_at(sources[source], check.column, row)
    what = "null" if value is None else f"{shown(value)} is {check.reason}"
    raise InputError(
        f"{sources[source].name}: column {check.column!r}, row {row}: {what}, as in {count:,} of {rows:,} rows in all; "
        f"{way_out}"
    )


def _first_bad(
    connection: duckdb.DuckDBPyConnection, checks: Sequence[Check], found: Sequence[FileFacts]
) -> tuple[Check, int, int]:
    """The first bad row in the order of the files: the first check that it fails, its file and its row there."""
    first = next(source for source, facts in enumerate(found) if facts.bad)
    faults = ", ".join(f"coalesce({check.condition}, false)" for check in checks)
    query = f"SELECT row, {faults} FROM raw WHERE source = {first} AND NOT ({good_rows(checks)}) ORDER BY row LIMIT 1"
    ((row, *fails),) = connection.sql(query).fetchall()
    return checks[fails.index(True)], first, row


def value_at(source: Source, column: str, row: int) -> Any:
    """The value as pyarrow reads it: a wild time ends DuckDB's connection when it is printed."""
    if column in source.partition:
        return source.constant(column)
    with source.open() as file:
        for group, rows in enumerate(source.footer.group_rows):
            if row < rows:
                scalar = file.read_row_group(group, columns=[column]).column(0)[row]
                if pa.types.is_timestamp(scalar.type) and scalar.type.unit == "ns":  # Python has no nanoseconds
                    scalar = scalar.cast(pa.timestamp("us", scalar.type.tz), safe=False)
                try:
                    return scalar.as_py()
                except (ValueError, OverflowError):  # a time that Python has no word for
                    return scalar.value
            row -= rows
    raise AssertionError(f"{source.name} has no such row")


def _id_checks(alias: str, column: str, kind: pa.DataType) -> list[Check]:
    checks = [Check(column, "null", f'"{alias}" IS NULL', MEND)]
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_uint64(value):
        checks.append(Check(column, "over int64", f'"{alias}" > {INT64_MAX}', "ids fit into int64; write them as strings"))
    if not pa.types.is_integer(value):
        checks.append(Check(column, "an empty string", f"\"{alias}\" = ''", MEND))
    return checks


def _time_checks(column: str, *, latest: int) -> list[Check]:
    # What does not fit into 64 bits of microseconds becomes null in `position`; `early` still tells which end it is.
    lost = "position IS NULL AND time IS NOT NULL"
    return [
        Check(column, "null", "time IS NULL", MEND),
        Check(column, FUTURE, f"position > {latest} OR ({lost} AND NOT early)", CLOCK),
        Check(column, "before 1970", f"position < 0 OR ({lost} AND early)", CLOCK),
    ]


def _number_checks(alias: str, column: str, kind: pa.DataType) -> list[Check]:
    if not pa.types.is_floating(kind):
        return [Check(column, "null or not a number", f"{alias} IS NULL", MEND)]
    return [
        Check(column, "null or not a number", f"{alias} IS NULL OR isnan({alias}::DOUBLE)", MEND),
        Check(column, "infinite", f"isinf({alias}::DOUBLE)", MEND),
    ]
