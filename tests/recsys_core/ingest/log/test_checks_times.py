"""Times that are null, before 1970, in the future or out of range are bad rows in every parquet type."""

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recsys_core.ingest.interaction_logs import ingest, read_store
from tests.recsys_core.ingest.parquet_files import assert_rejects, input_error, write_parquet

LAST_OUT = {"kind": "leave_last_out"}
IDS = {"user_id": [1, 1, 1, 2, 2], "item_id": [5, 6, 7, 5, 6]}
PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
ZONES = (None, "UTC", "Asia/Kolkata")
KINDS = [pa.timestamp(unit, zone) for unit in PER_S for zone in ZONES]
WAY_OUT = (
    "check interactions.timestamp_unit; if it is right, fix the clock of the job that writes these rows, "
    "or raise interactions.max_future_days"
)
FUTURE = 9_000_000_000
"""A time of the year 2255 in seconds."""


def error_parts(path: str, reason: str) -> tuple[str, ...]:
    return (f"{path}: column 't', row 1: ", f" is {reason} (2 of 5 rows); {WAY_OUT}, or set", "on_bad_rows to drop")


def bad_rows_of(tmp_path: Path, *times: int | None, kind: pa.DataType, **settings: Any) -> dict[str, int]:
    """Return the dropped rows of a log that has `times` after five valid events."""
    ids = {name: values + [1] * len(times) for name, values in IDS.items()}
    path = write_parquet(tmp_path / "a.parquet", **ids, t=pa.array([1, 2, 3, 4, 5, *times], kind))
    manifest = ingest(tmp_path / "stage", path, split=LAST_OUT, on_bad_rows="drop", max_bad_share=0.9, **settings)
    assert manifest.num_train_events + manifest.num_validation_events + manifest.num_test_events == 5
    return manifest.num_bad_rows_by_reason


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_timestamp_is_checked(tmp_path: Path, kind: pa.TimestampType) -> None:
    tick = PER_S[kind.unit]
    num_bad_by_check = bad_rows_of(tmp_path, FUTURE * tick, FUTURE * tick + 1, -5 * tick, -tick, -6 * tick, None, kind=kind)
    assert num_bad_by_check == {"t: null": 1, "t: in the future": 2, "t: before 1970": 3}


@pytest.mark.parametrize("unit", PER_S)
def test_integer_times_of_every_unit_are_checked_over_64_bits(tmp_path: Path, unit: str) -> None:
    future = (FUTURE * PER_S[unit], 2**63 - 1)
    num_bad_by_check = bad_rows_of(
        tmp_path / "signed", *future, -5 * PER_S[unit], -(2**63), None, kind=pa.int64(), timestamp_unit=unit
    )
    assert num_bad_by_check == {"t: null": 1, "t: in the future": 2, "t: before 1970": 2}
    num_bad_by_check = bad_rows_of(tmp_path / "unsigned", *future, 2**64 - 1, None, kind=pa.uint64(), timestamp_unit=unit)
    assert num_bad_by_check == {"t: null": 1, "t: in the future": 3}


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        (pa.int64(), 2**63 - 1, "9223372036854775807 is in the future"),
        (pa.int64(), -(2**63), "-9223372036854775808 is before 1970"),
        (pa.int64(), None, "null"),
        (pa.timestamp("ms"), None, "null"),
        (pa.timestamp("ns", "Asia/Kolkata"), -(10**9) * 86_400 * 365, "1969-01-01 05:30:00+05:30 is before 1970"),
        (pa.timestamp("s"), FUTURE, "2255-03-14 16:00:00 is in the future"),
    ],
)
def test_the_message_shows_a_bad_time_as_it_is_in_the_file(
    tmp_path: Path, kind: pa.DataType, value: int | None, shown: str
) -> None:
    path = write_parquet(tmp_path / "a.parquet", **IDS, t=pa.array([1, value, 2, value, 0], kind))
    way_out = "drop these rows" if value is None else WAY_OUT
    parts = (f"{path}: column 't', row 1: {shown} (2 of 5 rows); {way_out}", ", or set interactions.on_bad_rows")
    assert_rejects(lambda folder: ingest(folder, path, split=LAST_OUT), tmp_path, *parts)


