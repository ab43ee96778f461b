"""The matrix is what went in, row for row; what cannot be a vector is named by file, column and row."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recsys_core.data.config import EmbeddingsConfig
from recsys_core.data.embeddings import ingest_embeddings
from recsys_core.manifests import EmbeddingsManifest
from tests.recsys_core.data.tables import damage_data, refuses, write

Layout = Callable[[np.ndarray], pa.Array]


def as_list(vectors: np.ndarray) -> pa.Array:
    return pa.array(list(vectors), pa.list_(pa.from_numpy_dtype(vectors.dtype)))


def as_large_list(vectors: np.ndarray) -> pa.Array:
    return as_list(vectors).cast(pa.large_list(pa.from_numpy_dtype(vectors.dtype)))


def as_fixed(vectors: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])


def as_sliced(vectors: np.ndarray) -> pa.Array:
    padded = np.vstack([vectors[:1] + 1, vectors, vectors[:1] + 1])
    return as_fixed(padded).slice(1, len(vectors))


def as_chunks(vectors: np.ndarray) -> pa.ChunkedArray:
    return pa.chunked_array([as_sliced(vectors[:3]), as_fixed(vectors[3:4]), as_fixed(vectors[4:])])


def ingest(folder: Path, *paths: str, batch_rows: int = 65_536, **columns: str) -> EmbeddingsManifest:
    columns = columns or {"vector_column": "v"}
    return ingest_embeddings(EmbeddingsConfig(paths=paths, batch_rows=batch_rows, **columns), folder=folder)


def ids_of(made: EmbeddingsManifest) -> list[int | str]:
    return pq.read_table(made.path("ids.parquet")).column("id").to_pylist()


def some_vectors(rows: int, dim: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(rows * dim).normal(size=(rows, dim)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("layout", [as_list, as_large_list, as_fixed, as_sliced, as_chunks])
def test_every_list_layout_gives_the_matrix_that_went_in(tmp_path: Path, layout: Layout, dtype: type) -> None:
    vectors = some_vectors(11, 3, dtype)
    path = write(tmp_path / "a.parquet", item_id=np.arange(11) * 7, v=layout(vectors), row_group=4)
    made = ingest(tmp_path / "stage", path, batch_rows=3)
    stored = np.load(made.path("vectors.npy"))
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored, vectors.astype(np.float32))
    assert ids_of(made) == list(range(0, 77, 7))
    assert (made.rows, made.dim, made.id_type) == (11, 3, "int64")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("first", [0, 1])
def test_single_columns_are_put_in_order_of_their_number(tmp_path: Path, first: int, dtype: type) -> None:
    vectors = some_vectors(5, 12, dtype)
    columns = {f"dim_{first + index}": vectors[:, index] for index in np.random.default_rng(0).permutation(12)}
    path = write(tmp_path / "a.parquet", dim_note=["x"] * 5, item_id=list("abcde"), **columns)
    made = ingest(tmp_path / "stage", path, batch_rows=2, dimension_prefix="dim_")
    np.testing.assert_array_equal(np.load(made.path("vectors.npy")), vectors.astype(np.float32))
    assert ids_of(made) == list("abcde")


@settings(max_examples=25, deadline=None)
@given(
    vectors=hnp.arrays(
        np.float32, st.tuples(st.integers(1, 40), st.integers(1, 5)), elements=st.floats(-(2.0**100), 2.0**100, width=32)
    ),
    row_group=st.integers(1, 50),
    batch_rows=st.integers(1, 50),
    fixed=st.booleans(),
)
def test_the_matrix_does_not_depend_on_batches_and_row_groups(
    tmp_path_factory: pytest.TempPathFactory, vectors: np.ndarray, row_group: int, batch_rows: int, fixed: bool
) -> None:
    folder = tmp_path_factory.mktemp("matrix")
    column = (as_fixed if fixed else as_list)(vectors)
    path = write(folder / "a.parquet", item_id=np.arange(len(vectors)), v=column, row_group=row_group)
    made = ingest(folder / "stage", path, batch_rows=batch_rows)
    np.testing.assert_array_equal(np.load(made.path("vectors.npy")), vectors)
    assert ids_of(made) == list(range(len(vectors)))


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([3, 1, 2], pa.int8()),
        pa.array([3, 1, 2], pa.uint64()),
        pa.array([3, 1, 2]).dictionary_encode(),
        pa.array(["ü", "", "a\x00b"]),
        pa.array(["ü", "", "a\x00b"], pa.large_string()),
        pa.array(["ü", "", "a\x00b"]).dictionary_encode(),
    ],
)
def test_ids_are_stored_as_one_of_two_types(tmp_path: Path, ids: pa.Array) -> None:
    made = ingest(tmp_path / "stage", write(tmp_path / "a.parquet", item_id=ids, v=as_list(some_vectors(3, 2))))
    assert ids_of(made) == ids.to_pylist()
    assert str(pq.read_schema(made.path("ids.parquet")).field("id").type) == made.id_type


def test_files_of_a_glob_follow_one_another_by_name(tmp_path: Path) -> None:
    vectors = some_vectors(9, 4)
    for name, part in (("c", slice(6, 9)), ("a", slice(0, 2)), ("b", slice(2, 6))):
        write(
            tmp_path / f"in-{name}.parquet",
            item_id=np.arange(9)[part],
            v=as_fixed(vectors[part]),
            other=["x"] * (len(vectors[part])),
        )
    write(tmp_path / "in-aa.parquet", item_id=pa.array([], pa.int64()), v=as_fixed(vectors[:0]))
    made = ingest(tmp_path / "stage", str(tmp_path / "in-*.parquet"), batch_rows=2)
    np.testing.assert_array_equal(np.load(made.path("vectors.npy")), vectors)
    assert ids_of(made) == list(range(9))
    assert [source.rows for source in made.sources] == [2, 0, 4, 3]


def test_a_folder_whose_name_looks_like_a_pattern_holds_the_stage_just_as_well(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", item_id=[1, 1], v=as_list(some_vectors(2, 2)))
    (tmp_path / "run[1]").mkdir()
    refuses(lambda folder: ingest(folder, path), tmp_path / "run[1]", "id 1 stands there already")


LISTS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "wrong length in the same batch": (
        {"item_id": [1, 2], "v": [[1.0, 2.0], [1.0]]},
        ("a.parquet: column 'v', row 1: vector has 1 numbers, row 0 has 2",),
    ),
    "wrong length in a later batch": (
        {"item_id": [1, 2, 3, 4, 5], "v": [[1.0, 2.0]] * 3 + [[1.0, 2.0, 3.0]] * 2},
        ("a.parquet: column 'v', row", "vector has 3 numbers", "2"),
    ),
    "wrong length from a whole batch on": (
        {"item_id": [1, 2, 3, 4], "v": [[1.0, 2.0]] * 2 + [[1.0]] * 2},
        ("a.parquet: column 'v', row 2: vector has 1 numbers, the first has 2",),
    ),
    "empty vector": (
        {"item_id": [1, 2], "v": pa.array([[], []], pa.list_(pa.float32()))},
        ("a.parquet: column 'v', row 0: the vector is empty",),
    ),
    "null vector": ({"item_id": [1, 2, 3], "v": [[1.0], [2.0], None]}, ("a.parquet: column 'v', row 2: the vector is null",)),
    "null element": (
        {"item_id": [1, 2, 3, 4], "v": [[1.0, 2.0]] * 3 + [[1.0, None]]},
        ("a.parquet: column 'v', row 3: a number of the vector is null",),
    ),
    "null vector of fixed size": (
        {"item_id": [1, 2, 3, 4], "v": pa.array([[1.0, 2.0]] * 3 + [None], pa.list_(pa.float32(), 2))},
        ("a.parquet: column 'v', row 3: the vector is null",),
    ),
    "null element of fixed size": (
        {"item_id": [1, 2, 3, 4], "v": pa.array([[1.0, 2.0]] * 3 + [[None, 1.0]], pa.list_(pa.float32(), 2))},
        ("a.parquet: column 'v', row 3: a number of the vector is null",),
    ),
    "NaN": (
        {"item_id": [1, 2, 3], "v": [[1.0, 2.0]] * 2 + [[1.0, float("nan")]]},
        ("a.parquet: column 'v', row 2: number 1 of the vector is nan",),
    ),
    "Inf": (
        {"item_id": [1, 2], "v": [[1.0], [float("-inf")]]},
        ("a.parquet: column 'v', row 1: number 0 of the vector is -inf",),
    ),
    "too large for float32": ({"item_id": [1], "v": [[1e300]]}, ("a.parquet: column 'v', row 0", "is inf as float32")),
    "null id": (
        {"item_id": [1, 2, None], "v": [[1.0]] * 3},
        ("a.parquet: column 'item_id', row 2: the id is null",),
    ),
    "null id in a dictionary": (
        {"item_id": pa.array(["a", None, "b"]).dictionary_encode(), "v": [[1.0]] * 3},
        ("a.parquet: column 'item_id', row 1: the id is null",),
    ),
    "duplicate id": (
        {"item_id": [1, 2, 3, 2], "v": [[1.0]] * 4},
        ("a.parquet, row 3: column 'item_id': id 2 stands there already in ", "a.parquet, row 1"),
    ),
    "uint64 over int64": (
        {"item_id": pa.array([1, 2, 2**63], pa.uint64()), "v": [[1.0]] * 3},
        ("a.parquet: column 'item_id', from row 2: ", "9223372036854775808", "ids fit into int64"),
    ),
    "vectors of integers": ({"item_id": [1], "v": [[1, 2]]}, ("a.parquet: column 'v' is list<", "list of floats")),
    "no list": ({"item_id": [1], "v": [1.0]}, ("a.parquet: column 'v' is double, but a vector is a list", "dimension_prefix")),
    "no column": ({"item_id": [1], "w": [[1.0]]}, ("a.parquet: no column 'v' (embeddings.vector_column)", "'w'")),
    "empty table": ({"item_id": pa.array([], pa.int64()), "v": pa.array([], pa.list_(pa.float32()))}, ("no rows",)),
}


@pytest.mark.parametrize("case", LISTS)
def test_a_bad_vector_is_named_and_nothing_stays(tmp_path: Path, case: str) -> None:
    columns, parts = LISTS[case]
    path = write(tmp_path / "a.parquet", **columns)
    refuses(lambda folder: ingest(folder, path, batch_rows=2), tmp_path, *parts)


DIMENSIONS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "gap": ({"d0": [1.0], "d1": [1.0], "d3": [1.0]}, ("a.parquet: column d2 is missing between d0 and d3",)),
    "none": ({"e0": [1.0]}, ("a.parquet: no column is 'd' and a number", "'e0'")),
    "integer": ({"d0": [1.0], "d1": [1]}, ("a.parquet: column 'd1' is int64",)),
    "twice": ({"d0": [1.0], "d1": [1.0], "d01": [1.0]}, ("a.parquet: columns 'd1' and 'd01' are both dimension 1",)),
    "null": ({"d0": [1.0, 1.0, 1.0], "d1": [1.0, 1.0, None]}, ("a.parquet: column 'd1', row 2: the number is null",)),
    "NaN": ({"d0": [1.0, 1.0, 1.0], "d1": [1.0, 1.0, np.nan]}, ("a.parquet: column 'd1', row 2: ", "nan")),
}


@pytest.mark.parametrize("case", DIMENSIONS)
def test_a_bad_dimension_is_named_and_nothing_stays(tmp_path: Path, case: str) -> None:
    columns, parts = DIMENSIONS[case]
    path = write(tmp_path / "a.parquet", item_id=list(range(len(columns.get("d0", [1])))), **columns)
    refuses(lambda folder: ingest(folder, path, batch_rows=2, dimension_prefix="d"), tmp_path, *parts)


def test_a_dimension_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1])] + [pa.array([1.0])] * 3, names=["item_id", "d0", "d1", "d1"])
    pq.write_table(table, tmp_path / "a.parquet")
    refuses(
        lambda folder: ingest(folder, str(tmp_path / "a.parquet"), dimension_prefix="d"),
        tmp_path,
        "columns 'd1' and 'd1' are both",
    )


@pytest.mark.parametrize("other", [{"d0": [1.0]}, {"d1": [1.0], "d2": [1.0]}])
def test_files_with_different_dimensions_are_refused_with_both_names(tmp_path: Path, other: dict[str, list[float]]) -> None:
    first = write(tmp_path / "a.parquet", item_id=[1], d0=[1.0], d1=[1.0])
    second = write(tmp_path / "b.parquet", item_id=[2], **other)
    refuses(
        lambda folder: ingest(folder, first, second, dimension_prefix="d"),
        tmp_path, f"b.parquet: the vectors are {len(other)} columns", "d0 to d1, in", "a.parquet",
    )  # fmt: skip


def test_a_wrong_length_in_a_later_file_is_counted_from_the_start_of_that_file(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", item_id=[1, 2, 3], v=[[1.0, 2.0]] * 3)
    second = write(tmp_path / "b.parquet", item_id=[4, 5], v=[[1.0]] * 2)
    refuses(lambda folder: ingest(folder, first, second), tmp_path, "b.parquet: column 'v', row 0: vector has 1 numbers", "2")


def test_an_id_that_two_files_hold_is_named_with_both_places(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", item_id=["x", "y", "z"], v=[[1.0]] * 3)
    second = write(tmp_path / "b.parquet", item_id=["w", "z"], v=[[1.0]] * 2)
    refuses(
        lambda folder: ingest(folder, first, second),
        tmp_path, "b.parquet, row 1: column 'item_id': id 'z' stands there already in ", "a.parquet, row 2",
    )  # fmt: skip


def test_damage_behind_an_intact_footer_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", item_id=np.arange(5000), v=as_fixed(some_vectors(5000, 4)))
    damage_data(path)
    refuses(lambda folder: ingest(folder, path), tmp_path, "a.parquet: damaged: ")
