"""Rejection of invalid logs: the message has file, column and row, and no file of the stage is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import InteractionsManifest
from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.parquet_files import assert_rejects, damage_data, raises_input_error, write_parquet

LEAVE_LAST_OUT = {"kind": "leave_last_out"}
VALID_COLUMNS = {"user_id": [1, 1, 1, 2], "item_id": [5, 6, 7, 5], "t": [1, 2, 3, 4], "stars": [1.0, 2.0, 3.0, 4.0]}


def ingest_function(
    *paths: str, split: dict[str, Any] = LEAVE_LAST_OUT, **settings: Any
) -> Callable[[Path], InteractionsManifest]:
    """Return a function that ingests the log files into a folder."""
    return lambda folder: ingest(folder, *paths, split=split, **settings)


@pytest.mark.parametrize("column", VALID_COLUMNS)
def test_the_error_names_the_file_and_row_of_a_null(tmp_path: Path, column: str) -> None:
    write_parquet(tmp_path / "a.parquet", **VALID_COLUMNS)
    write_parquet(tmp_path / "b.parquet", **(VALID_COLUMNS | {column: [*VALID_COLUMNS[column][:2], None, None]}))
    ingest_log = ingest_function(str(tmp_path / "*.parquet"), label_column="stars", label_threshold=1)
    assert_rejects(ingest_log, tmp_path, f"b.parquet: column {column!r}, row 2: null", "(2 of 8 rows)")


def test_columns_named_like_internal_columns_do_not_change_the_row_in_an_error(tmp_path: Path) -> None:
    columns = VALID_COLUMNS | {"filename": ["x"] * 4, "source": [9] * 4, "row": [9] * 4, "item_id": [1, 2, 3, None]}
    assert_rejects(
        ingest_function(write_parquet(tmp_path / "a.parquet", **columns)), tmp_path, "a.parquet: column 'item_id', row 3: null"
    )


@pytest.mark.parametrize("name", ["file_row_number", "File_Index"])
def test_a_column_with_a_name_that_duckdb_reserves_is_rejected(tmp_path: Path, name: str) -> None:
    assert_rejects(
        ingest_function(write_parquet(tmp_path / "a.parquet", **VALID_COLUMNS, **{name: [1] * 4})),
        tmp_path,
        f"column {name!r} has a name that DuckDB reserves",
        "rename it",
    )


BAD_LOG_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "time as text": ({"t": list("abcd")}, {}, ("a.parquet: column 't' is string, but has to be a timestamp",)),
    "label as text": (
        {"stars": list("abcd")},
        {"label_column": "stars", "label_threshold": 1},
        ("a.parquet: column 'stars' is string, but has to be a number",),
    ),
    "order as text": ({"t": list("abcd")}, {"order_column": "t"}, ("a.parquet: column 't' is string",)),
    "float ids": ({"user_id": [1.0, 1.0, 1.0, 2.0]}, {}, ("a.parquet: column 'user_id' is double, but ids are",)),
    "missing column": (
        {},
        {"item_column": "itemid"},
        ("no column 'itemid' (interactions.item_column); did you mean 'item_id'",),
    ),
    "missing context column": (
        {},
        {"context_columns": ["startz"]},
        ("no column 'startz' (interactions.context_columns); did you mean 'stars'",),
    ),
    "column names that differ by case": (
        {"USER_ID": [9] * 4},
        {},
        ("a.parquet: columns ['user_id', 'USER_ID'] differ by case alone",),
    ),
    "uint64 too large for int64": (
        {"item_id": pa.array([1, 2, 3, 2**63], pa.uint64())},
        {},
        ("a.parquet: column 'item_id', row 3: 9223372036854775808 is too large for int64 (1 of 4", "fit into int64"),
    ),
    "milliseconds read as seconds": (
        {"t": [1_700_000_000_000] * 4},
        {"timestamp_unit": "s"},
        ("a.parquet: column 't', row 0: 1700000000000 is in the future (4 of 4", "check interactions.timestamp_unit"),
    ),
    "nanoseconds read as seconds": (
        {"t": [1_700_000_000_000_000_000] * 4},
        {"timestamp_unit": "s"},
        ("a.parquet: column 't', row 0: 1700000000000000000 is in the future", "check interactions.timestamp_unit"),
    ),
    "no label at the threshold": (
        {},
        {"label_column": "stars", "label_threshold": 5},
        ("a.parquet: column 'stars': no event reaches interactions.label_threshold, 5",),
    ),
    "no train events": (
        {},
        {"split": {"kind": "time"}},
        ("the split 'time' leaves no train events (0 train, 0 validation, 4 test)",),
    ),
    "no test events": (
        {},
        {"split": {"kind": "leave_last_out", "min_events": 4}},
        ("the split 'leave_last_out' leaves no test events (4 train, 0 validation, 0 test)",),
    ),
}
"""For each case: columns that override VALID_COLUMNS, settings, and parts of the message."""


@pytest.mark.parametrize("case", BAD_LOG_CASES)
def test_a_bad_log_is_rejected_and_no_file_is_left(tmp_path: Path, case: str) -> None:
    columns, settings, message_parts = BAD_LOG_CASES[case]
    assert_rejects(
        ingest_function(write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | columns)), **settings),
        tmp_path,
        *message_parts,
    )


def test_the_error_names_the_memory_limit_if_a_sort_exceeds_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    columns = {name: rng.integers(0, 2**60, 300_000) for name in ("user_id", "item_id")} | {"t": np.arange(300_000)}
    ingest_log = ingest_function(write_parquet(tmp_path / "a.parquet", **columns), memory_limit="4MB", order_column="t")
    assert_rejects(ingest_log, tmp_path, "interactions.memory_limit is 4MB, which is too little")


@pytest.mark.parametrize("second_type", [pa.timestamp("us"), pa.timestamp("us", tz="UTC")], ids=str)
def test_files_with_times_of_different_types_are_rejected(tmp_path: Path, second_type: pa.DataType) -> None:
    first_path = write_parquet(tmp_path / "a.parquet", **VALID_COLUMNS)
    second_path = write_parquet(tmp_path / "b.parquet", **(VALID_COLUMNS | {"t": pa.array([1, 2, 3, 4], second_type)}))
    message_parts = (f"b.parquet: column 't' is {second_type}, but int64 in ", "a.parquet")
    assert_rejects(ingest_function(first_path, second_path), tmp_path, *message_parts)
    split = {"kind": "files", "test_paths": second_path}
    assert_rejects(ingest_function(first_path, split=split), tmp_path, *message_parts)


def test_a_log_with_local_times_and_times_with_a_zone_is_rejected(tmp_path: Path) -> None:
    local_path = write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | {"t": pa.array([1, 2, 3, 4], pa.timestamp("us"))}))
    zoned_path = write_parquet(
        tmp_path / "b.parquet", **(VALID_COLUMNS | {"t": pa.array([1, 2, 3, 4], pa.timestamp("us", tz="Asia/Kolkata"))})
    )
    assert_rejects(
        ingest_function(local_path, zoned_path),
        tmp_path,
        "b.parquet: column 't' is timestamp[us, tz=Asia/Kolkata], but timestamp[us] in ",
    )


def test_ids_of_another_type_in_the_test_files_are_rejected(tmp_path: Path) -> None:
    train_path = write_parquet(tmp_path / "a.parquet", **VALID_COLUMNS)
    test_path = write_parquet(tmp_path / "b.parquet", **(VALID_COLUMNS | {"user_id": list("abcd")}))
    ingest_log = ingest_function(train_path, split={"kind": "files", "test_paths": test_path})
    assert_rejects(ingest_log, tmp_path, "b.parquet: column 'user_id' is string, but int64 in ", "a.parquet; write one type")


def test_a_column_that_is_a_folder_key_of_the_training_files_only_is_rejected(tmp_path: Path) -> None:
    train_columns = {name: values for name, values in VALID_COLUMNS.items() if name != "t"}
    train_path = write_parquet(tmp_path / "train" / "t=1" / "a.parquet", **train_columns)
    test_path = write_parquet(tmp_path / "test" / "b.parquet", **VALID_COLUMNS)
    ingest_log = ingest_function(train_path, split={"kind": "files", "test_paths": test_path})
    assert_rejects(
        ingest_log, tmp_path, "b.parquet: 't' is a column of the file, but in ", "a.parquet it is a key in a folder name"
    )


def test_the_error_names_the_setting_of_a_missing_test_or_validation_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", **VALID_COLUMNS)
    for split, setting in (
        ({"test_paths": "gone.parquet"}, "test_paths"),
        ({"test_paths": path, "validation_paths": "gone.parquet"}, "validation_paths"),
    ):
        with raises_input_error(f"interactions.split.{setting}: no such file: gone.parquet"):
            ingest(tmp_path / "stage", path, split={"kind": "files"} | split)


@pytest.mark.parametrize(
    ("vector_ids", "message_parts"),
    [
        (["5", "6"], ("column 'item_id' is int64, but the id of the item vectors is string",)),
        ([50, 60, 70], ("embeddings: none of the 3 ids of the item vectors is an id of the items of the log",)),
    ],
)
def test_vectors_of_other_items_are_rejected(tmp_path: Path, vector_ids: list[Any], message_parts: tuple[str, ...]) -> None:
    vectors_path = write_parquet(tmp_path / "v.parquet", item_id=vector_ids, v=[[1.0]] * len(vector_ids))
    config = EmbeddingsConfig(paths=vectors_path, vector_column="v")
    embeddings = ingest_embeddings((config,), folder=tmp_path / "embeddings")
    assert_rejects(
        ingest_function(write_parquet(tmp_path / "a.parquet", **VALID_COLUMNS), embeddings=embeddings), tmp_path, *message_parts
    )


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_damage_behind_an_intact_footer_is_rejected(tmp_path: Path, compression: str) -> None:
    columns = {name: np.random.default_rng(0).integers(0, 10**9, 5000) for name in ("user_id", "item_id", "t")}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", compression=compression)
    damage_data(str(tmp_path / "a.parquet"))
    assert_rejects(
        ingest_function(str(tmp_path / "a.parquet")),
        tmp_path,
        "a.parquet: column 'user_id', rows 0 to 4,999: a page is damaged",
    )
