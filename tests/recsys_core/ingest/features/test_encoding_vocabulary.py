"""Pretrained vectors of a feature's values are assigned to the rows of its table again in every run."""

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


def embed(folder: Path, **tables: Any) -> EmbeddingsManifest:
    """Ingest vectors [1], [2], ... for the ids of each table. tables: ids by table name, with __ for the dot in the name."""
    entries = []
    for name, ids in tables.items():
        path = write_parquet(folder / f"{name}.parquet", item_id=pa.array(ids), v=[[1.0 + row] for row in range(len(ids))])
        entries.append(EmbeddingsConfig(paths=path, vector_column="v", table=name.replace("__", ".")))
    return ingest_embeddings(entries, folder=folder / "embeddings")


def ingest(
    folder: Path,
    embeddings: EmbeddingsManifest | None,
    *features: dict[str, Any],
    previous: FeaturesManifest | None = None,
    name: str = "features",
    **columns: Any,
) -> FeaturesManifest:
    """Ingest features of items that have `columns`."""
    log = folder / f"{name}.log"
    interactions = write_interactions(log, users=["ann", "bob"], items=ITEMS, log=LOG)
    table = write_parquet(folder / f"{name}.items.parquet", id=ITEMS, **columns)
    config = {"items": {"paths": table, "id_column": "id", "features": features}}
    return ingest_features(
        FeaturesConfig.model_validate(config), dataset=Dataset(interactions, embeddings), previous=previous,
        memory_limit="500MB", threads=1, folder=folder / name,
    )  # fmt: skip


def by_value(manifest: FeaturesManifest, key: str) -> dict[Any, int]:
    """Return the row of the vector of each value in the vocabulary; None is the value of row 0."""
    row = np.load(manifest.path(f"{key}.vector_row.npy"))
    assert (row.dtype, len(row)) == (np.int64, manifest.features[key].num_rows)
    values = pq.read_table(manifest.path(f"{key}.vocabulary.parquet"))["value"].to_pylist()
    return dict(zip(values, row.tolist(), strict=True))


@pytest.mark.parametrize("name", [str, int])
def test_each_value_has_the_row_of_its_vector(tmp_path: Path, name: type) -> None:
    embeddings = embed(tmp_path, item__brand=[name(9), name(2), name(1)], item=ITEMS[:2])
    brand = pa.array([name(number) for number in (1, 2, 2, 3)] + [None])
    manifest = ingest(tmp_path, embeddings, {"name": "brand"}, {"name": "other", "column": "brand"}, brand=brand)
    assert by_value(manifest, "item.brand") == {None: -1, name(2): 1, name(1): 2, name(3): -1}
    assert (manifest.features["item.brand"].num_with_vector, manifest.features["item.other"].num_with_vector) == (2, 0)
    assert "item.other.vector_row.npy" not in manifest.files


def test_list_values_get_vectors_and_values_below_min_count_do_not(tmp_path: Path) -> None:
    tags = pa.array([["a", "b"], ["b", "c"], None, [], ["b", "c", None]], pa.list_(pa.string()))
    embeddings = embed(tmp_path, item__tags=["a", "b", "d"])
    manifest = ingest(tmp_path, embeddings, {"name": "tags", "kind": "list", "min_count": 2}, tags=tags)
    assert by_value(manifest, "item.tags") == {None: -1, "b": 1, "c": -1}


def test_in_a_later_run_values_keep_their_rows_and_get_the_new_vectors(tmp_path: Path) -> None:
    first, second = embed(tmp_path / "1", item__brand=["a", "b"]), embed(tmp_path / "2", item__brand=["c", "b"])
    manifest_1 = ingest(tmp_path, first, {"name": "brand"}, name="one", brand=["a", "a", "b", "a", "b"])
    manifest_2 = ingest(tmp_path, second, {"name": "brand"}, name="two", previous=manifest_1, brand=["c", "c", "c", "b", "b"])
    assert by_value(manifest_1, "item.brand") == {None: -1, "a": 0, "b": 1}
    assert list(by_value(manifest_2, "item.brand").items()) == [(None, -1), ("a", -1), ("b", 1), ("c", 0)]


def test_other_vectors_change_the_fingerprint(tmp_path: Path) -> None:
    brand = ["a", "a", "b", "a", "b"]
    earlier = ingest(tmp_path / "1", embed(tmp_path / "1", item__brand=["a", "b"]), {"name": "brand"}, brand=brand)
    other = ingest(tmp_path / "2", embed(tmp_path / "2", item__brand=["b", "a"]), {"name": "brand"}, brand=brand)
    none = ingest(tmp_path / "3", None, {"name": "brand"}, brand=brand)
    assert len({manifest.fingerprint for manifest in (earlier, other, none)}) == 3
    assert "item.brand.vector_row.npy" not in none.files


BRANDS = {"brand": ["a", "a", "b", "a", "b"], "price": [1.0, 2.0, 3.0, 4.0, 5.0]}
PRICE = {"name": "price", "kind": "numeric"}


@pytest.mark.parametrize(
    ("table", "ids", "feature", "words"),
    [
        ("item__brand", [1, 2], {"name": "brand"}, ("'brand' is string, but the id of the item.brand vectors is int64",)),
        ("item__brand", ["a"], {"name": "brand", "hash_rows": 9}, ("'brand' of features.items is hashed", "hash_rows to null")),
        ("item__price", [1], PRICE | {"buckets": 2}, ("'price' of features.items is numeric", "set kind to categorical")),
        ("item__price", [1], PRICE | {"standardise": True}, ("'price' of features.items is numeric",)),
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
    tmp_path: Path, table: str, ids: list[Any], feature: dict[str, Any], words: tuple[str, ...]
) -> None:
    embeddings = embed(tmp_path / "vectors", **{table: ids})
    (tmp_path / "run").mkdir()
    interactions = write_interactions(tmp_path / "log", users=["ann", "bob"], items=ITEMS, log=LOG)
    path = write_parquet(tmp_path / "items.parquet", id=ITEMS, **BRANDS)
    config = FeaturesConfig.model_validate({"items": {"paths": path, "id_column": "id", "features": [feature]}})
    assert_rejects(
        lambda folder: ingest_features(
            config, dataset=Dataset(interactions, embeddings), previous=None, memory_limit="200MB", threads=1, folder=folder
        ),
        tmp_path / "run",
        *words,
    )
