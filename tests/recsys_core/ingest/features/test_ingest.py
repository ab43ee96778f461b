"""Ingest of features, whose values become rows of a vocabulary, hashes or buckets."""

import collections
import hashlib
import math
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.manifests import Dataset, FeaturesManifest, InteractionsManifest
from tests.recsys_core.ingest.interaction_logs import ingest as ingest_log
from tests.recsys_core.ingest.interaction_logs import write_log
from tests.recsys_core.ingest.interactions_with_context import write_interactions
from tests.recsys_core.ingest.parquet_files import write_parquet

LOG = [([0, 1, 2], [3], [1]), ([1], [], [0]), ([2, 0], [], [])]
"""For each user, the rows of the training, validation and test items."""
USERS = ["ann", "bob", "cat"]
ITEMS = [10, 11, 12, 13, 14]


def write_small_log(folder: Path, **settings: Any) -> InteractionsManifest:
    """Write an interactions stage with USERS, ITEMS and LOG. `settings` override the arguments of write_interactions."""
    return write_interactions(folder, **({"user_ids": USERS, "item_ids": ITEMS, "log": LOG} | settings))


def ingest(
    folder: Path, interactions: InteractionsManifest, *, previous: FeaturesManifest | None = None, **config: Any
) -> FeaturesManifest:
    """Ingest features. `config` has the fields of FeaturesConfig."""
    return ingest_features(
        FeaturesConfig(**config),
        dataset=Dataset(interactions),
        previous=previous,
        memory_limit="500MB",
        threads=1,
        folder=folder,
    )


def item_settings(path: str, *features: dict[str, Any]) -> dict[str, Any]:
    """Return a features config with an item table."""
    return {"items": {"paths": path, "id_column": "id", "features": features}}


def rows_of(manifest: FeaturesManifest, key: str) -> Any:
    """Return the table row of each user, item or event; a list of rows for a list feature."""
    rows = np.load(manifest.path(f"{key}.row.npy"))
    assert rows.dtype == np.int32
    if f"{key}.offset.npy" not in manifest.files:
        return rows.tolist()
    offsets = np.load(manifest.path(f"{key}.offset.npy"))
    assert offsets.dtype == np.int64 and offsets[-1] == len(rows)
    return [owner_rows.tolist() for owner_rows in np.split(rows, offsets[1:-1])]


def weights_of(manifest: FeaturesManifest, key: str) -> list[list[float]]:
    """Return the weights of each user or item, in the order of the list values."""
    weights, offsets = (np.load(manifest.path(f"{key}.{name}.npy")) for name in ("weight", "offset"))
    assert weights.dtype == np.float32
    return [owner_weights.tolist() for owner_weights in np.split(weights, offsets[1:-1])]


def values_and_counts(manifest: FeaturesManifest, key: str) -> list[tuple[Any, int]]:
    """Return each value of the vocabulary with its number of occurrences, by row. Row 0 has the value None."""
    vocabulary = pq.read_table(manifest.path(f"{key}.vocabulary.parquet")).to_pydict()
    return list(zip(vocabulary["value"], vocabulary["count"], strict=True))


def test_a_vocabulary_is_sorted_by_count_after_row_zero_for_missing_values(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "items.parquet", id=[12, 10, 99, 13, 11], genre=["rock", "pop", "metal", None, "rock"])
    manifest = ingest(tmp_path / "features", write_small_log(tmp_path / "log"), **item_settings(path, {"name": "genre"}))
    assert values_and_counts(manifest, "item.genre") == [(None, 1), ("rock", 2), ("pop", 1)]
    assert rows_of(manifest, "item.genre") == [2, 1, 1, 0, 0]
    feature = manifest.features["item.genre"]
    assert (feature.num_rows, feature.num_values, feature.num_missing) == (3, 5, 2)
    assert (feature.num_out_of_vocabulary, feature.num_new_values) == (0, 2)
    assert manifest.tables["item"].model_dump() == {"num_rows": 5, "num_not_in_catalogue": 1, "num_without_row": 1}
    assert sorted(manifest.files) == ["item.genre.row.npy", "item.genre.vocabulary.parquet", "item_columns.parquet"]


