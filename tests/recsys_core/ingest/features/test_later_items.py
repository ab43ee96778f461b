"""Item tables that are read after a training, with the encodings of the training."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.ingest.features.config import ItemTableConfig
from recsys_core.ingest.features.later_items import LaterItems, LaterItemTable
from recsys_core.manifests import FeaturesManifest, IdType
from tests.recsys_core.ingest.features.test_ingest import ingest, item_settings, rows_of, write_small_log
from tests.recsys_core.ingest.parquet_files import raises_input_error, write_parquet

FEATURES: tuple[dict[str, Any], ...] = (
    {"name": "genre", "min_count": 2},
    {"name": "tags", "kind": "weighted_list", "weight_column": "weights", "max_values": 2},
    {"name": "price", "kind": "numeric", "standardise": True},
    {"name": "level", "kind": "numeric", "column": "price", "buckets": 2},
    {"name": "brand", "hash_rows": 100},
)


def write_table(path: Path, **columns: Any) -> str:
    """Write a table of five items. `columns` override the default columns."""
    default_columns = {
        "id": [10, 11, 12, 13, 14],
        "genre": ["pop", "rock", "pop", None, "rock"],
        "tags": [["a", "b"], ["a"], [], ["b"], ["c"]],
        "weights": [[1.0, 2.0], [1.0], [], [0.5], [1.0]],
        "price": [1.0, 2.0, 3.0, 4.0, 5.0],
        "brand": ["x", "y", "x", "y", "x"],
    }
    return write_parquet(path, **(default_columns | columns))


@pytest.fixture
def training_manifest(tmp_path: Path) -> FeaturesManifest:
    """Return the manifest of the training's features, which are ingested from the default table."""
    path = write_table(tmp_path / "items.parquet")
    return ingest(tmp_path / "features", write_small_log(tmp_path / "log"), **item_settings(path, *FEATURES))


def open_table(
    training_manifest: FeaturesManifest,
    path: str,
    *,
    features: Any = FEATURES,
    id_type: IdType = "int64",
    **settings: Any,
) -> LaterItemTable:
    """Open a later item table with the encodings of the training."""
    return LaterItemTable(
        ItemTableConfig.model_validate({"paths": path, "id_column": "id", "features": features, **settings}),
        encodings=training_manifest.features,
        id_type=id_type,
        memory_limit="500MB",
        threads=1,
        allowed_data_root=None,
    )


def read_items(training_manifest: FeaturesManifest, path: str, ids: list[int], folder: Path, **settings: Any) -> LaterItems:
    """Read the rows of the items `ids` from a later item table, in the order of `ids`."""
    table = open_table(training_manifest, path, **settings)
    return table.read(pa.array(ids), vocabulary_folder=training_manifest.folder, folder=folder)


def rows_and_weights_by_item(later_items: LaterItems, key: str, num_items: int) -> list[tuple[list[int], list[float] | None]]:
    """Return the table rows of each item, and its weights or None for a feature without weights."""
    feature = later_items.features.feature_by_key[key]
    rows_and_weights = [feature.rows_and_weights(np.array([item])) for item in range(num_items)]
    return [(rows.values_L.tolist(), None if weights is None else weights.tolist()) for rows, weights in rows_and_weights]


def training_rows(training_manifest: FeaturesManifest, key: str) -> list[list[int]]:
    """Return the table rows of each item of the training. For a feature without lists, each item has one row."""
    return [rows if isinstance(rows, list) else [rows] for rows in rows_of(training_manifest, key)]


def test_the_items_of_the_training_have_the_same_rows_and_weights_again(
    training_manifest: FeaturesManifest, tmp_path: Path
) -> None:
    read_items(training_manifest, str(tmp_path / "items.parquet"), [10, 11, 12, 13, 14], tmp_path / "later")
    for key in training_manifest.features:
        for array_name in ("row", "offset", "weight"):
            file_name = f"{key}.{array_name}.npy"
            if file_name in training_manifest.files:
                later_array = np.load(tmp_path / "later" / file_name)
                training_array = np.load(training_manifest.path(file_name))
                np.testing.assert_array_equal(later_array, training_array, err_msg=file_name)


