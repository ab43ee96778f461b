"""The ingested matrix equals the vectors of the files, without the rows that the config drops."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import EmbeddingsManifest
from recsys_core.manifests.stage_folder import MARKER_NAME
from tests.recsys_core.ingest.parquet_files import assert_rejects, write_parquet

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


def ingest(folder: Path, *paths: str, **settings: Any) -> EmbeddingsManifest:
    columns = {} if {"vector_column", "dimension_prefix"} & set(settings) else {"vector_column": "v"}
    return ingest_embeddings((EmbeddingsConfig(paths=paths, **columns, **settings),), folder=folder)


def ids_of(manifest: EmbeddingsManifest) -> list[int | str]:
    return pq.read_table(manifest.ids_path("item")).column("id").to_pylist()


def some_vectors(rows: int, dim: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(rows * dim).normal(size=(rows, dim)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("layout", [as_list, as_large_list, as_fixed, as_sliced, as_chunks])
def test_every_list_layout_gives_the_same_matrix(tmp_path: Path, layout: Layout, dtype: type) -> None:
    vectors = some_vectors(11, 3, dtype)
    path = write_parquet(tmp_path / "a.parquet", item_id=np.arange(11) * 7, v=layout(vectors), row_group=4)
    manifest = ingest(tmp_path / "stage", path, batch_rows=3)
    stored = np.load(manifest.vectors_path("item"))
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored, vectors.astype(np.float32))
    assert ids_of(manifest) == list(range(0, 77, 7))
    assert (manifest.tables["item"].num_rows, manifest.tables["item"].dim, manifest.tables["item"].id_type) == (11, 3, "int64")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("first", [0, 1])
def test_single_columns_are_put_in_order_of_their_number(tmp_path: Path, first: int, dtype: type) -> None:
    vectors = some_vectors(5, 12, dtype)
    columns = {f"dim_{first + index}": vectors[:, index] for index in np.random.default_rng(0).permutation(12)}
    path = write_parquet(tmp_path / "a.parquet", dim_note=["x"] * 5, item_id=list("abcde"), **columns)
    manifest = ingest(tmp_path / "stage", path, batch_rows=2, dimension_prefix="dim_")
    np.testing.assert_array_equal(np.load(manifest.vectors_path("item")), vectors.astype(np.float32))
    assert ids_of(manifest) == list("abcde")


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
    vectors = np.where(vectors.any(axis=1, keepdims=True), vectors, np.float32(1))  # a vector of zeros is refused
    column = (as_fixed if fixed else as_list)(vectors)
    path = write_parquet(folder / "a.parquet", item_id=np.arange(len(vectors)), v=column, row_group=row_group)
    manifest = ingest(folder / "stage", path, batch_rows=batch_rows)
    np.testing.assert_array_equal(np.load(manifest.vectors_path("item")), vectors)
    assert ids_of(manifest) == list(range(len(vectors)))


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([3, 1, 2], pa.int8()),
        pa.array([3, 1, 2], pa.uint64()),
        pa.array([3, 1, 2]).dictionary_encode(),
        pa.array(["ü", "🦉\u202e" * 5000, "a\x00b"]),
        pa.array(["ü", "🦉\u202e" * 5000, "a\x00b"], pa.large_string()),
        pa.array(["ü", "🦉\u202e" * 5000, "a\x00b"]).dictionary_encode(),
    ],
)
def test_ids_are_stored_as_one_of_two_types(tmp_path: Path, ids: pa.Array) -> None:
    manifest = ingest(tmp_path / "stage", write_parquet(tmp_path / "a.parquet", item_id=ids, v=as_list(some_vectors(3, 2))))
    assert ids_of(manifest) == ids.to_pylist()
    assert str(pq.read_schema(manifest.ids_path("item")).field("id").type) == manifest.tables["item"].id_type


def test_files_of_a_glob_follow_one_another_by_name(tmp_path: Path) -> None:
    vectors = some_vectors(9, 4)
    for name, part in (("c", slice(6, 9)), ("a", slice(0, 2)), ("b", slice(2, 6))):
        write_parquet(
            tmp_path / f"in-{name}.parquet",
            item_id=np.arange(9)[part],
            v=as_fixed(vectors[part]),
            other=["x"] * (len(vectors[part])),
        )
    write_parquet(tmp_path / "in-aa.parquet", item_id=pa.array([], pa.int64()), v=as_fixed(vectors[:0]))
    manifest = ingest(tmp_path / "stage", str(tmp_path / "in-*.parquet"), batch_rows=2)
    np.testing.assert_array_equal(np.load(manifest.vectors_path("item")), vectors)
    assert ids_of(manifest) == list(range(9))
    assert [source.num_rows for source in manifest.sources] == [2, 0, 4, 3]


def test_a_stage_folder_may_have_pattern_characters_in_its_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", item_id=[1, 1], v=as_list(some_vectors(2, 2)))
    (tmp_path / "run[1]").mkdir()
    assert_rejects(lambda folder: ingest(folder, path), tmp_path / "run[1]", "id 1 is already in")


@pytest.mark.parametrize("columns", [{"vector_column": "v"}, {"dimension_prefix": "d"}])
def test_the_result_depends_neither_on_threads_nor_on_row_groups(tmp_path: Path, columns: dict[str, str]) -> None:
    vectors = some_vectors(5_000, 37, np.float64)
    value_by_column = {f"d{index}": vectors[:, index] for index in range(37)}
    path = write_parquet(
        tmp_path / "a.parquet", item_id=np.arange(5_000)[::-1], v=as_fixed(vectors), row_group=1_111, **value_by_column
    )
    manifest_by_num_threads = {
        threads: ingest(tmp_path / f"stage{threads}", path, threads=threads, **columns) for threads in (1, 5)
    }
    np.testing.assert_array_equal(np.load(manifest_by_num_threads[5].vectors_path("item")), vectors.astype(np.float32))
    assert ids_of(manifest_by_num_threads[5]) == list(range(5_000))[::-1]
    assert (
        manifest_by_num_threads[1].files == manifest_by_num_threads[5].files
        and manifest_by_num_threads[1].fingerprint == manifest_by_num_threads[5].fingerprint
    )


def test_the_stage_has_only_matrices_and_ids(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", item_id=[1, 2], v=[[1.0, 2.0], [3.0, 5.0]])
    manifest = ingest(tmp_path / "stage", path)
    assert {file.name for file in manifest.folder.iterdir()} == {
        "item.vectors.npy",
        "item.ids.parquet",
        "manifest.json",
        MARKER_NAME,
    }


@pytest.mark.parametrize("columns", [{"vector_column": "v"}, {"dimension_prefix": "d"}])
def test_normalised_vectors_have_length_one(tmp_path: Path, columns: dict[str, str]) -> None:
    vectors = np.array([[3.0, 4.0], [3e30, 4e30], [-3e-30, 4e-30], [6e-44, 8e-44]])
    path = write_parquet(tmp_path / "a.parquet", item_id=range(4), v=as_list(vectors), d0=vectors[:, 0], d1=vectors[:, 1])
    stored = np.load(ingest(tmp_path / "stage", path, normalise=True, **columns).vectors_path("item"))
    np.testing.assert_allclose(stored, [[0.6, 0.8], [0.6, 0.8], [-0.6, 0.8], [0.6, 0.8]], rtol=0.02)
    np.testing.assert_allclose(np.linalg.norm(stored, axis=1), 1.0, rtol=1e-6)


def test_a_projection_keeps_the_directions_of_most_variance(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plane = rng.normal(size=(500, 2)) @ rng.normal(size=(2, 9)) + 5.0
    vectors = plane + 1e-3 * rng.normal(size=plane.shape)
    path = write_parquet(tmp_path / "a.parquet", item_id=np.arange(500), v=as_list(vectors), row_group=70)
    manifest = ingest(tmp_path / "stage", path, pca_dim=2)
    stored = np.load(manifest.vectors_path("item"))
    assert manifest.tables["item"].dim == 2 and 0.9999 < (manifest.tables["item"].explained_variance or 0) < 1.0
    centred = vectors - vectors.mean(axis=0)
    expected = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    np.testing.assert_allclose(np.abs(stored), np.abs(expected), rtol=1e-3, atol=1e-3)
    repeated = ingest(tmp_path / "again", path, pca_dim=2, threads=1, batch_rows=7)
    np.testing.assert_array_equal(np.load(repeated.vectors_path("item")), stored)
    scaled = np.load(ingest(tmp_path / "scaled", path, pca_dim=2, normalise=True).vectors_path("item"))
    np.testing.assert_allclose(scaled, stored / np.linalg.norm(stored, axis=1, keepdims=True), rtol=1e-5)


def test_an_id_map_replaces_ids_and_drops_ids_without_an_entry(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", item_id=["x", "y", "z", "w"], v=[[1.0], [2.0], [3.0], [4.0]])
    ids = write_parquet(tmp_path / "map.parquet", theirs=["w", "x", "unused", "z"], ours=[40, 10, 5, 30])
    manifest = ingest(
        tmp_path / "stage", path, vector_column="v", id_map={"paths": ids, "from_column": "theirs", "to_column": "ours"}
    )
    assert ids_of(manifest) == [10, 30, 40] and manifest.tables["item"].id_type == "int64"
    assert np.load(manifest.vectors_path("item")).tolist() == [[1.0], [3.0], [4.0]]
    assert (manifest.tables["item"].num_rows, manifest.tables["item"].num_unmapped) == (3, 1)
    assert [Path(source.path).name for source in manifest.sources] == ["a.parquet", "map.parquet"]


def test_the_first_of_two_entries_for_a_table_wins_and_each_table_has_its_own_files(tmp_path: Path) -> None:
    first_items = write_parquet(tmp_path / "own.parquet", item_id=[1, 2, 3], v=[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    second_items = write_parquet(tmp_path / "bought.parquet", sku=[5, 3, 4, 1], e0=[9.0] * 4, e1=[5.0, 3.0, 4.0, 1.0])
    users = write_parquet(tmp_path / "users.parquet", user=["ann"], v=[[7.0, 7.0, 7.0]])
    entries = (
        EmbeddingsConfig(paths=first_items, vector_column="v"),
        EmbeddingsConfig(paths=users, table="user", id_column="user", vector_column="v"),
        EmbeddingsConfig(paths=second_items, id_column="sku", dimension_prefix="e"),
    )
    manifest = ingest_embeddings(entries, folder=tmp_path / "stage")
    assert ids_of(manifest) == [1, 2, 3, 5, 4]
    assert np.load(manifest.vectors_path("item")).tolist() == [[1, 0], [2, 0], [3, 0], [9, 5], [9, 4]]
    assert (manifest.tables["item"].num_overridden, manifest.tables["user"].num_overridden) == (2, 0)
    assert np.load(manifest.vectors_path("user")).tolist() == [[7.0, 7.0, 7.0]]
    assert pq.read_table(manifest.ids_path("user"))["id"].to_pylist() == ["ann"]


@settings(max_examples=20, deadline=None)
@given(
    length=st.lists(st.sampled_from([3, 3, 3, 3, 2, 0, None]), min_size=1, max_size=40),
    ids=st.data(),
    row_group=st.integers(1, 50),
    batch_rows=st.integers(1, 50),
)
def test_only_bad_rows_are_dropped_and_the_others_keep_their_vectors(
    tmp_path_factory: pytest.TempPathFactory, length: list[int | None], ids: st.DataObject, row_group: int, batch_rows: int
) -> None:
    folder = tmp_path_factory.mktemp("dropped")
    vectors = [None if size is None else [float(row + 1)] * size for row, size in enumerate([3, *length])]
    names = ["first", *(ids.draw(st.sampled_from(["a", "b", "c", f"r{row}", "", None])) for row in range(len(length)))]
    path = write_parquet(
        folder / "a.parquet", item_id=pa.array(names), v=pa.array(vectors, pa.list_(pa.float32())), row_group=row_group
    )
    expected: dict[str, list[float]] = {}
    for name, vector in zip(names, vectors, strict=True):
        if name and vector is not None and len(vector) == 3:
            expected.setdefault(name, vector)
    manifest = ingest(folder / "stage", path, on_bad_rows="drop", max_bad_share=1.0, batch_rows=batch_rows, vector_column="v")
    assert ids_of(manifest) == list(expected)
    assert np.load(manifest.vectors_path("item")).tolist() == list(expected.values())
    assert manifest.tables["item"].num_rows + sum(manifest.tables["item"].num_dropped_by_fault.values()) == len(names)
