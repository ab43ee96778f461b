"""Pretrained vectors of feature values, which every run assigns to the rows of the vocabulary."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import Dataset, EmbeddingsManifest, FeaturesManifest
from tests.recsys_core.ingest.interactions_with_context import write_interactions
from tests.recsys_core.ingest.parquet_files import assert_rejects, write_parquet

ITEMS = [10, 11, 12, 13, 14]
LOG = [([0, 1, 2], [3], [1]), ([1], [], [0])]
"""For each user, the rows of the training, validation and test items."""


def ingest_vectors(folder: Path, **ids_by_table: Any) -> EmbeddingsManifest:
    """Ingest the vectors [1], [2], ... for the ids of each table.

    ids_by_table: the ids of each table. A table name has __ in place of the dot, for example item__brand.
    """
    entries = []
    for table, ids in ids_by_table.items():
        path = write_parquet(folder / f"{table}.parquet", item_id=pa.array(ids), v=[[1.0 + row] for row in range(len(ids))])
        entries.append(EmbeddingsConfig(paths=path, vector_column="v", table=table.replace("__", ".")))
    return ingest_embeddings(entries, folder=folder / "embeddings")


def ingest(
    folder: Path,
    embeddings: EmbeddingsManifest | None,
    *features: dict[str, Any],
    previous: FeaturesManifest | None = None,
    run_name: str = "features",
    **columns: Any,
) -> FeaturesManifest:
    """Ingest features of an item table with `columns`, into the folder `run_name`."""
    log_folder = folder / f"{run_name}.log"
    interactions = write_interactions(log_folder, user_ids=["ann", "bob"], item_ids=ITEMS, log=LOG)
    path = write_parquet(folder / f"{run_name}.items.parquet", id=ITEMS, **columns)
    config = {"items": {"paths": path, "id_column": "id", "features": features}}
    return ingest_features(
        FeaturesConfig.model_validate(config), dataset=Dataset(interactions, embeddings), previous=previous,
        memory_limit="500MB", threads=1, folder=folder / run_name,
    )  # fmt: skip


def vector_row_by_value(manifest: FeaturesManifest, key: str) -> dict[Any, int]:
    """Return the vector row of each value of the vocabulary; -1 for a value without a vector. None is the value of row 0."""
    vector_rows = np.load(manifest.path(f"{key}.vector_row.npy"))
    assert (vector_rows.dtype, len(vector_rows)) == (np.int64, manifest.features[key].num_rows)
    values = pq.read_table(manifest.path(f"{key}.vocabulary.parquet"))["value"].to_pylist()
    return dict(zip(values, vector_rows.tolist(), strict=True))


@pytest.mark.parametrize("value_type", [str, int])
def test_each_value_has_the_row_of_its_vector(tmp_path: Path, value_type: type) -> None:
    embeddings = ingest_vectors(tmp_path, item__brand=[value_type(9), value_type(2), value_type(1)], item=ITEMS[:2])
    brands = pa.array([value_type(number) for number in (1, 2, 2, 3)] + [None])
    manifest = ingest(tmp_path, embeddings, {"name": "brand"}, {"name": "other", "column": "brand"}, brand=brands)
    assert vector_row_by_value(manifest, "item.brand") == {None: -1, value_type(2): 1, value_type(1): 2, value_type(3): -1}
    assert (manifest.features["item.brand"].num_with_vector, manifest.features["item.other"].num_with_vector) == (2, 0)
    assert "item.other.vector_row.npy" not in manifest.files


def test_values_of_lists_have_vectors_unless_they_are_rarer_than_min_count(tmp_path: Path) -> None:
    tags = pa.array([["a", "b"], ["b", "c"], None, [], ["b", "c", None]], pa.list_(pa.string()))
    embeddings = ingest_vectors(tmp_path, item__tags=["a", "b", "d"])
    manifest = ingest(tmp_path, embeddings, {"name": "tags", "kind": "list", "min_count": 2}, tags=tags)
    assert vector_row_by_value(manifest, "item.tags") == {None: -1, "b": 1, "c": -1}


def test_in_a_later_run_values_keep_their_rows_and_get_the_new_vectors(tmp_path: Path) -> None:
    first_embeddings = ingest_vectors(tmp_path / "1", item__brand=["a", "b"])
    second_embeddings = ingest_vectors(tmp_path / "2", item__brand=["c", "b"])
    first_manifest = ingest(tmp_path, first_embeddings, {"name": "brand"}, run_name="one", brand=["a", "a", "b", "a", "b"])
    second_manifest = ingest(
        tmp_path, second_embeddings, {"name": "brand"}, run_name="two", previous=first_manifest, brand=["c", "c", "c", "b", "b"]
    )
    assert vector_row_by_value(first_manifest, "item.brand") == {None: -1, "a": 0, "b": 1}
    assert list(vector_row_by_value(second_manifest, "item.brand").items()) == [(None, -1), ("a", -1), ("b", 1), ("c", 0)]


def test_other_vectors_change_the_fingerprint(tmp_path: Path) -> None:
    brands = ["a", "a", "b", "a", "b"]
    first_embeddings = ingest_vectors(tmp_path / "1", item__brand=["a", "b"])
    second_embeddings = ingest_vectors(tmp_path / "2", item__brand=["b", "a"])
    first_manifest = ingest(tmp_path / "1", first_embeddings, {"name": "brand"}, brand=brands)
    second_manifest = ingest(tmp_path / "2", second_embeddings, {"name": "brand"}, brand=brands)
    manifest_without_vectors = ingest(tmp_path / "3", None, {"name": "brand"}, brand=brands)
    assert len({first_manifest.fingerprint, second_manifest.fingerprint, manifest_without_vectors.fingerprint}) == 3
    assert "item.brand.vector_row.npy" not in manifest_without_vectors.files


ITEM_COLUMNS = {"brand": ["a", "a", "b", "a", "b"], "price": [1.0, 2.0, 3.0, 4.0, 5.0]}
PRICE_FEATURE = {"name": "price", "kind": "numeric"}


@pytest.mark.parametrize(
    ("table", "ids", "feature", "message_parts"),
    [
        ("item__brand", [1, 2], {"name": "brand"}, ("'brand' is string, but the id of the item.brand vectors is int64",)),
        ("item__brand", ["a"], {"name": "brand", "hash_rows": 9}, ("'brand' of features.items is hashed", "hash_rows to null")),
        (
            "item__price",
            [1],
            PRICE_FEATURE | {"buckets": 2},
            ("'price' of features.items is numeric", "set kind to categorical"),
        ),
        ("item__price", [1], PRICE_FEATURE | {"standardise": True}, ("'price' of features.items is numeric",)),
        ("item__band", ["a"], {"name": "brand"}, ("table 'item.band', but the tables are item, user, item.brand",)),
        ("user__brand", ["a"], {"name": "brand"}, ("table 'user.brand', but the tables are item, user, item.brand",)),
        (
            "item__brand",
            ["x", "y"],
            {"name": "brand"},
            ("none of the ids of the 'item.brand' vectors is one of the feature's 2",),
        ),
    ],
)
def test_vectors_of_an_unsuitable_feature_are_rejected(
    tmp_path: Path, table: str, ids: list[Any], feature: dict[str, Any], message_parts: tuple[str, ...]
) -> None:
    embeddings = ingest_vectors(tmp_path / "vectors", **{table: ids})
    (tmp_path / "run").mkdir()
    interactions = write_interactions(tmp_path / "log", user_ids=["ann", "bob"], item_ids=ITEMS, log=LOG)
    path = write_parquet(tmp_path / "items.parquet", id=ITEMS, **ITEM_COLUMNS)
    config = FeaturesConfig.model_validate({"items": {"paths": path, "id_column": "id", "features": [feature]}})
    assert_rejects(
        lambda folder: ingest_features(
            config, dataset=Dataset(interactions, embeddings), previous=None, memory_limit="200MB", threads=1, folder=folder
        ),
        tmp_path / "run",
        *message_parts,
    )
