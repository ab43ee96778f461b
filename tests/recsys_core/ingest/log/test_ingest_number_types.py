"""Order columns and labels whose numbers have another type in each file, or a type with more digits than float64."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recsys_core.errors import InputError
from tests.recsys_core.ingest.interaction_logs import assert_stored_events, ingest, leave_last_out, read_store, write_log
from tests.recsys_core.ingest.parquet_files import write_parquet

LEAVE_LAST_OUT = {"kind": "leave_last_out"}
ORDER_CASES = {
    "large decimals": [pa.array([Decimal(2**53 + number) for number in (4, 1, 2, 3)], pa.decimal128(38, 0))],
    "integers and decimals": [pa.array([9, 1]), pa.array([Decimal("5.30"), Decimal("5.10")], pa.decimal128(10, 2))],
    "decimals and integers": [pa.array([Decimal("5.30"), Decimal("5.10")], pa.decimal128(10, 2)), pa.array([9, 1])],
    "unsigned integers and floats": [pa.array([9, 1], pa.uint64()), pa.array([5.3, 5.1])],
}
"""For each case: the numbers of the order column in each file."""


@pytest.mark.parametrize("case", ORDER_CASES)
def test_an_order_column_with_numbers_of_any_type_orders_the_events(tmp_path: Path, case: str) -> None:
    item_by_number: dict[Decimal | float, int] = {}
    for file_number, numbers in enumerate(ORDER_CASES[case]):
        items = [10 * file_number + row for row in range(len(numbers))]
        item_by_number |= dict(zip(numbers.to_pylist(), items, strict=True))
        users, sequence = [1] * len(items) + [2], pa.concat_arrays([numbers, numbers[:1]])
        path = tmp_path / "log" / f"{file_number}.parquet"
        write_parquet(path, user_id=users, item_id=[*items, items[0]], sequence=sequence)
    manifest = ingest(tmp_path / "stage", str(tmp_path / "log"), split=LEAVE_LAST_OUT, order_column="sequence")
    items_of_user = [item for split_events in read_store(manifest).splits for user, item, _ in split_events if user == 1]
    assert items_of_user == [item_by_number[number] for number in sorted(item_by_number)]


def test_float32_and_integers_in_an_order_column_are_rejected_because_the_integers_would_be_rounded(tmp_path: Path) -> None:
    ids = {"user_id": [1, 1, 2], "item_id": [7, 8, 7]}
    write_parquet(tmp_path / "log" / "a.parquet", **ids, sequence=pa.array([2**24 + 1, 2**24, 1], pa.int64()))
    write_parquet(tmp_path / "log" / "b.parquet", **ids, sequence=pa.array([1, 2, 3], pa.float32()))
    with pytest.raises(
        InputError, match=r"b\.parquet: column 'sequence' is float, but int64 in .*a\.parquet; numbers above 16,7"
    ):
        ingest(tmp_path / "stage", str(tmp_path / "log"), split=LEAVE_LAST_OUT, order_column="sequence")


def test_a_decimal_order_that_does_not_fit_into_int64_is_a_bad_row(tmp_path: Path) -> None:
    numbers = [Decimal(number) for number in (1, 2, 3, 10**20, -(10**20), 1)]
    path = write_parquet(
        tmp_path / "log.parquet",
        user_id=[1] * 5 + [2],
        item_id=[*range(5), 0],
        sequence=pa.array(numbers, pa.decimal128(38, 0)),
    )
    settings = {"on_bad_rows": "drop", "max_bad_share": 0.5}
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, order_column="sequence", **settings)
    assert manifest.num_bad_rows_by_reason == {"sequence: too large for int64": 2}


@pytest.mark.parametrize(
    "label_types",
    [(pa.float32(), pa.float64()), (pa.float64(), pa.float32()), (pa.float16(), pa.float32()), (pa.float64(), pa.float16())],
)
def test_a_label_at_the_threshold_is_kept_in_files_of_different_precision(
    tmp_path: Path, label_types: tuple[pa.DataType, ...]
) -> None:
    for file_number, label_type in enumerate(label_types):
        write_parquet(
            tmp_path / "log" / f"{file_number}.parquet",
            user_id=[1, 2, 1], item_id=[10 * file_number, 10 * file_number + 1, 0],
            t=[3 * file_number + row for row in range(3)],
            score=pa.array(np.array([0.9, 0.9, 0.6], label_type.to_pandas_dtype())),
        )  # fmt: skip
    test_path = write_parquet(tmp_path / "test.parquet", user_id=[1], item_id=[0], t=[9], score=[1.0])
    split, label_settings = {"kind": "files", "test_paths": test_path}, {"label_column": "score", "label_threshold": 0.9}
    manifest = ingest(tmp_path / "stage", str(tmp_path / "log"), split=split, **label_settings)
    assert manifest.num_removed_events_by_filter == {"below_threshold": 2}


def test_a_label_range_may_be_wider_than_the_type_of_the_labels(tmp_path: Path) -> None:
    log = [*((1, item, item) for item in range(5)), (2, 0, 0)]
    path = write_log(tmp_path / "log.parquet", log, score=pa.array(np.ones(6, np.float16)))
    label_settings = {"label_column": "score", "label_threshold": 0.5, "label_range": (-1e30, 1e30)}
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, **label_settings)
    assert_stored_events(manifest, leave_last_out(log, min_events=3))
