"""Times that are null, before 1970, in the future or out of range, in every parquet type of times."""

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.parquet_files import assert_rejects, raises_input_error, write_parquet

LEAVE_LAST_OUT = {"kind": "leave_last_out"}
IDS = {"user_id": [1, 1, 1, 2, 2], "item_id": [5, 6, 7, 5, 6]}
TICKS_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
ZONES = (None, "UTC", "Asia/Kolkata")
TIMESTAMP_TYPES = [pa.timestamp(unit, zone) for unit in TICKS_PER_S for zone in ZONES]
REMEDY = "check interactions.timestamp_unit; if it is right, fix the clock of the job that writes these rows"
FUTURE_REMEDY = f"{REMEDY}, or raise interactions.max_future_days"
REMEDY_BY_REASON = {"before 1970": REMEDY, "in the future": FUTURE_REMEDY}
FUTURE_S = 9_000_000_000
"""A time of the year 2255, in seconds since 1970."""


def num_dropped_rows_by_reason(folder: Path, *bad_times: int | None, time_type: pa.DataType, **settings: Any) -> dict[str, int]:
    """Ingest a log that has `bad_times` after five valid events. Return the number of dropped rows by reason."""
    ids = {name: values + [1] * len(bad_times) for name, values in IDS.items()}
    path = write_parquet(folder / "a.parquet", **ids, t=pa.array([1, 2, 3, 4, 5, *bad_times], time_type))
    manifest = ingest(folder / "stage", path, split=LEAVE_LAST_OUT, on_bad_rows="drop", max_bad_share=0.9, **settings)
    assert manifest.num_events == 5
    return manifest.num_bad_rows_by_reason


@pytest.mark.parametrize("time_type", TIMESTAMP_TYPES, ids=str)
def test_timestamps_of_every_unit_and_zone_are_checked(tmp_path: Path, time_type: pa.TimestampType) -> None:
    ticks_per_s = TICKS_PER_S[time_type.unit]
    num_dropped_rows = num_dropped_rows_by_reason(
        tmp_path,
        FUTURE_S * ticks_per_s,
        FUTURE_S * ticks_per_s + 1,
        -5 * ticks_per_s,
        -ticks_per_s,
        -6 * ticks_per_s,
        None,
        time_type=time_type,
    )
    assert num_dropped_rows == {"t: null": 1, "t: in the future": 2, "t: before 1970": 3}


@pytest.mark.parametrize("unit", TICKS_PER_S)
def test_integer_times_of_every_unit_are_checked_up_to_the_limits_of_64_bits(tmp_path: Path, unit: str) -> None:
    future_times = (FUTURE_S * TICKS_PER_S[unit], 2**63 - 1)
    num_dropped_rows = num_dropped_rows_by_reason(
        tmp_path / "signed", *future_times, -5 * TICKS_PER_S[unit], -(2**63), None, time_type=pa.int64(), timestamp_unit=unit
    )
    assert num_dropped_rows == {"t: null": 1, "t: in the future": 2, "t: before 1970": 2}
    num_dropped_rows = num_dropped_rows_by_reason(
        tmp_path / "unsigned", *future_times, 2**64 - 1, None, time_type=pa.uint64(), timestamp_unit=unit
    )
    assert num_dropped_rows == {"t: null": 1, "t: in the future": 3}


@pytest.mark.parametrize(
    ("time_type", "bad_time", "shown_fault"),
    [
        (pa.int64(), 2**63 - 1, "9223372036854775807 is in the future"),
        (pa.int64(), -(2**63), "-9223372036854775808 is before 1970"),
        (pa.int64(), None, "null"),
        (pa.timestamp("ms"), None, "null"),
        (pa.timestamp("ns", "Asia/Kolkata"), -(10**9) * 86_400 * 365, "1969-01-01 05:30:00+05:30 is before 1970"),
        (pa.timestamp("s"), FUTURE_S, "2255-03-14 16:00:00 is in the future"),
    ],
)
def test_the_message_shows_a_bad_time_as_it_is_in_the_file(
    tmp_path: Path, time_type: pa.DataType, bad_time: int | None, shown_fault: str
) -> None:
    path = write_parquet(tmp_path / "a.parquet", **IDS, t=pa.array([1, bad_time, 2, bad_time, 0], time_type))
    remedy = next((remedy for reason, remedy in REMEDY_BY_REASON.items() if shown_fault.endswith(reason)), "drop these rows")
    expected_parts = (f"{path}: column 't', row 1: {shown_fault} (2 of 5 rows); {remedy}", ", or set interactions.on_bad_rows")
    assert_rejects(lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT), tmp_path, *expected_parts)


@pytest.mark.parametrize(
    ("days", "shown_date", "reason"),
    [
        (-5, "1969-12-27", "before 1970"),
        (10**6, "4707-11-29", "in the future"),
        (2**31 - 1, "2147483647", "in the future"),
        (-(2**31), "-2147483648", "before 1970"),
    ],
)
def test_dates_before_1970_and_in_the_future_are_rejected(tmp_path: Path, days: int, shown_date: str, reason: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", **IDS, t=pa.array([1, days, 2, days, 0], pa.int32()).cast(pa.date32()))
    assert_rejects(
        lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT), tmp_path, f"row 1: {shown_date} is {reason} (2 of 5", REMEDY
    )


