"""What can be wrong with a row of the log, as SQL over the view `raw` (see log_parts): counted in one scan, then named."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa

from recsys_core.data.files.sources import Source
from recsys_core.data.log.config import InteractionsConfig
from recsys_core.errors import InputError

DAY_US = 86_400_000_000
SHOWN_CHARACTERS = 80


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
    for alias, column in (("user", config.user_column), ("item", config.item_column)):
        checks += _id_checks(alias, column, schema[column])
    if config.timestamp_column is not None:
        now = time.time_ns() // 1_000 if now_us is None else now_us
        checks += _time_checks(config, config.timestamp_column, latest=now + int(config.max_future_days * DAY_US))
    mend = "drop these rows, or mend what writes them"
    if config.order_column is not None:
        checks.append(
            Check(config.order_column, "null or not a number", _no_number("sequence", schema[config.order_column]), mend)
        )
    if config.label_column is not None:
        checks.append(
            Check(config.label_column, "null or not a number", _no_number("label", schema[config.label_column]), mend)
        )
    if config.label_range is not None and config.label_column is not None:
        low, high = config.label_range
        outside = f"label::DOUBLE < {low!r} OR label::DOUBLE > {high!r}"
        checks.append(Check(config.label_column, f"outside of {low:g} to {high:g}", outside, "see interactions.label_range"))
    if config.weight_column is not None:
        checks.append(
            Check(config.weight_column, "null or not a number", _no_number("weight", schema[config.weight_column]), mend)
        )
        checks.append(Check(config.weight_column, "negative", "weight < 0", "a weight is 0 or more"))
        checks.append(Check(config.weight_column, "infinite", "isinf(weight::DOUBLE)", mend))
    return checks


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
    check = next(check for check in checks if any(check.name in each.counts for each in found))
    count = sum(each.counts.get(check.name, 0) for each in found)
    query = f"SELECT source, row FROM raw WHERE {check.condition} ORDER BY source, row LIMIT 1"
    ((source, row),) = connection.sql(query).fetchall()
    way_out = f"{check.hint}; or set interactions.on_bad_rows to drop"
    if config.on_bad_rows == "drop":
        way_out = (
            f"{bad:,} of {rows:,} rows are bad, a share of {bad / rows:.4f}, above interactions.max_bad_share, "
            f"{config.max_bad_share:g}"
        )
    value = shown(value_at(sources[source], check.column, row))
    raise InputError(
        f"{sources[source].name}: column {check.column!r}, row {row}: {value} is {check.reason}, as in {count:,} of {rows:,} "
        f"rows in all; {way_out}"
    )


def value_at(source: Source, column: str, row: int) -> Any:
    """The value as pyarrow reads it: a wild time ends DuckDB's connection when it is printed."""
    if column in source.partition:
        return source.constant(column)
    with source.open() as file:
        for group, rows in enumerate(source.footer.group_rows_G):
            if row < rows:
                scalar = file.read_row_group(group, columns=[column]).column(0)[row]
                try:
                    return scalar.as_py()
                except (ValueError, OverflowError):  # a time that Python has no word for
                    return scalar.cast(pa.int64()).as_py()
            row -= rows
    raise AssertionError(f"{source.name} has no such row")


def shown(value: Any) -> str:
    """A value of the input for a message: on one line, no control characters, not endless.

    >>> shown("a\\nb"), shown(None)
    ("'a\\\\nb'", 'null')
    """
    text = "null" if value is None else ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}\N{HORIZONTAL ELLIPSIS}"


def _id_checks(alias: str, column: str, kind: pa.DataType) -> list[Check]:
    checks = [Check(column, "null", f'"{alias}" IS NULL', "drop these rows, or mend what writes them")]
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_uint64(value):
        checks.append(
            Check(column, "over int64", f'"{alias}" > 9223372036854775807', "ids fit into int64; write them as strings")
        )
    if not pa.types.is_integer(value):
        checks.append(Check(column, "an empty string", f"\"{alias}\" = ''", "drop these rows, or mend what writes them"))
    return checks


def _time_checks(config: InteractionsConfig, column: str, *, latest: int) -> list[Check]:
    unit = "is interactions.timestamp_unit right? else mend the clock that writes them, or raise interactions.max_future_days"
    return [
        Check(column, "null", "time IS NULL", "drop these rows, or mend what writes them"),
        # What does not fit into 64 bits of microseconds becomes null in `position`.
        Check(column, "in the future", f"position > {latest} OR (position IS NULL AND time IS NOT NULL)", unit),
        Check(column, "before 1970", "position < 0", unit),
    ]


def _no_number(alias: str, kind: pa.DataType) -> str:
    nan = f" OR isnan({alias}::DOUBLE)" if pa.types.is_floating(kind) else ""
    return f"{alias} IS NULL{nan}"