def test_values_below_min_count_are_out_of_vocabulary_and_counted(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "items.parquet", id=ITEMS, brand=[7, 7, 8, 8, 9])
    manifest = ingest(
        tmp_path / "features", write_small_log(tmp_path / "log"), **item_settings(path, {"name": "brand", "min_count": 2})
    )
    assert values_and_counts(manifest, "item.brand") == [(None, 1), (7, 2), (8, 2)]
    assert rows_of(manifest, "item.brand") == [1, 1, 2, 2, 0]
    assert manifest.features["item.brand"].num_out_of_vocabulary == 1


def test_lists_keep_their_order_have_row_zero_for_nulls_and_are_cut_at_max_values(tmp_path: Path) -> None:
    tags = [["b", "a", "b"], None, [], ["a", None], ["c", "b", "a", "a"]]
    path = write_parquet(tmp_path / "items.parquet", id=ITEMS, tags=pa.array(tags, pa.list_(pa.string())))
    manifest = ingest(
        tmp_path / "features",
        write_small_log(tmp_path / "log"),
        **item_settings(path, {"name": "tags", "kind": "list", "max_values": 3}),
    )
    assert values_and_counts(manifest, "item.tags") == [(None, 1), ("a", 3), ("b", 3), ("c", 1)]
    assert rows_of(manifest, "item.tags") == [[2, 1, 2], [], [], [1, 0], [3, 2, 1]]
    feature = manifest.features["item.tags"]
    assert (feature.num_rows, feature.num_values, feature.num_missing) == (4, 8, 2)
    assert (feature.num_out_of_vocabulary, feature.num_truncated) == (1, 1)


def test_weights_are_stored_in_the_order_of_their_values(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "users.parquet", name=["cat", "ann"], likes=[[5, 6], [6]], like_weights=[[0.5, 2.0], [1.5]])
    feature = {"name": "likes", "kind": "weighted_list", "weight_column": "like_weights"}
    config = {"users": {"paths": path, "id_column": "name", "features": [feature]}}
    manifest = ingest(tmp_path / "features", write_small_log(tmp_path / "log"), **config)
    assert values_and_counts(manifest, "user.likes") == [(None, 0), (6, 2), (5, 1)]
    assert rows_of(manifest, "user.likes") == [[1], [], [2, 1]]
    assert weights_of(manifest, "user.likes") == [[1.5], [], [0.5, 2.0]]


def test_numbers_are_assigned_to_the_buckets_of_the_config(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "items.parquet", id=ITEMS, price=[0.5, 1.0, 99.0, None, float("nan")])
    manifest = ingest(
        tmp_path / "features",
        write_small_log(tmp_path / "log"),
        **item_settings(path, {"name": "price", "kind": "numeric", "boundaries": [1, 10]}),
    )
    assert rows_of(manifest, "item.price") == [1, 2, 3, 0, 0]
    assert (manifest.features["item.price"].num_rows, manifest.features["item.price"].num_missing) == (4, 2)


def test_each_bucket_has_equally_many_training_events(tmp_path: Path) -> None:
    log = [([row], [], []) for row in range(8)]
    interactions = write_interactions(tmp_path / "log", user_ids=list("abcdefgh"), item_ids=list(range(9)), log=log)
    # Item 8, with the price 1000, has no training event.
    path = write_parquet(tmp_path / "items.parquet", id=list(range(9)), price=[8, 1, 7, 2, 6, 3, 5, 4, 1000])
    manifest = ingest(
        tmp_path / "features", interactions, **item_settings(path, {"name": "price", "kind": "numeric", "buckets": 4})
    )
    assert manifest.features["item.price"].boundaries == (3.0, 5.0, 7.0)
    assert rows_of(manifest, "item.price") == [4, 1, 4, 1, 3, 2, 3, 2, 4]


def test_a_frequent_number_has_its_own_bucket(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "items.parquet", id=ITEMS, price=[0.0, 0.0, 0.0, 2.0, 3.0])
    log = [([0, 1, 2, 3, 4], [], [])] * 3
    manifest = ingest(
        tmp_path / "features",
        write_small_log(tmp_path / "log", log=log),
        **item_settings(path, {"name": "price", "kind": "numeric", "buckets": 5}),
    )
    assert manifest.features["item.price"].boundaries == (2.0, 3.0)
    assert rows_of(manifest, "item.price") == [1, 1, 1, 2, 3]