@pytest.mark.parametrize(
    ("unit", "bad_time", "zone"),
    [("us", 2**63 - 1, None), ("us", -(2**63) + 1, "UTC"), ("ns", 2**63 - 1, "UTC"), ("ns", -(2**63), None)],
)
def test_the_smallest_and_largest_64_bit_times_are_rejected(tmp_path: Path, unit: str, bad_time: int, zone: str | None) -> None:
    path = write_parquet(tmp_path / "a.parquet", **IDS, t=pa.array([1, bad_time, 2, bad_time, 0], pa.timestamp(unit, zone)))
    reason = "in the future" if bad_time > 0 else "before 1970"
    assert_rejects(
        lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT), tmp_path,
        f"{path}: column 't', row 1: ",
        f" is {reason} (2 of 5 rows); {REMEDY_BY_REASON[reason]}, or set", "on_bad_rows to drop",
    )  # fmt: skip


def write_log_without_statistics(path: Path, times: pa.Array) -> str:
    """Write a log without column statistics, so that the ingest finds a bad time only when it reads the rows."""
    pq.write_table(pa.table(IDS | {"t": times}), path, write_statistics=False)
    return str(path)


@pytest.mark.parametrize(("time_ms", "on_bad_rows"), [(2**63 // 100, "fail"), (-(2**63) // 100, "drop"), (-(2**63), "fail")])
def test_a_time_that_does_not_fit_into_64_bits_of_microseconds_is_rejected(
    tmp_path: Path, time_ms: int, on_bad_rows: str
) -> None:
    path = write_log_without_statistics(tmp_path / "a.parquet", pa.array([1, -1, time_ms, time_ms, 0], pa.timestamp("ms")))
    assert_rejects(
        lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT, on_bad_rows=on_bad_rows, max_bad_share=0.9), tmp_path,
        "a.parquet: column 't', row 1: 1969-12-31 23:59:59.999000 is before 1970 or in the future; ",
        "DuckDB and Spark cannot read the file with such a time", FUTURE_REMEDY,
    )  # fmt: skip


@pytest.mark.parametrize(("unit", "bad_time"), [("ms", 2**63 // 100), ("us", -(2**63))])
def test_the_message_about_a_bad_time_in_the_statistics_names_its_column(tmp_path: Path, unit: str, bad_time: int) -> None:
    path = write_parquet(tmp_path / "a.parquet", **IDS, t=pa.array([1, 2, bad_time, bad_time, 0], pa.timestamp(unit)))
    message = "the times of column 't' reach beyond the year 290,000, which cannot be valid; fix the job that writes them"
    assert_rejects(lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT), tmp_path, "a.parquet", message)


@pytest.mark.parametrize(
    "times",
    [pa.array([1, 2, 3, 10**6], pa.int32()).cast(pa.date32()), pa.array([1, 2, 3, 2**63 // 100], pa.timestamp("us"))],
)
def test_a_time_outside_the_nanosecond_range_of_another_file_is_rejected(tmp_path: Path, times: pa.Array) -> None:
    ids = {name: values[:4] for name, values in IDS.items()}
    paths = [
        write_parquet(tmp_path / "a.parquet", **ids, t=times),
        write_parquet(tmp_path / "b.parquet", **IDS, t=pa.array([1, 2, 3, 4, 5], pa.timestamp("ns"))),
    ]
    assert_rejects(
        lambda folder: ingest(folder, *paths, split=LEAVE_LAST_OUT), tmp_path,
        "a.parquet: column 't', row 3: 4", " is before 1970 or in the future; ", FUTURE_REMEDY,
    )  # fmt: skip


def test_times_of_the_next_24_hours_are_accepted_and_later_times_need_max_future_days(tmp_path: Path) -> None:
    now = dt.datetime.now(dt.UTC)
    times = [now + dt.timedelta(hours=hours) for hours in (0, 1, 23, 30, 2)]
    path = write_parquet(tmp_path / "a.parquet", **IDS, t=pa.array(times, pa.timestamp("us", "UTC")))
    assert_rejects(lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT), tmp_path, "row 3: ", "is in the future (1 of 5")
    assert ingest(tmp_path / "accepted", path, split=LEAVE_LAST_OUT, max_future_days=2).num_events == 5


COLUMNS_BY_FOLDER = [{"item_id": [5, 6, 7], "user_id": [1, 1, 1]}, {"item_id": [5, 6], "user_id": [2, 2]}]


@pytest.mark.parametrize(
    ("folder_times", "settings", "fault"),
    [
        (("2024-01-01", "9024-01-02"), {}, "9024-01-02 is in the future (2 of 5"),
        (("2024-01-01", "1924-01-02"), {}, "1924-01-02 is before 1970 (3 of 5"),
        (("4", "-5"), {}, "-5 is before 1970 (3 of 5"),
        (("4", "9223372036854775807"), {"timestamp_unit": "s"}, "9223372036854775807 is in the future (2 of 5"),
    ],
)
def test_a_time_in_a_folder_name_is_checked(
    tmp_path: Path, folder_times: tuple[str, str], settings: dict[str, Any], fault: str
) -> None:
    first_time, second_time = sorted(folder_times)  # the folder of the first time has three rows, the other folder has two
    write_parquet(tmp_path / "log" / f"t={first_time}" / "a.parquet", **COLUMNS_BY_FOLDER[0])
    write_parquet(tmp_path / "log" / f"t={second_time}" / "a.parquet", **COLUMNS_BY_FOLDER[1])
    log_path = str(tmp_path / "log")
    bad_time = fault.split()[0]
    message = f"t={bad_time}/a.parquet: column 't', row 0: {fault}"
    assert_rejects(lambda folder: ingest(folder, log_path, split=LEAVE_LAST_OUT, **settings), tmp_path, message, REMEDY)


def test_a_folder_name_with_text_in_place_of_a_time_is_rejected(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t=monday" / "a.parquet", **COLUMNS_BY_FOLDER[0])
    with raises_input_error(
        "t=monday/a.parquet: column 't' is string, but has to be a timestamp, a date or an integer; cast it"
    ):
        ingest(tmp_path / "stage", str(tmp_path), split=LEAVE_LAST_OUT)
