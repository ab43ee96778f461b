"""Checks of ids, labels and weights: invalid rows are rejected or dropped, and unusual ids are valid."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsys_core.errors import InputError
from tests.recsys_core.ingest.forged_parquet import footer_start
from tests.recsys_core.ingest.interaction_logs import Event, assert_stored_events, ingest, leave_last_out, write_log
from tests.recsys_core.ingest.parquet_files import assert_rejects, write_parquet

LEAVE_LAST_OUT = {"kind": "leave_last_out"}
VALID_COLUMNS = {"user_id": [1, 1, 1, 2], "item_id": [5, 6, 7, 5], "t": [1, 2, 3, 4]}
LABEL_SETTINGS = {"label_column": "number", "label_threshold": 1.0}
RANGE_SETTINGS = LABEL_SETTINGS | {"label_range": (0, 5)}
WEIGHT_SETTINGS = {"weight_column": "number"}
NAN, INF = float("nan"), float("inf")
BAD_ROW_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an empty id": ({"item_id": ["a", "", "b", ""]}, {}, "'item_id', row 1: '' is an empty string (2 of 4"),
    "an empty id in a dictionary": (
        {"user_id": pa.array(["a", "b", ""] * 2).dictionary_encode()[:4]},
        {},
        "'user_id', row 2: '' is an empty string (1 of 4",
    ),
    "a null in a dictionary": (
        {"item_id": pa.array(["a", None, "b", None]).dictionary_encode()},
        {},
        "'item_id', row 1: null (2 of 4",
    ),
    "a label over the range": (
        {"number": [1.0, 2.0, 5.5, 5.0]},
        RANGE_SETTINGS,
        "'number', row 2: 5.5 is outside of 0 to 5 (1 of 4",
    ),
    "an integer label below the range": (
        {"number": [1, 2, 5, -1]},
        RANGE_SETTINGS,
        "'number', row 3: -1 is outside of 0 to 5 (1 of 4",
    ),
    "a decimal label over the range": (
        {"number": pa.array([1, 9, 5, 9]).cast(pa.decimal128(30, 2))},
        RANGE_SETTINGS,
        "'number', row 1: 9.00 is outside of 0 to 5 (2 of 4",
    ),
    "an infinite label": ({"number": [1.0, INF, 5.0, -INF]}, LABEL_SETTINGS, "'number', row 1: inf is infinite (2 of 4"),
    "an infinite label, although the range of labels is set": (
        {"number": [1.0, -INF, 5.0, 1.0]},
        RANGE_SETTINGS,
        "'number', row 1: -inf is infinite (1 of 4",
    ),
    "a float16 label that is no number": (
        {"number": np.array([1, 2, np.nan, 3], np.float16)},
        RANGE_SETTINGS,
        "'number', row 2: nan is null or not a number (1 of 4",
    ),
    "a null label": ({"number": [1, None, 5, None]}, LABEL_SETTINGS, "'number', row 1: null (2 of 4"),
    "a negative weight": ({"number": [1.0, 0.0, -0.5, 1.0]}, WEIGHT_SETTINGS, "'number', row 2: -0.5 is negative (1 of 4"),
    "a weight of minus infinity": (
        {"number": [1.0, 0.0, -INF, 1.0]},
        WEIGHT_SETTINGS,
        "'number', row 2: -inf is infinite (1 of 4",
    ),
    "a weight that is no number": (
        {"number": [1, NAN, 2, NAN]},
        WEIGHT_SETTINGS,
        "'number', row 1: nan is null or not a number (2 of 4",
    ),
    "an infinite weight": ({"number": [1, INF, 2, INF]}, WEIGHT_SETTINGS, "'number', row 1: inf is infinite (2 of 4"),
    "a weight beyond float32": (
        {"number": [1.0, 2.0, 1e300, 1.0]},
        WEIGHT_SETTINGS,
        "'number', row 2: 1e+300 is too large for float32 (1 of",
    ),
    "a null weight": ({"number": [True, None, True, True]}, WEIGHT_SETTINGS, "'number', row 1: null (1 of 4"),
    "an infinite order": (
        {"number": [1.0, INF, 2.0, 3.0]},
        {"order_column": "number"},
        "'number', row 1: inf is infinite (1 of 4",
    ),
    "an order that is no number": (
        {"number": [1.0, NAN, 2.0, 3.0]},
        {"order_column": "number"},
        "'number', row 1: nan is null or not a number (1 of 4",
    ),
    "an order too large for int64": (
        {"number": pa.array([1, 2, 2**64 - 1, 2**63 - 1], pa.uint64())},
        {"order_column": "number"},
        "'number', row 2: 18446744073709551615 is too large for int64 (1 of 4",
    ),
    "a label that is no number, in a row whose id has an escape sequence": (
        {"number": [1.0, 2.0, NAN, 3.0], "item_id": ["a", "b", "\x1b[31m", "c"]},
        LABEL_SETTINGS,
        "'number', row 2: nan is null",
    ),
}
"""For each case: columns that override VALID_COLUMNS, settings, and the message after the word "column"."""


@pytest.mark.parametrize("case", BAD_ROW_CASES)
def test_a_bad_row_is_rejected_and_no_file_is_left(tmp_path: Path, case: str) -> None:
    columns, settings, message = BAD_ROW_CASES[case]
    path = write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | columns))
    assert_rejects(
        lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT, **settings), tmp_path,
        f"{path}: column {message}", "rows); ", ", or set interactions.on_bad_rows to drop",
    )  # fmt: skip


@pytest.mark.parametrize(("column", "noun"), [("user_id", "user"), ("item_id", "item")])
def test_a_log_with_a_single_user_or_item_is_rejected(tmp_path: Path, column: str, noun: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | {column: [1] * 4}))
    message = f"{path}: column {column!r}: the log has a single {noun}; a model needs at least two"
    assert_rejects(lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT), tmp_path, message)


@pytest.mark.both_engines
def test_the_message_names_the_first_bad_row_of_the_first_bad_file(tmp_path: Path) -> None:
    write_parquet(tmp_path / "log" / "a.parquet", **VALID_COLUMNS, number=[1.0] * 4)
    write_parquet(tmp_path / "log" / "b.parquet", **(VALID_COLUMNS | {"t": [1, 2, -1, 3]}), number=[1.0, 1.0, 1.0, NAN])
    write_parquet(tmp_path / "log" / "c.parquet", **(VALID_COLUMNS | {"user_id": [None, 1, 1, 2]}), number=[NAN, NAN, NAN, 1.0])
    log_path = str(tmp_path / "log")
    message = "b.parquet: column 't', row 2: -1 is before 1970 (1 of 12 rows); "
    assert_rejects(lambda folder: ingest(folder, log_path, split=LEAVE_LAST_OUT, **LABEL_SETTINGS), tmp_path, message)
    write_parquet(tmp_path / "log" / "b.parquet", **VALID_COLUMNS, number=[1.0, 1.0, 1.0, NAN])
    message = "b.parquet: column 'number', row 3: nan is null or not a number (4 of 12 rows); "
    assert_rejects(lambda folder: ingest(folder, log_path, split=LEAVE_LAST_OUT, **LABEL_SETTINGS), tmp_path, message)


def test_the_error_proposes_to_drop_bad_rows_with_a_max_bad_share_unless_all_rows_are_bad(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | {"t": [1, -1, -1, 3]}))
    with pytest.raises(InputError, match=r"on_bad_rows to drop and interactions\.max_bad_share to 0\.5$"):
        ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT)
    with pytest.raises(InputError, match=r"set interactions\.on_bad_rows to drop$"):
        ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, max_bad_share=0.5)
    path = write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | {"t": [-1] * 4}))
    with pytest.raises(InputError, match=r"\(4 of 4 rows\)") as error_info:
        ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT)
    assert "on_bad_rows" not in str(error_info.value)


def test_the_row_of_an_error_is_counted_across_row_groups(tmp_path: Path) -> None:
    columns = {name: (values * 250)[:999] for name, values in VALID_COLUMNS.items()}
    columns["item_id"][777] = None
    path = write_parquet(tmp_path / "a.parquet", row_group_size=100, **columns)
    assert_rejects(lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT), tmp_path, "'item_id', row 777: null (1 of 999")


BAD_VALUES_BY_COLUMN = {
    "user_id": [None, ""],
    "item_id": [None, ""],
    "t": [None, -1, 2**62],
    "number": [None, NAN, INF, 6.0],
    "weight": [-2.0, NAN],
}


def log_with_bad_rows(rng: np.random.Generator, num_rows: int) -> tuple[dict[str, list[Any]], list[Event]]:
    """Return the columns of a log, and its valid events with a label of at least 1. About every fifth row is invalid."""
    columns: dict[str, list[Any]] = {
        "user_id": [f"u{number}" for number in rng.integers(0, 20, num_rows)],
        "item_id": [f"i{number}" for number in rng.integers(0, 30, num_rows)],
        "t": rng.integers(0, 1000, num_rows).tolist(),
        "number": rng.integers(0, 6, num_rows).astype(float).tolist(),
        "weight": [1.0] * num_rows,
    }
    valid_rows = set(range(num_rows))
    for row in np.flatnonzero(rng.random(num_rows) < 0.2).tolist():
        column = str(rng.choice(list(BAD_VALUES_BY_COLUMN)))
        columns[column][row] = BAD_VALUES_BY_COLUMN[column][int(rng.integers(len(BAD_VALUES_BY_COLUMN[column])))]
        valid_rows.remove(row)
    stored_rows = [row for row in sorted(valid_rows) if columns["number"][row] >= 1]
    return columns, [(columns["user_id"][row], columns["item_id"][row], columns["t"][row]) for row in stored_rows]


def num_bad_rows_by_reason(columns: dict[str, list[Any]]) -> Counter[str]:
    """Return the expected number of bad rows. The keys are column and reason, as in the manifest."""
    counts: Counter[str] = Counter()
    reason_by_value: dict[Any, str] = {
        "": "an empty string", -1: "before 1970", 2**62: "in the future",
        6.0: "outside of 0 to 5", INF: "infinite", -2.0: "negative",
    }  # fmt: skip
    for column, bad_values in BAD_VALUES_BY_COLUMN.items():
        for value in columns[column]:
            if value is None or value != value:
                counts[f"{column}: null" + (" or not a number" if column in ("number", "weight") else "")] += 1
            elif value in bad_values:
                counts[f"{column}: {reason_by_value[value]}"] += 1
    return counts


@pytest.mark.both_engines
def test_dropped_rows_are_counted_by_reason_and_all_other_rows_are_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    logs = [log_with_bad_rows(rng, 400) for _ in range(3)]
    paths = [
        write_parquet(tmp_path / f"{index}.parquet", row_group_size=70, **columns) for index, (columns, _) in enumerate(logs)
    ]
    settings = RANGE_SETTINGS | {"weight_column": "weight", "on_bad_rows": "drop"}
    manifest = ingest(tmp_path / "dropped", *paths, split=LEAVE_LAST_OUT, max_bad_share=0.3, **settings)
    assert_stored_events(manifest, leave_last_out([event for _, events in logs for event in events], min_events=3))
    expected_count_by_reason = sum((num_bad_rows_by_reason(columns) for columns, _ in logs), Counter())
    assert manifest.num_bad_rows_by_reason == expected_count_by_reason
    statistics = manifest.columns["user_id"]
    assert statistics.num_nulls == expected_count_by_reason["user_id: null"]
    assert statistics.num_out_of_range == expected_count_by_reason["user_id: an empty string"]
    num_low_labels = sum(label is not None and label < 1 for columns, _ in logs for label in columns["number"])
    # The bad rows among `num_low_labels` are dropped before the filter.
    assert 0 < manifest.num_removed_events_by_filter["below_threshold"] <= num_low_labels
    assert_rejects(
        lambda folder: ingest(folder, *paths, split=LEAVE_LAST_OUT, max_bad_share=0.1, **settings), tmp_path,
        "0.parquet: column ", " of 1,200 rows); ", " of 1,200 rows are bad (", "), a share of 0.",
        ", but interactions.max_bad_share is 0.1; fix these rows, or raise it",
    )  # fmt: skip


def test_a_user_id_and_a_weight_that_cannot_be_stored_are_dropped(tmp_path: Path) -> None:
    log: list[Event] = [(user, item, item) for user in (1, 2) for item in (5, 6, 7)]
    users = pa.array([*(user for user, _, _ in log), 2**64 - 1, 1], pa.uint64())
    columns = {"user_id": users, "item_id": [5, 6, 7] * 2 + [5, 6], "t": [5, 6, 7] * 2 + [1, 1], "number": [1.0] * 7 + [-1e300]}
    path = write_parquet(tmp_path / "a.parquet", **columns)
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, on_bad_rows="drop", max_bad_share=0.5, **WEIGHT_SETTINGS)
    assert_stored_events(manifest, leave_last_out(log, min_events=3))
    assert manifest.num_bad_rows_by_reason == {"user_id: too large for int64": 1, "number: negative": 1}


def test_a_smallest_weight_of_minus_zero_is_reported_as_0(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", **VALID_COLUMNS, number=[-0.0, 1.0, 2.0, -0.0])
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, weight_column="number")
    assert (manifest.columns["number"].min_value, manifest.columns["number"].max_value) == ("0", "2")


def test_a_log_with_bad_rows_only_is_rejected_for_any_max_bad_share(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | {"user_id": pa.nulls(4, pa.int64())}))
    assert_rejects(
        lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT, on_bad_rows="drop", max_bad_share=0.99), tmp_path,
        "column 'user_id', row 0: null (4 of 4 rows); all 4 rows are bad (user_id: null 4); fix these rows",
    )  # fmt: skip


UNUSUAL_IDS = ["\0", "a\x1b[31mb", "\u202eabc", "a\r\nb", "\ufeff", "🦉" * 10_000]
"""Ids that the manifest counts as unusual."""
TEXT_IDS = [*UNUSUAL_IDS, " ", "日本", "é", "e\u0301", "'; DROP TABLE log; --", "🦉", "NULL", "x" * 1_000]


def test_all_texts_are_stored_unchanged_as_ids_and_unusual_ids_are_counted(tmp_path: Path) -> None:
    pairs = [(user, item) for user in TEXT_IDS for item in TEXT_IDS]
    log = [(*pair, time) for time, pair in enumerate(pairs)]
    manifest = ingest(tmp_path / "stage", write_log(tmp_path / "a.parquet", log), split=LEAVE_LAST_OUT)
    assert_stored_events(manifest, leave_last_out(log, min_events=3))
    for column in ("user_id", "item_id"):
        statistics = manifest.columns[column]
        assert (statistics.num_distinct, statistics.num_unusual_ids) == (len(TEXT_IDS), len(UNUSUAL_IDS))


@pytest.mark.both_engines
def test_ids_in_folder_names_are_checked_like_other_ids(tmp_path: Path) -> None:
    event_columns = {"item_id": [5, 6, 7], "t": [1, 2, 3]}
    for name in ("a%E2%80%AEx", "b%0A", "c"):
        write_parquet(tmp_path / "log" / f"user_id={name}" / "a.parquet", **event_columns)
    log_path = str(tmp_path / "log")
    manifest = ingest(tmp_path / "accepted", log_path, split=LEAVE_LAST_OUT)
    valid_events: list[Event] = [(user, item, item - 4) for user in ("a\u202ex", "b\n", "c") for item in (5, 6, 7)]
    assert_stored_events(manifest, leave_last_out(valid_events, min_events=3))
    assert manifest.columns["user_id"].num_unusual_ids == 2
    write_parquet(tmp_path / "log" / "user_id=" / "a.parquet", **event_columns)
    message = "user_id=/a.parquet: column 'user_id', row 0: '' is an empty string (3 of 12 rows"
    assert_rejects(lambda folder: ingest(folder, log_path, split=LEAVE_LAST_OUT), tmp_path, message)


def test_the_smallest_64_bit_id_in_a_folder_name_is_read(tmp_path: Path) -> None:
    for user in (-(2**63), 7):
        write_parquet(tmp_path / "log" / f"user_id={user}" / "a.parquet", item_id=[5, 6, 7], t=[1, 2, 3])
    manifest = ingest(tmp_path / "stage", str(tmp_path / "log"), split=LEAVE_LAST_OUT)
    events: list[Event] = [(user, item, item - 4) for user in (-(2**63), 7) for item in (5, 6, 7)]
    assert_stored_events(manifest, leave_last_out(events, min_events=3))


@pytest.mark.both_engines
def test_a_null_is_found_even_if_the_statistics_count_no_null(tmp_path: Path) -> None:
    for column, values in (("user_id", [1, None, 1, 2]), ("number", [1.0, None, 1.0, 1.0])):
        path = Path(write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | {"number": [1.0] * 4, column: values})))
        content = path.read_bytes()
        data_bytes, footer = content[: footer_start(content)], content[footer_start(content) :]
        # Change the number of nulls from 1 to 0. 16 starts the field, and Thrift stores a number as twice its value.
        path.write_bytes(data_bytes + footer.replace(b"\x16\x02", b"\x16\x00"))
        message = f"{path}: column {column!r}, row 1: null"
        assert_rejects(
            lambda folder, path=path: ingest(folder, str(path), split=LEAVE_LAST_OUT, **WEIGHT_SETTINGS), tmp_path, message
        )