def test_later_items_use_the_encodings_of_the_training(training_manifest: FeaturesManifest, tmp_path: Path) -> None:
    path = write_table(
        tmp_path / "new.parquet",
        id=[20, 10, 21, 22, 99],
        genre=["rock", "polka", "polka", "polka", "polka"],  # in a training, polka would be frequent enough for a row
        tags=[["c", "new", "a"], ["new"], ["b"], None, []],
        weights=[[1.0, 2.0, 3.0], [1.0], [0.25], None, []],
        price=[3.0, 1000.0, None, 1.0, 2.0],
        brand=["x", "y", "z", None, "x"],
    )
    later_items = read_items(training_manifest, path, [10, 20, 21, 22, 23], tmp_path / "later")
    training_rows_by_key = {key: training_rows(training_manifest, key) for key in ("item.genre", "item.tags", "item.brand")}
    rock_rows, tag_rows = training_rows_by_key["item.genre"][1], training_rows_by_key["item.tags"]
    assert [rows for rows, _ in rows_and_weights_by_item(later_items, "item.genre", 5)] == [[0], rock_rows, [0], [0], [0]]
    row_of_c, row_of_b = (tag_rows[item][0] for item in (4, 3))
    assert rows_and_weights_by_item(later_items, "item.tags", 5) == [
        ([0], [1.0]),
        ([row_of_c, 0], [1.0, 2.0]),
        ([row_of_b], [0.25]),
        ([], []),
        ([], []),
    ]
    price_feature = training_manifest.features["item.price"]
    assert price_feature.mean is not None and price_feature.std is not None
    standardised_3, standardised_1 = (pytest.approx((price - price_feature.mean) / price_feature.std) for price in (3.0, 1.0))
    price_values = [([1], [10.0]), ([1], [standardised_3]), ([0], [0.0]), ([1], [standardised_1]), ([0], [0.0])]
    assert rows_and_weights_by_item(later_items, "item.price", 5) == price_values
    assert [rows for rows, _ in rows_and_weights_by_item(later_items, "item.level", 5)] == [[2], [2], [0], [1], [0]]
    brand_rows = [rows for rows, _ in rows_and_weights_by_item(later_items, "item.brand", 5)]
    assert brand_rows[1] == training_rows_by_key["item.brand"][0] and brand_rows[0] == training_rows_by_key["item.brand"][1]
    assert brand_rows[2][0] > 0 and brand_rows[3:] == [[0], [0]]


def test_titles_and_filter_columns_are_stored_with_the_row_of_each_item(
    training_manifest: FeaturesManifest, tmp_path: Path
) -> None:
    path = write_table(tmp_path / "new.parquet", title=["A", None, "C", "D", "E"])
    later_items = read_items(
        training_manifest, path, [99, 14, 11], tmp_path / "later", title_column="title", filter_columns=["genre"]
    )
    title_rows, column_rows = (pq.read_table(column_path).to_pylist() for column_path in later_items.column_paths)
    assert title_rows == [{"row": 1, "title": "E"}]
    assert column_rows == [{"row": 1, "genre": "rock"}, {"row": 2, "genre": "rock"}]
    assert later_items.row_path == later_items.column_paths[1]


@pytest.mark.parametrize(
    ("table_ids", "expected_ids"),
    [
        (pa.array([12, None, 10, 12, 99]), [10, 12, 99]),
        (pa.array([12, 2**64 - 1, 10, 12, 99], pa.uint64()), [10, 12, 99]),
        (pa.array(["b", "", "a", None, "b"]), ["a", "b"]),
    ],
    ids=["null", "too large", "empty"],
)
def test_the_ids_of_a_table_are_distinct_sorted_and_possible_ids_of_items(
    training_manifest: FeaturesManifest, tmp_path: Path, table_ids: pa.Array, expected_ids: list[int | str]
) -> None:
    path = write_table(tmp_path / "new.parquet", id=table_ids)
    table = open_table(training_manifest, path, id_type="int64" if pa.types.is_integer(table_ids.type) else "string")
    assert table.ids(folder=tmp_path / "ids").to_pylist() == expected_ids


def test_a_table_without_a_feature_of_the_model_is_read(tmp_path: Path) -> None:
    path = write_table(tmp_path / "items.parquet")
    training_manifest = ingest(
        tmp_path / "features", write_small_log(tmp_path / "log"), **item_settings(path, {"name": "genre"})
    )
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
    ("feature", "message"),
    [
        ({"name": "tags", "kind": "list", "max_values": 2}, "feature 'tags' has the definition"),
        ({"name": "tags", "kind": "weighted_list", "weight_column": "weights"}, "feature 'tags' has the max_values None"),
        ({"name": "other", "column": "genre"}, "reads the feature item.tags, but the config does not declare it"),
    ],
)
def test_a_feature_definition_that_differs_from_the_training_is_rejected(
    training_manifest: FeaturesManifest, tmp_path: Path, feature: dict[str, Any], message: str
) -> None:
    with raises_input_error(message):
        open_table(training_manifest, str(tmp_path / "items.parquet"), features=(FEATURES[0], feature, *FEATURES[2:]))


def test_ids_of_another_type_and_bad_rows_are_rejected(training_manifest: FeaturesManifest, tmp_path: Path) -> None:
    with raises_input_error("strings.parquet: column 'id' is string, but the item id of the log is int64"):
        open_table(training_manifest, write_table(tmp_path / "strings.parquet", id=list("abcde")))
    with raises_input_error("twice.parquet", "the id of more than one row"):
        read_items(
            training_manifest, write_table(tmp_path / "twice.parquet", id=[10, 10, 11, 12, 13]), [10], tmp_path / "later"
        )
