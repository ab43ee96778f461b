"""Ingest of valid vectors: column layouts, ids, projections, id maps and dropped rows."""

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


def as_list(vector_RD: np.ndarray) -> pa.Array:
    return pa.array(list(vector_RD), pa.list_(pa.from_numpy_dtype(vector_RD.dtype)))


def as_large_list(vector_RD: np.ndarray) -> pa.Array:
    return as_list(vector_RD).cast(pa.large_list(pa.from_numpy_dtype(vector_RD.dtype)))


def as_fixed_size_list(vector_RD: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(vector_RD.ravel()), vector_RD.shape[1])


def as_slice(vector_RD: np.ndarray) -> pa.Array:
    """Return a slice of an array with one more vector at each end."""
    padded_RD = np.vstack([vector_RD[:1] + 1, vector_RD, vector_RD[:1] + 1])
    return as_fixed_size_list(padded_RD).slice(1, len(vector_RD))


def as_chunks(vector_RD: np.ndarray) -> pa.ChunkedArray:
    """Return three chunks. The first is a slice."""
    return pa.chunked_array([as_slice(vector_RD[:3]), as_fixed_size_list(vector_RD[3:4]), as_fixed_size_list(vector_RD[4:])])


def ingest(folder: Path, *paths: str, **settings: Any) -> EmbeddingsManifest:
    """Ingest one entry of `embeddings`. By default, the vectors are in column v."""
    default_settings = {} if {"vector_column", "dimension_prefix"} & set(settings) else {"vector_column": "v"}
    return ingest_embeddings((EmbeddingsConfig(paths=paths, **default_settings, **settings),), folder=folder)


def ids_of(manifest: EmbeddingsManifest) -> list[int | str]:
    return pq.read_table(manifest.ids_path("item")).column("id").to_pylist()


