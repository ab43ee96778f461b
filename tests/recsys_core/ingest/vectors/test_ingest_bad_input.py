"""Rejection of invalid vectors: the message has the place and a fix, and no file of the stage is left."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from tests.recsys_core.ingest.parquet_files import assert_rejects, damage_data, write_parquet
from tests.recsys_core.ingest.vectors.test_ingest import ingest

REMEDY = "; fix these rows, or set embeddings.on_bad_rows to drop"
ONE_VECTOR = [[1.0, 2.0]]
LONG_ID = "🦉" * 10_000
BAD_LIST_CASES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "wrong length in the same batch": (
        {"item_id": [1, 2], "v": [[1.0, 2.0], [1.0]]},
        ("a.parquet: column 'v', row 1: the vector has 1 numbers, but the first vector has 2 (1 of 2 rows)", REMEDY),
    ),
    "wrong length from the second batch on": (
        {"item_id": [1, 2, 3, 4, 5], "v": ONE_VECTOR * 3 + [[1.0, 2.0, 3.0]] * 2},
        ("column 'v', row 3: the vector has 3 numbers, but the first vector has 2 (2 of 5 rows)", REMEDY),
    ),
    "an empty vector": (
        {"item_id": [1, 2, 3], "v": [[1.0], [], []]},
        ("column 'v', row 1: the vector is empty (2 of 3 rows)", REMEDY),
    ),
    "empty vectors only": (
        {"item_id": [1, 2], "v": pa.array([[], None], pa.list_(pa.float32()))},
        ("a.parquet: column 'v': no row has a vector; check the job that writes this table",),
    ),
    "null vector": (
        {"item_id": [1, 2, 3], "v": [[1.0], [2.0], None]},
        ("column 'v', row 2: the vector is null (1 of 3 rows)", REMEDY),
    ),
    "null vector of fixed size": (
        {"item_id": [1, 2, 3], "v": pa.array([[1.0, 2.0], None, None], pa.list_(pa.float32(), 2))},
        ("column 'v', row 1: the vector is null (2 of 3 rows); fix these rows, or write the column as a list of variable",),
    ),
    "null element": (
        {"item_id": [1, 2, 3, 4], "v": ONE_VECTOR * 3 + [[1.0, None]]},
        ("column 'v', row 3: number 1 of the vector is null (1 of 4 rows)", REMEDY),
    ),
    "null element of fixed size": (
        {"item_id": [1, 2, 3, 4], "v": pa.array(ONE_VECTOR * 3 + [[None, 1.0]], pa.list_(pa.float32(), 2))},
        ("column 'v', row 3: number 0 of the vector is null (1 of 4 rows)", REMEDY),
    ),
    "NaN": (
        {"item_id": [1, 2, 3, 4], "v": ONE_VECTOR * 2 + [[1.0, float("nan")]] * 2},
        ("a.parquet: column 'v', row 2: number 1 of the vector is nan as float32 (2 of 4 rows)", REMEDY),
    ),
    "Inf": (
        {"item_id": [1, 2], "v": [[1.0], [float("-inf")]]},
        ("a.parquet: column 'v', row 1: number 0 of the vector is -inf as float32 (1 of 2 rows)", REMEDY),
    ),
    "too large for float32": ({"item_id": [1], "v": [[1e300]]}, ("a.parquet: column 'v', row 0", "is inf as float32")),
    "all zero": (
        {"item_id": [1, 2, 3, 4], "v": [[1.0, 2.0], [0.0, -0.0], [1e-30, 0.0], [1e-300, 0.0]]},
        ("column 'v', row 1: all numbers of the vector are 0, so it has no direction and no cosine (2 of 4 rows)", REMEDY),
    ),
    "null id": (
        {"item_id": [1, 2, None, None], "v": [[1.0]] * 4},
        ("a.parquet: column 'item_id', row 2: the id is null (2 of 4 rows)", REMEDY),
    ),
    "null id in a dictionary": (
        {"item_id": pa.array(["a", None, "b"]).dictionary_encode(), "v": [[1.0]] * 3},
        ("a.parquet: column 'item_id', row 1: the id is null (1 of 3 rows)", REMEDY),
    ),
    "empty id": (
        {"item_id": ["a", "", "b", ""], "v": [[1.0]] * 4},
        ("column 'item_id', row 1: the id is an empty string (2 of 4 rows)", REMEDY),
    ),
    "empty id in a dictionary": (
        {"item_id": pa.array(["a", "", "b"]).dictionary_encode(), "v": [[1.0]] * 3},
        ("column 'item_id', row 1: the id is an empty string (1 of 3 rows)", REMEDY),
    ),
    "uint64 over int64": (
        {"item_id": pa.array([1, 2, 2**63, 2**64 - 1], pa.uint64()), "v": [[1.0]] * 4},
        ("column 'item_id', row 2: the id is 9223372036854775808, but ids have to fit into int64 (2 of 4 rows)", REMEDY),
    ),
    "decimal over int64": (
        {"item_id": pa.array([10**25], pa.decimal128(38)), "v": [[1.0]]},
        ("a.parquet: column 'item_id' is decimal128(38, 0), but ids are integers or strings; cast it",),
    ),
    "float ids": ({"item_id": [1.0], "v": [[1.0]]}, ("column 'item_id' is double, but ids are integers or strings; cast it",)),
    "duplicate id": (
        {"item_id": [1, 2, 3, 2, 1, 2], "v": [[1.0]] * 6},
        ("a.parquet: column 'item_id', row 3: id 2 is already in ", "a.parquet, row 1 (3 of 6 rows)", REMEDY),
    ),
    "a duplicate id that is too long to read": (
        {"item_id": [LONG_ID, LONG_ID], "v": [[1.0]] * 2},
        ("column 'item_id', row 1: id '" + "🦉" * 76 + "... is already in ", REMEDY),
    ),
    "a duplicate id that would reverse the text of the line": (
        {"item_id": ["a\n\u202eb"] * 2, "v": [[1.0]] * 2},
        (r"column 'item_id', row 1: id 'a\n\u202eb' is already in ", REMEDY),
    ),
    "vectors of integers": ({"item_id": [1], "v": [[1, 2]]}, ("a.parquet: column 'v' is list<", "list of floats")),
    "not a list": (
        {"item_id": [1], "v": [1.0]},
        ("a.parquet: column 'v' is double, but a vector is a list", "dimension_prefix"),
    ),
    "no vector column": ({"item_id": [1], "w": [[1.0]]}, ("a.parquet: no column 'v' (embeddings.vector_column)", "'w'")),
    "no id column": ({"item": [1], "v": [[1.0]]}, ("no column 'item_id' (embeddings.id_column); did you mean 'item'?",)),
    "empty table": ({"item_id": pa.array([], pa.int64()), "v": pa.array([], pa.list_(pa.float32()))}, ("no rows",)),
    "a vector of a million numbers": (
        {"item_id": [1], "v": [[1.0] * 1_000_000]},
        ("vectors of 1,000,000 numbers; at most 65,536 are supported",),
    ),
}
"""For each case: columns of the file, and parts of the message."""


@pytest.mark.parametrize("case", BAD_LIST_CASES)
def test_a_bad_vector_is_rejected_and_no_file_is_left(tmp_path: Path, case: str) -> None:
    columns, message_parts = BAD_LIST_CASES[case]
    path = write_parquet(tmp_path / "a.parquet", **columns)
    assert_rejects(lambda folder: ingest(folder, path, batch_rows=2), tmp_path, *message_parts)


BAD_DIMENSION_CASES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "gap": ({"d0": [1.0], "d1": [1.0], "d3": [1.0]}, ("a.parquet: column d2 is missing between d0 and d3; add it",)),
    "no dimension": (
        {"e0": [1.0]},
        ("no column name consists of 'd' and a number (embeddings.dimension_prefix); it has", "'e0'"),
    ),
    "integers": ({"d0": [1.0], "d1": [1]}, ("a.parquet: column 'd1' is int64",)),
    "the same number twice": (
        {"d0": [1.0], "d1": [1.0], "d01": [1.0]},
        ("a.parquet: columns 'd1' and 'd01' are both dimension 1",),
    ),
    "null": (
        {"d0": [1.0, 1.0, None], "d1": [1.0, None, None]},
        ("a.parquet: column 'd1', row 1: the number is null (2 of 3 rows)", REMEDY),
    ),
    "NaN": (
        {"d0": [1.0, 1.0, 1.0], "d1": [1.0, 1.0, np.nan]},
        ("a.parquet: column 'd1', row 2: number 1 of the vector is nan as float32 (1 of 3 rows)", REMEDY),
    ),
    "all zero": ({"d0": [1.0, 0.0], "d1": [1.0, 0.0]}, ("column 'd0', row 1: all numbers of the vector are 0", REMEDY)),
}
"""For each case: dimension columns of the file, and parts of the message."""


@pytest.mark.parametrize("case", BAD_DIMENSION_CASES)
def test_a_bad_dimension_is_rejected_and_no_file_is_left(tmp_path: Path, case: str) -> None:
    columns, message_parts = BAD_DIMENSION_CASES[case]
    path = write_parquet(tmp_path / "a.parquet", item_id=list(range(len(columns.get("d0", [1])))), **columns)
    assert_rejects(lambda folder: ingest(folder, path, batch_rows=2, dimension_prefix="d"), tmp_path, *message_parts)


def test_ids_in_folder_names_are_rejected(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "item_id=7" / "a.parquet", sku=["a"], v=ONE_VECTOR)
    message = "a.parquet: 'item_id' (embeddings.{}) is a key in a folder name"
    assert_rejects(lambda folder: ingest(folder, path), tmp_path, message.format("id_column"))
    settings = {"id_column": "sku", "id_map": {"paths": path, "from_column": "sku", "to_column": "item_id"}}
    assert_rejects(lambda folder: ingest(folder, path, **settings), tmp_path, message.format("id_map.to_column"))


def test_a_repeated_column_is_rejected(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1])] + [pa.array([1.0])] * 3, names=["item_id", "d0", "d1", "d1"])
    path = str(tmp_path / "a.parquet")
    pq.write_table(table, path)
    assert_rejects(lambda folder: ingest(folder, path, dimension_prefix="d"), tmp_path, "columns 'd1' and 'd1' are both")
    pq.write_table(table.rename_columns(["item_id", "item_id", "d0", "d1"]), path)
    assert_rejects(lambda folder: ingest(folder, path, dimension_prefix="d"), tmp_path, "2 columns are named 'item_id'")


@pytest.mark.parametrize("second_columns", [{"d0": [1.0]}, {"d1": [1.0], "d2": [1.0]}])
def test_the_error_names_two_files_with_different_numbers_of_dimension_columns(
    tmp_path: Path, second_columns: dict[str, list[float]]
) -> None:
    first_path = write_parquet(tmp_path / "a.parquet", item_id=[1], d0=[1.0], d1=[1.0])
    second_path = write_parquet(tmp_path / "b.parquet", item_id=[2], **second_columns)
    assert_rejects(
        lambda folder: ingest(folder, first_path, second_path, dimension_prefix="d"),
        tmp_path, f"b.parquet: the vectors have {len(second_columns)} columns", "a.parquet have 2 (d0 to d1)",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("second_columns", "message_parts"),
    [
        (
            {"item_id": ["2"], "v": [[1.0]]},
            ("b.parquet: column 'item_id' is string, but int64 in ", "a.parquet; write one type in all files"),
        ),
        (
            {"item_id": [2], "v": pa.array([[1.0]], pa.list_(pa.float16()))},
            ("b.parquet: column 'v' is list<element: halffloat>, but list<element: double> in ", "a.parquet; write one type"),
        ),
        ({"item_id": [2], "w": [[1.0]]}, ("b.parquet: no column 'v'",)),
        (
            {"item_id": [2], "v": [[1.0, 2.0]]},
            ("b.parquet: column 'v', row 0: the vector has 2 numbers, but the first vector has 1", REMEDY),
        ),
        (
            {"item_id": [7, 1], "v": [[1.0]] * 2},
            ("b.parquet: column 'item_id', row 1: id 1 is already in ", "a.parquet, row 2 (1 of 5 rows)", REMEDY),
        ),
    ],
)
def test_the_error_names_both_files_of_a_conflict(
    tmp_path: Path, second_columns: dict[str, Any], message_parts: tuple[str, ...]
) -> None:
    first_path = write_parquet(tmp_path / "a.parquet", item_id=[3, 4, 1], v=[[1.0]] * 3)
    second_path = write_parquet(tmp_path / "b.parquet", **second_columns)
    assert_rejects(lambda folder: ingest(folder, first_path, second_path), tmp_path, *message_parts)


def test_damage_behind_an_intact_footer_is_reported(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", item_id=np.arange(5000), v=list(np.ones((5000, 4))))
    damage_data(path)
    assert_rejects(lambda folder: ingest(folder, path), tmp_path, "a.parquet: damaged: ", "write it again")


COLUMNS_WITH_BAD_ROWS = {
    "item_id": [1, 2, None, 2, *range(3, 98)],
    "v": [[1.0], [np.nan], [1.0], [4.0], [0.0], *([[1.0]] * 94)],
}


def test_with_on_bad_rows_drop_bad_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", **COLUMNS_WITH_BAD_ROWS)
    manifest = ingest(tmp_path / "stage", path, on_bad_rows="drop", max_bad_share=0.04)
    # The first row of item 2 is dropped, because its vector is NaN. The second row of item 2 is therefore no duplicate.
    assert manifest.tables["item"].num_dropped_by_fault == {"null_id": 1, "not_finite": 1, "all_zero": 1}
    assert pq.read_table(manifest.ids_path("item"))["id"].to_pylist() == [1, 2, *range(4, 98)]
    assert np.load(manifest.vectors_path("item"))[:3].tolist() == [[1.0], [4.0], [1.0]]


def test_more_bad_rows_than_max_bad_share_are_rejected_with_their_reasons(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", **COLUMNS_WITH_BAD_ROWS)
    assert_rejects(
        lambda folder: ingest(folder, path, on_bad_rows="drop"), tmp_path,
        "a.parquet: column 'v', row 1: number 0 of the vector is nan as float32 (1 of 99 rows); 3 of 99 rows are bad "
        "(null_id 1, not_finite 1, all_zero 1), a share of 0.0303, but embeddings.max_bad_share is 0.01; fix "
        "these rows, or raise it",
    )  # fmt: skip


def test_a_table_with_bad_rows_only_is_rejected_for_any_max_bad_share(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", item_id=[1, 2], v=[[0.0]] * 2)
    assert_rejects(
        lambda folder: ingest(folder, path, on_bad_rows="drop", max_bad_share=1),
        tmp_path,
        "(2 of 2 rows); all 2 rows are bad (all_zero 2); fix these rows",
    )


@pytest.mark.parametrize(
    ("old_ids", "new_ids", "message_parts"),
    [
        (["x", "y", "x"], [1, 2, 3], ("column 'theirs', row 2: id 'x' is already in ", "row 0 (1 such ids)")),
        (["x", "y", "z"], [1, 2, 2], ("column 'ours', row 2: id 2 is already in ", "row 1", "one to one")),
        (["x", None], [1, 2], ("map.parquet: column 'theirs', row 1: the id is null",)),
        (["x", "y"], ["1", ""], ("map.parquet: column 'ours', row 1: the id is an empty string",)),
        ([1, 2], [1, 2], ("map.parquet: column 'theirs' is int64, but column 'item_id' of ",)),
        (["q"], [1], ("map.parquet: column 'theirs' has none of the 2 ids of ", "a.parquet")),
    ],
)
def test_a_bad_id_map_is_rejected(
    tmp_path: Path, old_ids: list[Any], new_ids: list[Any], message_parts: tuple[str, ...]
) -> None:
    path = write_parquet(tmp_path / "a.parquet", item_id=["x", "y"], v=[[1.0]] * 2)
    id_map_path = write_parquet(tmp_path / "map.parquet", theirs=old_ids, ours=new_ids)
    id_map = {"paths": id_map_path, "from_column": "theirs", "to_column": "ours"}
    assert_rejects(lambda folder: ingest(folder, path, id_map=id_map), tmp_path, *message_parts)


@pytest.mark.parametrize(
    ("second_columns", "message_parts"),
    [
        ({"item_id": ["a"], "v": [[1.0, 2.0]]}, ("the id of embeddings.1 is string, but the id of embeddings.0", "int64")),
        (
            {"item_id": [9], "v": [[1.0]]},
            ("embeddings.1: the vectors have the width 1, but the vectors of embeddings.0", "have the width 2"),
        ),
    ],
)
def test_entries_of_one_table_that_do_not_fit_together_are_rejected(
    tmp_path: Path, second_columns: dict[str, Any], message_parts: tuple[str, ...]
) -> None:
    paths = [
        write_parquet(tmp_path / "a.parquet", item_id=[1], v=ONE_VECTOR),
        write_parquet(tmp_path / "b.parquet", **second_columns),
    ]
    entries = [EmbeddingsConfig(paths=path, vector_column="v") for path in paths]
    assert_rejects(lambda folder: ingest_embeddings(entries, folder=folder), tmp_path, *message_parts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pca_dim": 5}, "embeddings.pca_dim is 5, but the vectors of "),
        (
            {"pca_dim": 2},
            "embeddings.pca_dim is 2, but there are only 2 vectors to fit it on; provide more than 2 vectors, or lower pca_dim",
        ),
    ],
)
def test_a_projection_that_the_vectors_do_not_allow_is_rejected(tmp_path: Path, settings: dict[str, int], message: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", item_id=[1, 2], v=[[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]])
    assert_rejects(lambda folder: ingest(folder, path, **settings), tmp_path, message)


def test_a_projection_of_equal_vectors_is_rejected(tmp_path: Path) -> None:
    vector = np.random.default_rng(0).normal(size=8).astype(np.float32)
    path = write_parquet(tmp_path / "a.parquet", item_id=[*range(1_000)], v=[vector.tolist()] * 1_000)
    message = (
        "embeddings.pca_dim is 4, but all 1,000 vectors to fit it on are equal, so the projection would turn them into zeros"
    )
    assert_rejects(lambda folder: ingest(folder, path, pca_dim=4, normalise=True), tmp_path, message)


def test_a_matrix_larger_than_the_free_disk_is_rejected_before_a_vector_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", raise_disk_full)
    path = write_parquet(tmp_path / "a.parquet", item_id=[1, 2], v=ONE_VECTOR * 2)
    assert_rejects(
        lambda folder: ingest(folder, path), tmp_path,
        "stage.tmp", ": vectors.npy, 2 x 2 numbers, takes ", " GiB, but the disk has ", " GiB free; free some space, or set",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_rows", "vector_width", "message"),
    [(4_000, 128, "4,000 x 128 numbers, takes 0.002 GiB"), (40_000, 1, "the stage does not fit")],
)
def test_a_full_disk_is_an_input_error(
    tmp_path: Path, small_disk: Path, num_rows: int, vector_width: int, message: str
) -> None:
    """In the first case the matrix does not fit on the disk. In the second case the matrix fits, but the ids do not."""
    ids = [np.random.default_rng(row).bytes(16).hex() for row in range(num_rows)]
    path = write_parquet(tmp_path / "a.parquet", item_id=ids, v=list(np.ones((num_rows, vector_width), np.float32)))
    assert_rejects(lambda folder: ingest(folder, path), small_disk, message, "but the disk has 0.00", "GiB free; free some")
