"""The benchmarks of the ingest and the loader at a small size: all contestants do the same work."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import ingest_embeddings, ingest_interactions, loader
from benchmarks.measuring import measure_work


def test_all_methods_ingest_the_same_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_interactions, "EVENTS_PER_DAY", 500)
    ingest_interactions.write_log(tmp_path / "log", num_days=4, num_users=60, num_items=30)
    paths = sorted((tmp_path / "log").glob("*.parquet"))
    for method in ingest_interactions.METHODS:
        folder = tmp_path / method
        folder.mkdir()
        measurement = ingest_interactions._measure_one(method, paths, folder, "1GB")
        assert measurement["events"] == 2_000 and measurement["seconds"] > 0
    nightjar_count_I = np.load(tmp_path / "nightjar" / "stage" / "item_count.npy")
    for method in ingest_interactions.METHODS[:-1]:  # the last method is nightjar
        count_I = np.load(tmp_path / method / "item_count.npy")
        assert sorted(count_I[count_I > 0]) == sorted(nightjar_count_I[nightjar_count_I > 0]), method
    measurement_by_run = ingest_interactions._measure_one("second_run", paths, tmp_path, "1GB")
    assert (measurement_by_run["first"]["files_read"], measurement_by_run["second"]["files_read"]) == (3, 1)
    assert (measurement_by_run["second"]["events"], measurement_by_run["second"]["rows_changed"]) == (2_000, 0)


@pytest.mark.parametrize("layout", ingest_embeddings.METHODS_BY_LAYOUT)
def test_all_methods_read_the_same_vectors(layout: str, tmp_path: Path) -> None:
    ingest_embeddings.write_vectors(tmp_path, num_rows=50, dim=4)
    path = tmp_path / f"{layout}.parquet"
    ids, vectors = ingest_embeddings._pandas_work(path, copies_block=False)()
    block_ids, block_vectors = ingest_embeddings._pandas_work(path, copies_block=True)()
    np.testing.assert_array_equal(vectors, block_vectors)
    np.testing.assert_array_equal(ids, block_ids)
    assert measure_work(ingest_embeddings._nightjar_work(path, tmp_path))["seconds"] > 0
    (vectors_path,) = (tmp_path / "stage").rglob("*vectors*.npy")
    assert np.sort(np.load(vectors_path), axis=None) == pytest.approx(np.sort(vectors.numpy(), axis=None))


def test_the_loader_yields_batches_with_the_features_of_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size_by_constant = {"NUM_EVENTS": 2_000, "NUM_USERS": 100, "NUM_ITEMS": 50}
    small_size_by_full_size = {getattr(loader, constant): small_size for constant, small_size in size_by_constant.items()}
    shape_by_feature = {
        feature: (small_size_by_full_size[full_size], length)
        for feature, (full_size, length) in loader.SHAPE_BY_FEATURE.items()
    }
    for constant, value in {**size_by_constant, "SHAPE_BY_FEATURE": shape_by_feature}.items():
        monkeypatch.setattr(loader, constant, value)
    loader.write_store(tmp_path)
    for case_name, (max_history, feature_names) in loader.CONTENT_BY_CASE.items():
        batch = next(iter(loader._loader(tmp_path, case_name, batch_size=64, rank=0, world_size=1).epoch(0)))
        assert batch.batch_size == 64
        keys = {key for jagged in batch.sparse.values() for key in jagged.keys()}  # noqa: SIM118  a KeyedJaggedTensor
        assert {*feature_names} <= keys, (max_history, keys)