def random_vectors(num_rows: int, width: int, dtype: type = np.float32) -> np.ndarray:
    """Return vectors [num_rows, width] of normally distributed numbers."""
    return np.random.default_rng(num_rows * width).normal(size=(num_rows, width)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("layout", [as_list, as_large_list, as_fixed_size_list, as_slice, as_chunks])
def test_every_list_layout_gives_the_same_matrix(tmp_path: Path, layout: Layout, dtype: type) -> None:
    vector_RD = random_vectors(11, 3, dtype)
    path = write_parquet(tmp_path / "a.parquet", item_id=np.arange(11) * 7, v=layout(vector_RD), row_group_size=4)
    manifest = ingest(tmp_path / "stage", path, batch_rows=3)
    stored_RD = np.load(manifest.vectors_path("item"))
    assert stored_RD.dtype == np.float32
    np.testing.assert_array_equal(stored_RD, vector_RD.astype(np.float32))
    assert ids_of(manifest) == list(range(0, 77, 7))
    assert (manifest.tables["item"].num_rows, manifest.tables["item"].dim, manifest.tables["item"].id_type) == (11, 3, "int64")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("first_number", [0, 1])
def test_dimension_columns_are_sorted_by_their_number(tmp_path: Path, first_number: int, dtype: type) -> None:
    vector_RD = random_vectors(5, 12, dtype)
    columns = {f"dim_{first_number + index}": vector_RD[:, index] for index in np.random.default_rng(0).permutation(12)}
    path = write_parquet(tmp_path / "a.parquet", dim_note=["x"] * 5, item_id=list("abcde"), **columns)
    manifest = ingest(tmp_path / "stage", path, batch_rows=2, dimension_prefix="dim_")
    np.testing.assert_array_equal(np.load(manifest.vectors_path("item")), vector_RD.astype(np.float32))
    assert ids_of(manifest) == list("abcde")


@settings(max_examples=25)
@given(
    vector_RD=hnp.arrays(
        np.float32, st.tuples(st.integers(1, 40), st.integers(1, 5)), elements=st.floats(-(2.0**100), 2.0**100, width=32)
    ),
    row_group_size=st.integers(1, 50),
    batch_rows=st.integers(1, 50),
    is_fixed_size=st.booleans(),
)
def test_the_matrix_does_not_depend_on_batches_and_row_groups(
    tmp_path_factory: pytest.TempPathFactory, vector_RD: np.ndarray, row_group_size: int, batch_rows: int, is_fixed_size: bool
) -> None:
    folder = tmp_path_factory.mktemp("matrix")
    vector_RD = np.where(vector_RD.any(axis=1, keepdims=True), vector_RD, np.float32(1))  # a vector of zeros is rejected
    vector_column = (as_fixed_size_list if is_fixed_size else as_list)(vector_RD)
    path = write_parquet(
        folder / "a.parquet", item_id=np.arange(len(vector_RD)), v=vector_column, row_group_size=row_group_size
    )
    manifest = ingest(folder / "stage", path, batch_rows=batch_rows)
    np.testing.assert_array_equal(np.load(manifest.vectors_path("item")), vector_RD)
    assert ids_of(manifest) == list(range(len(vector_RD)))


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
def test_ids_of_any_type_are_stored_as_int64_or_string(tmp_path: Path, ids: pa.Array) -> None:
    manifest = ingest(tmp_path / "stage", write_parquet(tmp_path / "a.parquet", item_id=ids, v=as_list(random_vectors(3, 2))))
    assert ids_of(manifest) == ids.to_pylist()
    assert str(pq.read_schema(manifest.ids_path("item")).field("id").type) == manifest.tables["item"].id_type


def test_the_files_of_a_glob_are_read_in_order_of_their_names(tmp_path: Path) -> None:
    vector_RD = random_vectors(9, 4)
    for name, rows in (("c", slice(6, 9)), ("a", slice(0, 2)), ("b", slice(2, 6))):
        write_parquet(
            tmp_path / f"in-{name}.parquet",
            item_id=np.arange(9)[rows],
            v=as_fixed_size_list(vector_RD[rows]),
            other=["x"] * (len(vector_RD[rows])),
        )
    write_parquet(tmp_path / "in-aa.parquet", item_id=pa.array([], pa.int64()), v=as_fixed_size_list(vector_RD[:0]))
    manifest = ingest(tmp_path / "stage", str(tmp_path / "in-*.parquet"), batch_rows=2)
    np.testing.assert_array_equal(np.load(manifest.vectors_path("item")), vector_RD)
    assert ids_of(manifest) == list(range(9))
    assert [source.num_rows for source in manifest.sources] == [2, 0, 4, 3]


def test_a_stage_folder_may_have_pattern_characters_in_its_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", item_id=[1, 1], v=as_list(random_vectors(2, 2)))
    (tmp_path / "run[1]").mkdir()
    assert_rejects(lambda folder: ingest(folder, path), tmp_path / "run[1]", "id 1 is already in")


@pytest.mark.parametrize("column_settings", [{"vector_column": "v"}, {"dimension_prefix": "d"}])
def test_the_files_are_identical_for_any_number_of_threads(tmp_path: Path, column_settings: dict[str, str]) -> None:
    vector_RD = random_vectors(5_000, 37, np.float64)
    dimension_columns = {f"d{index}": vector_RD[:, index] for index in range(37)}
    path = write_parquet(
        tmp_path / "a.parquet",
        item_id=np.arange(5_000)[::-1],
        v=as_fixed_size_list(vector_RD),
        row_group_size=1_111,
        **dimension_columns,
    )
    one_thread_manifest, manifest = (
        ingest(tmp_path / f"stage{num_threads}", path, threads=num_threads, **column_settings) for num_threads in (1, 5)
    )
    np.testing.assert_array_equal(np.load(manifest.vectors_path("item")), vector_RD.astype(np.float32))
    assert ids_of(manifest) == list(range(5_000))[::-1]
    assert one_thread_manifest.files == manifest.files
    assert one_thread_manifest.fingerprint == manifest.fingerprint


def test_the_stage_has_only_matrices_and_ids(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", item_id=[1, 2], v=[[1.0, 2.0], [3.0, 5.0]])
    manifest = ingest(tmp_path / "stage", path)
    assert {file.name for file in manifest.folder.iterdir()} == {
        "item.vectors.npy",
        "item.ids.parquet",
        "manifest.json",
        MARKER_NAME,
    }


@pytest.mark.parametrize("column_settings", [{"vector_column": "v"}, {"dimension_prefix": "d"}])
def test_normalised_vectors_have_norm_1(tmp_path: Path, column_settings: dict[str, str]) -> None:
    vector_RD = np.array([[3.0, 4.0], [3e30, 4e30], [-3e-30, 4e-30], [6e-44, 8e-44]])
    path = write_parquet(tmp_path / "a.parquet", item_id=range(4), v=as_list(vector_RD), d0=vector_RD[:, 0], d1=vector_RD[:, 1])
    stored_RD = np.load(ingest(tmp_path / "stage", path, normalise=True, **column_settings).vectors_path("item"))
    np.testing.assert_allclose(stored_RD, [[0.6, 0.8], [0.6, 0.8], [-0.6, 0.8], [0.6, 0.8]], rtol=0.02)  # 6e-44 has few digits
    np.testing.assert_allclose(np.linalg.norm(stored_RD, axis=1), 1.0, rtol=1e-6)


def test_a_projection_keeps_the_directions_of_most_variance(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    point_in_plane_RD = rng.normal(size=(500, 2)) @ rng.normal(size=(2, 9)) + 5.0
    vector_RD = point_in_plane_RD + 1e-3 * rng.normal(size=point_in_plane_RD.shape)
    path = write_parquet(tmp_path / "a.parquet", item_id=np.arange(500), v=as_list(vector_RD), row_group_size=70)
    manifest = ingest(tmp_path / "stage", path, pca_dim=2)
    stored_RD = np.load(manifest.vectors_path("item"))
    assert manifest.tables["item"].dim == 2 and 0.9999 < (manifest.tables["item"].explained_variance or 0) < 1.0
    centred_RD = vector_RD - vector_RD.mean(axis=0)
    projected_RD = centred_RD @ np.linalg.svd(centred_RD, full_matrices=False)[2][:2].T
    np.testing.assert_allclose(np.abs(stored_RD), np.abs(projected_RD), rtol=1e-3, atol=1e-3)
    small_batches_manifest = ingest(tmp_path / "small_batches", path, pca_dim=2, threads=1, batch_rows=7)
    np.testing.assert_array_equal(np.load(small_batches_manifest.vectors_path("item")), stored_RD)
    normalised_RD = np.load(ingest(tmp_path / "scaled", path, pca_dim=2, normalise=True).vectors_path("item"))
    np.testing.assert_allclose(normalised_RD, stored_RD / np.linalg.norm(stored_RD, axis=1, keepdims=True), rtol=1e-5)


def test_the_manifest_has_the_row_range_of_each_entry_with_a_projection(tmp_path: Path) -> None:
    paths = [
        write_parquet(tmp_path / f"{index}.parquet", item_id=np.arange(20) + 15 * index, v=as_list(random_vectors(20, width)))
        for index, width in enumerate((4, 2, 5))
    ]
    settings_by_entry: list[dict[str, Any]] = [{"pca_dim": 2}, {}, {"pca_dim": 2, "normalise": True}]
    entries = tuple(
        EmbeddingsConfig(paths=path, vector_column="v", **entry_settings)
        for path, entry_settings in zip(paths, settings_by_entry, strict=True)
    )
    manifest = ingest_embeddings(entries, folder=tmp_path / "stage")
    assert manifest.tables["item"].projected_rows == ((0, 20), (35, 50))  # five ids of each later entry are overridden
    assert ingest(tmp_path / "unprojected", paths[1]).tables["item"].projected_rows == ()


def test_an_id_map_replaces_ids_and_drops_ids_without_an_entry(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", item_id=["x", "y", "z", "w"], v=[[1.0], [2.0], [3.0], [4.0]])
    id_map_path = write_parquet(tmp_path / "map.parquet", theirs=["w", "x", "unused", "z"], ours=[40, 10, 5, 30])
    manifest = ingest(
        tmp_path / "stage", path, vector_column="v", id_map={"paths": id_map_path, "from_column": "theirs", "to_column": "ours"}
    )
    assert ids_of(manifest) == [10, 30, 40] and manifest.tables["item"].id_type == "int64"
    assert np.load(manifest.vectors_path("item")).tolist() == [[1.0], [3.0], [4.0]]
    assert (manifest.tables["item"].num_rows, manifest.tables["item"].num_unmapped) == (3, 1)
    assert [Path(source.path).name for source in manifest.sources] == ["a.parquet", "map.parquet"]


def test_an_id_in_two_entries_has_the_vector_of_the_first_entry(tmp_path: Path) -> None:
    own_vectors_path = write_parquet(tmp_path / "own.parquet", item_id=[1, 2, 3], v=[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    bought_vectors_path = write_parquet(tmp_path / "bought.parquet", sku=[5, 3, 4, 1], e0=[9.0] * 4, e1=[5.0, 3.0, 4.0, 1.0])
    user_vectors_path = write_parquet(tmp_path / "users.parquet", user=["ann"], v=[[7.0, 7.0, 7.0]])
    entries = (
        EmbeddingsConfig(paths=own_vectors_path, vector_column="v"),
        EmbeddingsConfig(paths=user_vectors_path, table="user", id_column="user", vector_column="v"),
        EmbeddingsConfig(paths=bought_vectors_path, id_column="sku", dimension_prefix="e"),
    )
    manifest = ingest_embeddings(entries, folder=tmp_path / "stage")
    assert ids_of(manifest) == [1, 2, 3, 5, 4]
    assert np.load(manifest.vectors_path("item")).tolist() == [[1, 0], [2, 0], [3, 0], [9, 5], [9, 4]]
    assert (manifest.tables["item"].num_overridden, manifest.tables["user"].num_overridden) == (2, 0)
    assert np.load(manifest.vectors_path("user")).tolist() == [[7.0, 7.0, 7.0]]
    assert pq.read_table(manifest.ids_path("user"))["id"].to_pylist() == ["ann"]


@settings(max_examples=20)
@given(
    widths=st.lists(st.sampled_from([3, 3, 3, 3, 2, 0, None]), min_size=1, max_size=40),
    data=st.data(),
    row_group_size=st.integers(1, 50),
    batch_rows=st.integers(1, 50),
)
def test_bad_rows_are_dropped_and_all_other_rows_keep_their_vectors(
    tmp_path_factory: pytest.TempPathFactory,
    widths: list[int | None],
    data: st.DataObject,
    row_group_size: int,
    batch_rows: int,
) -> None:
    folder = tmp_path_factory.mktemp("dropped")
    vectors = [None if width is None else [float(row + 1)] * width for row, width in enumerate([3, *widths])]
    ids = ["first", *(data.draw(st.sampled_from(["a", "b", "c", f"r{row}", "", None])) for row in range(len(widths)))]
    path = write_parquet(
        folder / "a.parquet",
        item_id=pa.array(ids),
        v=pa.array(vectors, pa.list_(pa.float32())),
        row_group_size=row_group_size,
    )
    expected_vector_by_id: dict[str, list[float]] = {}
    for id_, vector in zip(ids, vectors, strict=True):
        if id_ and vector is not None and len(vector) == 3:
            expected_vector_by_id.setdefault(id_, vector)
    manifest = ingest(folder / "stage", path, on_bad_rows="drop", max_bad_share=1.0, batch_rows=batch_rows, vector_column="v")
    assert ids_of(manifest) == list(expected_vector_by_id)
    assert np.load(manifest.vectors_path("item")).tolist() == list(expected_vector_by_id.values())
    assert manifest.tables["item"].num_rows + sum(manifest.tables["item"].num_dropped_by_fault.values()) == len(ids)
