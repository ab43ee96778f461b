"""The table of items after a training: values keep the rows of the training, and get no new ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.ingest.features.config import ItemTableConfig
from recsys_core.ingest.features.later_items import LaterItems, LaterItemTable
from recsys_core.manifests import FeaturesManifest
from tests.recsys_core.ingest.features.test_ingest import ingest, items, stage
from tests.recsys_core.ingest.parquet_files import input_error, write_parquet

FEATURES: tuple[dict[str, Any], ...] = (
    {"name": "genre", "min_count": 2},
    {"name": "tags", "kind": "weighted_list", "weight_column": "weights", "max_values": 2},
    {"name": "price", "kind": "numeric", "standardise": True},
    {"name": "level", "kind": "numeric", "column": "price", "buckets": 2},
    {"name": "brand", "hash_rows": 100},
)


def write_table(path: Path, **columns: Any) -> str:
    rows = {
        "id": [10, 11, 12, 13, 14],
        "genre": ["pop", "rock", "pop", None, "rock"],
        "tags": [["a", "b"], ["a"], [], ["b"], ["c"]],
        "weights": [[1.0, 2.0], [1.0], [], [0.5], [1.0]],
        "price": [1.0, 2.0, 3.0, 4.0, 5.0],
        "brand": ["x", "y", "x", "y", "x"],
    }
    return write_parquet(path, **(rows | columns))


@pytest.fixture
def training_manifest(tmp_path: Path) -> FeaturesManifest:
    path = write_table(tmp_path / "items.parquet")
    return ingest(tmp_path / "features", stage(tmp_path / "log"), **items(path, *FEATURES))


def open_table(training_manifest: FeaturesManifest, path: str, *, features: Any = FEATURES, **settings: Any) -> LaterItemTable:
    return LaterItemTable(
        ItemTableConfig.model_validate({"paths": path, "id_column": "id", "features": features, **settings}),
        encodings=training_manifest.features,
        id_type="int64",
        memory_limit="500MB",
        threads=1,
        allowed_data_root=None,
    )


def read(training_manifest: FeaturesManifest, path: str, ids: list[int], folder: Path, **settings: Any) -> LaterItems:
    table = open_table(training_manifest, path, **settings)
    return table.read(pa.array(ids), vocabulary_folder=training_manifest.folder, folder=folder)


def values_of(later_items: LaterItems, key: str, num_items: int) -> list[tuple[list[int], list[float] | None]]:
    feature = later_items.features.feature_by_key[key]
    lists = [feature.rows_and_weights(np.array([item])) for item in range(num_items)]
    return [(rows.values_L.tolist(), None if weights is None else weights.tolist()) for rows, weights in lists]


def test_the_values_of_the_trained_items_have_their_rows(training_manifest: FeaturesManifest, tmp_path: Path) -> None:
    read(training_manifest, str(tmp_path / "items.parquet"), [10, 11, 12, 13, 14], tmp_path / "later")
    for key in training_manifest.features:
        for array in ("row", "offset", "weight"):
            name = f"{key}.{array}.npy"
            if name in training_manifest.files:
                assert np.array_equal(np.load(tmp_path / "later" / name), np.load(training_manifest.path(name))), name


def test_new_items_use_the_rows_and_statistics_of_the_training_and_unknown_values_row_zero(
    training_manifest: FeaturesManifest, tmp_path: Path
) -> None:
    path = write_table(
        tmp_path / "new.parquet",
        id=[20, 10, 21, 22, 99],
        genre=["rock", "polka", "polka", "polka", "polka"],  # often enough for a row of its own in a training
        tags=[["c", "new", "a"], ["new"], ["b"], None, []],
        weights=[[1.0, 2.0, 3.0], [1.0], [0.25], None, []],
        price=[3.0, 1000.0, None, 1.0, 2.0],
        brand=["x", "y", "z", None, "x"],
    )
    later_items = read(training_manifest, path, [10, 20, 21, 22, 23], tmp_path / "later")
    old_values = {key: values_of_training(training_manifest, key) for key in ("item.genre", "item.tags", "item.brand")}
    rock, tags = old_values["item.genre"][1], old_values["item.tags"]
    assert [rows for rows, _ in values_of(later_items, "item.genre", 5)] == [[0], rock, [0], [0], [0]]
    first, second = (tags[item][0] for item in (4, 3))
    assert values_of(later_items, "item.tags", 5) == [
        ([0], [1.0]),
        ([first, 0], [1.0, 2.0]),
        ([second], [0.25]),
        ([], []),
        ([], []),
    ]
    facts = training_manifest.features["item.price"]
    assert facts.mean is not None and facts.std is not None
    three, one = (pytest.approx((price - facts.mean) / facts.std) for price in (3.0, 1.0))
    prices = [([1], [10.0]), ([1], [three]), ([0], [0.0]), ([1], [one]), ([0], [0.0])]
    assert values_of(later_items, "item.price", 5) == prices
    assert [rows for rows, _ in values_of(later_items, "item.level", 5)] == [[2], [2], [0], [1], [0]]
    brands = [rows for rows, _ in values_of(later_items, "item.brand", 5)]
    assert brands[1] == old_values["item.brand"][0] and brands[0] == old_values["item.brand"][1]
    assert brands[2][0] > 0 and brands[3:] == [[0], [0]]


def values_of_training(training_manifest: FeaturesManifest, key: str) -> list[list[int]]:
    rows = np.load(training_manifest.path(f"{key}.row.npy"))
    if f"{key}.offset.npy" not in training_manifest.files:
        return [[row] for row in rows.tolist()]
    return [part.tolist() for part in np.split(rows, np.load(training_manifest.path(f"{key}.offset.npy"))[1:-1])]


def test_titles_and_filter_columns_are_in_files_with_the_row_of_each_item(
    training_manifest: FeaturesManifest, tmp_path: Path
) -> None:
    path = write_table(tmp_path / "new.parquet", title=["A", None, "C", "D", "E"])
    later_items = read(
        training_manifest, path, [99, 14, 11], tmp_path / "later", title_column="title", filter_columns=["genre"]
    )
    titles, columns = (pq.read_table(column_path).to_pylist() for column_path in later_items.column_paths)
    assert titles == [{"row": 1, "title": "E"}]
    assert columns == [{"row": 1, "genre": "rock"}, {"row": 2, "genre": "rock"}]
    assert later_items.row_path == later_items.column_paths[1]


def test_the_ids_are_distinct_and_in_order(training_manifest: FeaturesManifest, tmp_path: Path) -> None:
    path = write_table(tmp_path / "new.parquet", id=[12, None, 10, 12, 99])
    assert open_table(training_manifest, path).ids(folder=tmp_path / "ids").to_pylist() == [10, 12, 99]


def test_a_table_may_have_nothing_that_is_read(tmp_path: Path) -> None:
    path = write_table(tmp_path / "items.parquet")
    training_manifest = ingest(tmp_path / "features", stage(tmp_path / "log"), **items(path, {"name": "genre"}))
    table = LaterItemTable(
        ItemTableConfig.model_validate({"paths": path, "id_column": "id", "features": [{"name": "brand"}]}),
        encodings={},
        id_type="int64",
        memory_limit="500MB",
        threads=1,
        allowed_data_root=None,
    )
    later_items = table.read(pa.array([11, 99]), vocabulary_folder=training_manifest.folder, folder=tmp_path / "later")
    assert pq.read_table(later_items.row_path).to_pylist() == [{"row": 0}]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "tags", "kind": "list", "max_values": 2}, "feature 'tags' has the definition"),
        ({"name": "tags", "kind": "weighted_list", "weight_column": "weights"}, "feature 'tags' has the max_values None"),
        ({"name": "other", "column": "genre"}, "reads the feature item.tags, but the config does not declare it"),
    ],
)
def test_another_encoding_is_rejected(
    training_manifest: FeaturesManifest, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with input_error(message):
        open_table(training_manifest, str(tmp_path / "items.parquet"), features=(FEATURES[0], changed, *FEATURES[2:]))


def test_ids_of_another_type_and_bad_rows_are_rejected(training_manifest: FeaturesManifest, tmp_path: Path) -> None:
    with input_error("strings.parquet: column 'id' is string, but the item id of the log is int64"):
        open_table(training_manifest, write_table(tmp_path / "strings.parquet", id=list("abcde")))
    with input_error("twice.parquet", "the id of more than one row"):
        read(training_manifest, write_table(tmp_path / "twice.parquet", id=[10, 10, 11, 12, 13]), [10], tmp_path / "later")