@pytest.mark.parametrize(
    ("days", "shown", "reason"),
    [
        (-5, "1969-12-27", "before 1970"),
        (10**6, "4707-11-29", "in the future"),
        (2**31 - 1, "2147483647", "in the future"),
        (-(2**31), "-2147483648", "before 1970"),
    ],
)
def test_dates_are_checked(tmp_path: Path, days: int, shown: str, reason: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", **IDS, t=pa.array([1, days, 2, days, 0], pa.int32()).cast(pa.date32()))
    assert_rejects(
        lambda folder: ingest(folder, path, split=LAST_OUT), tmp_path, f"row 1: {shown} is {reason} (2 of 5", WAY_OUT
    )


@pytest.mark.parametrize(
    ("unit", "value", "zone"),
    [("us", 2**63 - 1, None), ("us", -(2**63) + 1, "UTC"), ("ns", 2**63 - 1, "UTC"), ("ns", -(2**63), None)],
)
def test_the_smallest_and_largest_64_bit_times_are_checked(tmp_path: Path, unit: str, value: int, zone: str | None) -> None:
    path = write_parquet(tmp_path / "a.parquet", **IDS, t=pa.array([1, value, 2, value, 0], pa.timestamp(unit, zone)))
    reason = "in the future" if value > 0 else "before 1970"
    assert_rejects(lambda folder: ingest(folder, path, split=LAST_OUT), tmp_path, *error_parts(path, reason))


def with_times(path: Path, column: pa.Array) -> str:
    """Write a log without statistics, from which the time would be known before a row is read."""
    pq.write_table(pa.table(IDS | {"t": column}), path, write_statistics=False)
    return str(path)


@pytest.mark.parametrize(("value", "policy"), [(2**63 // 100, "fail"), (-(2**63) // 100, "drop"), (-(2**63), "fail")])
def test_the_error_names_a_time_that_has_no_microseconds(tmp_path: Path, value: int, policy: str) -> None:
    path = with_times(tmp_path / "a.parquet", pa.array([1, -1, value, value, 0], pa.timestamp("ms")))
    assert_rejects(
        lambda folder: ingest(folder, path, split=LAST_OUT, on_bad_rows=policy, max_bad_share=0.9), tmp_path,
        "a.parquet: column 't', row 1: 1969-12-31 23:59:59.999000 is before 1970 or in the future; ",
        "no engine can read some of these times", WAY_OUT,
    )  # fmt: skip


@pytest.mark.parametrize(("unit", "value"), [("ms", 2**63 // 100), ("us", -(2**63))])
def test_the_message_about_a_bad_time_in_the_statistics_names_its_column(tmp_path: Path, unit: str, value: int) -> None:
    path = write_parquet(tmp_path / "a.parquet", **IDS, t=pa.array([1, 2, value, value, 0], pa.timestamp(unit)))
    message = "the times of column 't' reach beyond the year 290,000, which cannot be valid; fix the job that writes them"
    assert_rejects(lambda folder: ingest(folder, path, split=LAST_OUT), tmp_path, "a.parquet", message)


@pytest.mark.parametrize(
    "first", [pa.array([1, 2, 3, 10**6], pa.int32()).cast(pa.date32()), pa.array([1, 2, 3, 2**63 // 100], pa.timestamp("us"))]
)
def test_a_time_outside_the_nanosecond_range_of_another_file_is_rejected(tmp_path: Path, first: pa.Array) -> None:
    ids = {name: values[:4] for name, values in IDS.items()}
    paths = [
        write_parquet(tmp_path / "a.parquet", **ids, t=first),
        write_parquet(tmp_path / "b.parquet", **IDS, t=pa.array([1, 2, 3, 4, 5], pa.timestamp("ns"))),
    ]
    assert_rejects(
        lambda folder: ingest(folder, *paths, split=LAST_OUT), tmp_path,
        "a.parquet: column 't', row 3: 4", " is before 1970 or in the future; ", WAY_OUT,
    )  # fmt: skip


def test_a_time_of_tomorrow_is_accepted_and_later_times_depend_on_the_setting(tmp_path: Path) -> None:
    now = dt.datetime.now(dt.UTC)
    times = [now + dt.timedelta(hours=hours) for hours in (0, 1, 23, 30, 2)]
    path = write_parquet(tmp_path / "a.parquet", **IDS, t=pa.array(times, pa.timestamp("us", "UTC")))
    assert_rejects(lambda folder: ingest(folder, path, split=LAST_OUT), tmp_path, "row 3: ", "is in the future (1 of 5")
    assert len(read_store(ingest(tmp_path / "good", path, split=LAST_OUT, max_future_days=2)).items) == 3


DAYS = [{"item_id": [5, 6, 7], "user_id": [1, 1, 1]}, {"item_id": [5, 6], "user_id": [2, 2]}]


@pytest.mark.parametrize(
    ("keys", "settings", "message"),
    [
        (("2024-01-01", "9024-01-02"), {}, "9024-01-02 is in the future (2 of 5"),
        (("2024-01-01", "1924-01-02"), {}, "1924-01-02 is before 1970 (2 of 5"),
        (("4", "-5"), {}, "-5 is before 1970 (3 of 5"),
        (("4", "9223372036854775807"), {"timestamp_unit": "s"}, "9223372036854775807 is in the future (2 of 5"),
    ],
)
def test_a_time_in_a_folder_name_is_checked(
    tmp_path: Path, keys: tuple[str, str], settings: dict[str, Any], message: str
) -> None:
    first, second = sorted(keys)
    write_parquet(tmp_path / "log" / f"t={first}" / "a.parquet", **DAYS[0])
    write_parquet(tmp_path / "log" / f"t={second}" / "a.parquet", **DAYS[1])
    log = str(tmp_path / "log")
    row = f"t={message.split()[0]}/a.parquet: column 't', row 0: "
    if message.startswith("1924"):
        message = message.replace("2 of 5", "3 of 5")
    assert_rejects(lambda folder: ingest(folder, log, split=LAST_OUT, **settings), tmp_path, row + message, WAY_OUT)


def test_text_in_a_folder_name_is_rejected_as_a_time(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t=monday" / "a.parquet", **DAYS[0])
    with input_error("t=monday/a.parquet: column 't' is string, but has to be a timestamp, a date or an integer; cast it"):
        ingest(tmp_path / "stage", str(tmp_path), split=LAST_OUT)
