"""Row checks of the input stages: SQL conditions for unusable rows, and the decision to drop these rows or raise an error.

Rows of the interaction log and of the feature tables are checked in SQL, with `RowCheck`. Rows of pretrained vectors are
checked in NumPy (see vectors/row_faults.py). All three ingest stages call `reject_bad_rows`, which raises InputError unless the
config drops such rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from recsys_core.errors import InputError, shown
from recsys_core.parquet.sources import Source

_BATCH_ROWS = 1_024
FIX_ROWS = "drop these rows, or fix the job that writes them"


@dataclass(frozen=True)
class RowCheck:
    """A check in SQL that every row of an input table has to pass."""

    column: str
    reason: str
    """Fault of a row that fails the check. It completes the sentence "<value> is ...", for example "in the future"."""
    failure_sql: str
    """SQL: true for a row that fails, false or null for a row that passes."""
    fix: str
    """Instruction to the user, for the end of the message."""

    @property
    def name(self) -> str:
        """Name of the check in messages, and in the counts of dropped rows in a manifest."""
        return f"{self.column}: {self.reason}"

    def problem(self, value: object) -> str:
        """Describe the fault of `value` for a message.

        >>> RowCheck("t", "in the future", "t > 5", FIX_ROWS).problem(7)
        '7 is in the future'
        """
        if value is None and self.reason.startswith("null"):
            return "null"
        return f"{shown(value)} is {self.reason}"


@dataclass(frozen=True)
class BadRow:
    """Description of an unusable row for an error message."""

    file_name: str
    column: str
    row: int | None
    """Index of the row in its file; None for a table that Spark reads, whose rows have no order."""
    problem: str
    check_name: str
    """Name of the check that the row fails."""
    fix: str


@dataclass(frozen=True)
class BadRowPolicy:
    """The settings `on_bad_rows` and `max_bad_share` of one input."""

    setting: str
    """Config key that holds the two settings, for messages."""
    on_bad_rows: Literal["fail", "drop"]
    max_bad_share: float

    def allows_drop(self, num_bad_rows: int, *, num_rows: int) -> bool:
        """Return whether `num_bad_rows` of `num_rows` rows are dropped without an error."""
        return self.on_bad_rows == "drop" and num_bad_rows <= self.max_bad_share * num_rows and num_bad_rows < num_rows


def reject_bad_rows(
    num_bad_rows_by_check: Mapping[str, int],
    *,
    num_bad_rows: int,
    num_rows: int,
    policy: BadRowPolicy | None,
    find_first_bad_row: Callable[[], BadRow],
) -> None:
    """Raise InputError for the first bad row, unless the policy drops the bad rows.

    Args:
        num_bad_rows_by_check: number of rows that fail each check, by the name of the check.
        num_bad_rows: number of rows that fail at least one check.
        policy: None if bad rows of this input can never be dropped.
        find_first_bad_row: returns the first bad row; called only if there is an error to report.
    """
    if num_bad_rows == 0 or (policy is not None and policy.allows_drop(num_bad_rows, num_rows=num_rows)):
        return
    bad_row = find_first_bad_row()
    check_counts_text = ", ".join(f"{name} {count:,}" for name, count in num_bad_rows_by_check.items() if count)
    if policy is None or (policy.on_bad_rows == "fail" and num_bad_rows == num_rows):
        reason_and_fix = bad_row.fix
    elif num_bad_rows == num_rows:
        reason_and_fix = f"all {num_rows:,} rows are bad ({check_counts_text}); fix these rows"
    elif policy.on_bad_rows == "fail":
        reason_and_fix = f"{bad_row.fix}, or set {policy.setting}.on_bad_rows to drop"
        if num_bad_rows > policy.max_bad_share * num_rows:
            sufficient_share = math.ceil(10_000 * num_bad_rows / num_rows) / 10_000
            reason_and_fix += f" and {policy.setting}.max_bad_share to {sufficient_share:g}"
    else:
        reason_and_fix = (
            f"{num_bad_rows:,} of {num_rows:,} rows are bad ({check_counts_text}), a share of {num_bad_rows / num_rows:.4f}, "
            f"but {policy.setting}.max_bad_share is {policy.max_bad_share:g}; fix these rows, or raise it"
        )
    row_text = "" if bad_row.row is None else f", row {bad_row.row}"
    raise InputError(
        f"{bad_row.file_name}: column {bad_row.column!r}{row_text}: {bad_row.problem} "
        f"({num_bad_rows_by_check[bad_row.check_name]:,} of {num_rows:,} rows); {reason_and_fix}"
    )


def pass_sql(checks: Sequence[RowCheck]) -> str:
    """Return an SQL condition that is true for the rows that pass all `checks`."""
    return " AND ".join(f"NOT coalesce({check.failure_sql}, false)" for check in checks)


def first_bad_row(
    fetch_rows: Callable[[str], list[tuple[Any, ...]]],
    checks: Sequence[RowCheck],
    *,
    rows_sql: str,
    row_sql: str,
    source: Source,
) -> BadRow | None:
    """Return the first row of one file that fails a check, with the first check that it fails; None if every row passes.

    Args:
        fetch_rows: executes a query and returns all rows of its result.
        rows_sql: SQL for the rows of the file.
        row_sql: SQL for the number of a row in the file, from 0.
    """
    failure_flags_sql = ", ".join(f"coalesce({check.failure_sql}, false)" for check in checks)
    query = f"SELECT {row_sql}, {failure_flags_sql} FROM {rows_sql} WHERE NOT ({pass_sql(checks)}) ORDER BY 1 LIMIT 1"
    for row, *failure_flags in fetch_rows(query):
        check = checks[failure_flags.index(True)]
        (value,) = values_at(source, [check.column], row)
        problem = check.problem(value)
        return BadRow(source.name, check.column, row, problem, check_name=check.name, fix=check.fix)
    return None


def values_at(source: Source, columns: Sequence[str], row: int) -> list[Any]:
    """Return the values of `columns` in one row of a file.

    pyarrow reads the row, because an out-of-range time breaks the connection to DuckDB.
    """
    columns_in_file = [column for column in columns if column not in source.partition_values]
    value_by_column = {column: source.partition_value(column) for column in columns if column in source.partition_values}
    with source.open() as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns_in_file) if columns_in_file else ():
            if row < batch.num_rows:
                value_by_column |= {column: _as_python(batch.column(column)[row]) for column in columns_in_file}
                break
            row -= batch.num_rows
    return [value_by_column[column] for column in columns]


def _as_python(scalar: pa.Scalar) -> Any:
    """Return the Python value; for a time outside the range of datetime, return its integer."""
    if pa.types.is_timestamp(scalar.type) and scalar.type.unit == "ns":  # Python's datetime has no nanoseconds
        scalar = scalar.cast(pa.timestamp("us", scalar.type.tz), safe=False)
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        return scalar.value