def test_a_hashed_value_has_a_row_from_its_md5_and_no_vocabulary(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "items.parquet", id=ITEMS, brand=["a", "b", "a", None, "émile"])
    manifest = ingest(
        tmp_path / "features", write_small_log(tmp_path / "log"), **item_settings(path, {"name": "brand", "hash_rows": 1000})
    )
    digest_by_value = {value: hashlib.md5(value.encode()).digest() for value in ("a", "b", "émile")}
    row_by_value = {value: 1 + int.from_bytes(digest[8:], "little") % 1000 for value, digest in digest_by_value.items()}
    row_a, row_b, row_emile = row_by_value.values()
    assert rows_of(manifest, "item.brand") == [row_a, row_b, row_a, 0, row_emile]
    assert manifest.features["item.brand"].num_rows == 1001
    assert sorted(manifest.files) == ["item.brand.row.npy", "item_columns.parquet"]


def test_context_values_are_counted_in_training_events_only(tmp_path: Path) -> None:
    # Training events have the indices 0 to 2, 5, 7 and 8.
    devices = ["tv", "tv", "app", "web", "web", "app", "web", "car", "app"]
    hours = [3, 1, 2, 50, 60, 4, 70, 6, 5]
    interactions = write_small_log(tmp_path / "log", context={"device": devices, "hour": hours})
    features = [{"name": "device"}, {"name": "time", "column": "hour", "kind": "numeric", "buckets": 2}]
    manifest = ingest(tmp_path / "features", interactions, context=features)
    assert values_and_counts(manifest, "context.device") == [(None, 0), ("app", 3), ("tv", 2), ("car", 1)]
    assert rows_of(manifest, "context.device") == [2, 2, 1, 0, 0, 1, 0, 3, 1]
    assert manifest.features["context.device"].num_out_of_vocabulary == 3
    assert manifest.features["context.time"].boundaries == (4.0,)
    assert rows_of(manifest, "context.time") == [1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert manifest.tables == {}


def test_a_workspace_in_folders_named_like_hive_partitions_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "device=tv" / "id=7" / "value=a"
    interactions = write_small_log(folder / "log", context={"device": ["tv", "app"] * 4 + ["car"]})
    brands_path = write_parquet(tmp_path / "brands.parquet", sku=ITEMS, brand=["a", "a", "b", "c", "c"])
    settings = {
        "items": {"paths": brands_path, "id_column": "sku", "features": [{"name": "brand"}]},
        "context": [{"name": "device"}],
    }
    first_manifest = ingest(folder / "run1", interactions, **settings)
    second_manifest = ingest(folder / "run2", interactions, previous=first_manifest, **settings)
    assert rows_of(first_manifest, "item.brand") == rows_of(second_manifest, "item.brand") == [1, 1, 3, 2, 2]
    assert set(rows_of(first_manifest, "context.device")) == {1, 2, 3}


def test_a_value_keeps_its_row_in_later_runs(tmp_path: Path) -> None:
    interactions = write_small_log(tmp_path / "log")
    first_path = write_parquet(tmp_path / "1.parquet", id=ITEMS, brand=["a", "a", "b", "c", "c"], price=[1, 2, 3, 4, 5])
    second_path = write_parquet(tmp_path / "2.parquet", id=ITEMS, brand=["b", "d", "d", "d", "c"], price=[10, 20, 30, 40, 50])
    features = ({"name": "brand"}, {"name": "price", "kind": "numeric", "buckets": 2})
    first_manifest = ingest(tmp_path / "run1", interactions, **item_settings(first_path, *features))
    assert not first_manifest.features["item.brand"].is_continued
    second_manifest = ingest(tmp_path / "run2", interactions, previous=first_manifest, **item_settings(second_path, *features))
    assert values_and_counts(second_manifest, "item.brand") == [(None, 0), ("a", 0), ("c", 1), ("b", 1), ("d", 3)]
    assert rows_of(second_manifest, "item.brand") == [3, 4, 4, 4, 2]
    feature = second_manifest.features["item.brand"]
    assert (feature.is_continued, feature.num_new_values) == (True, 1)
    assert second_manifest.features["item.price"].boundaries == first_manifest.features["item.price"].boundaries


@pytest.mark.parametrize("change", ["another lineage", "another definition", "a damaged vocabulary"])
def test_a_vocabulary_is_rebuilt_after_a_change(tmp_path: Path, change: str) -> None:
    interactions = write_small_log(tmp_path / "log")
    brands = ["a", "a", "b", "b", "b"]
    first_path = write_parquet(tmp_path / "1.parquet", id=ITEMS, brand=["a", "a", "a", "b", "c"])
    second_path = write_parquet(tmp_path / "2.parquet", id=ITEMS, brand=brands, label=brands)
    first_manifest = ingest(tmp_path / "run1", interactions, **item_settings(first_path, {"name": "brand"}))
    feature = {"name": "brand"}
    if change == "another lineage":
        interactions = write_small_log(tmp_path / "rebuilt", lineage="second")
    elif change == "another definition":
        feature["column"] = "label"
    else:
        first_manifest.path("item.brand.vocabulary.parquet").write_bytes(b"stale")
    second_manifest = ingest(tmp_path / "run2", interactions, previous=first_manifest, **item_settings(second_path, feature))
    assert values_and_counts(second_manifest, "item.brand") == [(None, 0), ("b", 3), ("a", 2)]
    assert not second_manifest.features["item.brand"].is_continued


def test_the_stage_is_repeated_only_if_its_input_changes(tmp_path: Path) -> None:
    interactions = write_small_log(tmp_path / "log")
    path = write_parquet(tmp_path / "items.parquet", id=ITEMS, brand=["a"] * 5)
    config = item_settings(path, {"name": "brand"})
    manifest = ingest(tmp_path / "features", interactions, **config)
    assert ingest(tmp_path / "features", interactions, **config) == manifest
    write_parquet(tmp_path / "items.parquet", id=ITEMS, brand=["a", "b"] + ["a"] * 3)
    assert ingest(tmp_path / "features", interactions, **config).fingerprint != manifest.fingerprint


texts = st.none() | st.sampled_from(["a", "b", "", "A", "é", "e\u0301", "\u202e", "🎧", "x" * 300]) | st.text(max_size=3)
numbers = st.none() | st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, 2.0])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_values_have_the_row_of_their_value_or_bucket(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("case")
    item_ids = data.draw(st.lists(st.integers(0, 9), unique=True, min_size=1))
    num_items = len(item_ids)
    brands = data.draw(st.lists(texts, min_size=num_items, max_size=num_items))
    tags = data.draw(st.lists(st.none() | st.lists(texts, max_size=4), min_size=num_items, max_size=num_items))
    prices = data.draw(st.lists(numbers, min_size=num_items, max_size=num_items))
    min_count = data.draw(st.integers(1, 2))
    path = write_parquet(
        folder / "items.parquet", row_group_size=3, id=item_ids, brand=pa.array(brands, pa.string()),
        tags=pa.array(tags, pa.list_(pa.string())), price=pa.array(prices, pa.float32()),
    )  # fmt: skip
    features = (
        {"name": "brand", "min_count": min_count},
        {"name": "tags", "kind": "list", "min_count": min_count},
        {"name": "price", "kind": "numeric", "buckets": 3},
    )
    interactions = write_interactions(folder / "log", user_ids=["u"], item_ids=list(range(12)), log=[(list(range(12)), [], [])])
    manifest = ingest(folder / "features", interactions, **item_settings(path, *features))

    def value_in_vocabulary(counts: collections.Counter[str], value: str | None) -> str | None:
        return value if value is not None and counts[value] >= min_count else None

    brand_values = [value for value, _ in values_and_counts(manifest, "item.brand")]
    brand_counts = collections.Counter(brand for brand in brands if brand is not None)
    assert [brand_values[row] for row in rows_of(manifest, "item.brand")] == [
        value_in_vocabulary(brand_counts, brands[item_ids.index(item)]) if item in item_ids else None for item in range(12)
    ]
    tag_values = [value for value, _ in values_and_counts(manifest, "item.tags")]
    tag_counts = collections.Counter(tag for item_tags in tags for tag in item_tags or [] if tag is not None)
    assert [[tag_values[row] for row in rows] for rows in rows_of(manifest, "item.tags")] == [
        [value_in_vocabulary(tag_counts, tag) for tag in tags[item_ids.index(item)] or []] if item in item_ids else []
        for item in range(12)
    ]
    boundaries = manifest.features["item.price"].boundaries
    assert boundaries is not None and list(boundaries) == sorted(set(boundaries)) and len(boundaries) < 3
    for item, row in enumerate(rows_of(manifest, "item.price")):
        price = prices[item_ids.index(item)] if item in item_ids else None
        is_missing = price is None or math.isnan(price)
        # A boundary is a price in decimal digits, for example 0.1, which differs from the float32 price in the last bits.
        assert row == (0 if is_missing else 1 + sum(price >= np.float32(boundary) for boundary in boundaries))


def test_the_context_of_an_ingested_log_is_in_the_order_of_its_events(tmp_path: Path) -> None:
    events = [(f"u{index % 5}", 100 + index % 7, 1_000 * (index * 7 % 40)) for index in range(40)]
    path = write_log(tmp_path / "a.parquet", events, device=[f"at {time}" for _, _, time in events])
    interactions = ingest_log(tmp_path / "log", path, split={"kind": "leave_last_out"}, context_columns=("device",))
    manifest = ingest(tmp_path / "features", interactions, context=[{"name": "device"}])
    device_values = [value for value, _ in values_and_counts(manifest, "context.device")]
    time_E = np.load(interactions.path("event_time.npy"))
    expected_values = []
    user_offset, train_end = (np.load(interactions.path(f"{name}.npy")) for name in ("user_offset", "train_end"))
    for start, stop, train_stop in zip(user_offset[:-1], user_offset[1:], train_end, strict=True):
        # A device that occurs only after training has the out-of-vocabulary row.
        expected_values += [f"at {time_E[index]}" if index < train_stop else None for index in range(start, stop)]
    assert [device_values[row] for row in rows_of(manifest, "context.device")] == expected_values
    assert len(device_values) == 1 + interactions.num_train_events


@pytest.mark.parametrize("features", [[], [{"name": "genre"}]])
def test_titles_of_items_are_stored_by_row_with_or_without_features(tmp_path: Path, features: list[dict[str, Any]]) -> None:
    path = write_parquet(tmp_path / "items.parquet", id=[12, 10, 99], title=["Ω", None, "other"], genre=["rock", "pop", "pop"])
    item_table = {"paths": path, "id_column": "id", "title_column": "title", "features": features}
    interactions = write_small_log(tmp_path / "log")
    manifest = ingest(tmp_path / "features", interactions, items=item_table)
    item_ids = pq.read_table(interactions.path("items.parquet"))["id"].to_pylist()
    titles = pq.read_table(manifest.path("item_titles.parquet")).to_pylist()
    assert [(item_ids[row["row"]], row["title"]) for row in titles] == [(12, "Ω")]
    assert len(manifest.features) == len(features)


def test_filter_columns_are_stored_by_row_in_their_types(tmp_path: Path) -> None:
    zone = timezone(timedelta(hours=2))
    path = write_parquet(
        tmp_path / "items.parquet",
        id=[12, 10, 99],
        price=[1.5, None, 3.0],
        genre=["rock", "pop", "pop"],
        since=[datetime(2026, 1, 1, 2, tzinfo=zone), None, None],
    )
    item_table = {
        "paths": path,
        "id_column": "id",
        "filter_columns": ["price", "genre", "since"],
        "features": [{"name": "genre"}],
    }
    interactions = write_small_log(tmp_path / "log")
    manifest = ingest(tmp_path / "features", interactions, items=item_table)
    item_ids = pq.read_table(interactions.path("items.parquet"))["id"].to_pylist()
    stored_rows = [
        row | {"row": item_ids[row["row"]]} for row in pq.read_table(manifest.path("item_columns.parquet")).to_pylist()
    ]
    assert sorted(stored_rows, key=lambda row: -row["row"]) == [
        {"row": 12, "price": 1.5, "genre": "rock", "since": datetime(2026, 1, 1)},
        {"row": 10, "price": None, "genre": "pop", "since": None},
    ]


@pytest.mark.parametrize("second_price_type", [pa.float32(), pa.float64()], ids=str)
def test_filter_columns_in_single_precision_are_stored_as_decimal_numbers(
    tmp_path: Path, second_price_type: pa.DataType
) -> None:
    paths = [
        write_parquet(tmp_path / "1.parquet", id=[10, 11, 12], price=pa.array([39.99, 0.7, math.nan], pa.float32())),
        write_parquet(tmp_path / "2.parquet", id=[13, 14], price=pa.array([0.1, None], second_price_type)),
    ]
    item_table = {"paths": paths, "id_column": "id", "filter_columns": ["price"]}
    manifest = ingest(tmp_path / "features", write_small_log(tmp_path / "log"), items=item_table)
    stored_columns = pq.read_table(manifest.path("item_columns.parquet"))
    assert stored_columns.schema.field("price").type == pa.float64()
    assert [str(row["price"]) for row in stored_columns.to_pylist()] == ["39.99", "0.7", "nan", "0.1", "None"]
