"""Features are stored in the order of the catalogue, each value as the row of a vocabulary, a hash or a bucket."""

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
USERS = ["ann", "bob", "cat"]
ITEMS = [10, 11, 12, 13, 14]


def stage(folder: Path, **settings: Any) -> InteractionsManifest:
    return write_interactions(folder, **({"users": USERS, "items": ITEMS, "log": LOG} | settings))


def ingest(
    folder: Path, interactions: InteractionsManifest, *, previous: FeaturesManifest | None = None, **config: Any
) -> FeaturesManifest:
    return ingest_features(
        FeaturesConfig(**config),
        dataset=Dataset(interactions),
        previous=previous,
        memory_limit="500MB",
        threads=1,
        folder=folder,
    )


def items(path: str, *features: dict[str, Any]) -> dict[str, Any]:
    return {"items": {"paths": path, "id_column": "id", "features": features}}


def rows_of(manifest: FeaturesManifest, key: str) -> Any:
    """Return the table row of each user, item or event; a list of rows for a list feature."""
    row = np.load(manifest.path(f"{key}.row.npy"))
    assert row.dtype == np.int32
    if f"{key}.offset.npy" not in manifest.files:
        return row.tolist()
    offset = np.load(manifest.path(f"{key}.offset.npy"))
    assert offset.dtype == np.int64 and offset[-1] == len(row)
    return [part.tolist() for part in np.split(row, offset[1:-1])]


def weights_of(manifest: FeaturesManifest, key: str) -> list[list[float]]:
    weight = np.load(manifest.path(f"{key}.weight.npy"))
    assert weight.dtype == np.float32
    return [part.tolist() for part in np.split(weight, np.load(manifest.path(f"{key}.offset.npy"))[1:-1])]


def vocabulary(manifest: FeaturesManifest, key: str) -> list[tuple[Any, int]]:
    table = pq.read_table(manifest.path(f"{key}.vocabulary.parquet")).to_pydict()
    return list(zip(table["value"], table["count"], strict=True))


def test_a_vocabulary_is_sorted_by_count_and_row_zero_is_out_of_vocabulary(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "i.parquet", id=[12, 10, 99, 13, 11], genre=["rock", "pop", "metal", None, "rock"])
    manifest = ingest(tmp_path / "features", stage(tmp_path / "log"), **items(path, {"name": "genre"}))
    assert vocabulary(manifest, "item.genre") == [(None, 1), ("rock", 2), ("pop", 1)]
    assert rows_of(manifest, "item.genre") == [2, 1, 1, 0, 0]
    facts = manifest.features["item.genre"]
    assert (facts.num_rows, facts.num_values, facts.num_missing, facts.num_out_of_vocabulary, facts.num_new_values) == (
        3,
        5,
        2,
        0,
        2,
    )
    assert manifest.tables["item"].model_dump() == {"num_rows": 5, "num_not_in_catalogue": 1, "num_without_row": 1}
    assert sorted(manifest.files) == ["item.genre.row.npy", "item.genre.vocabulary.parquet", "item_columns.parquet"]


def test_values_below_min_count_are_out_of_vocabulary_and_counted(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "i.parquet", id=ITEMS, brand=[7, 7, 8, 8, 9])
    manifest = ingest(tmp_path / "features", stage(tmp_path / "log"), **items(path, {"name": "brand", "min_count": 2}))
    assert vocabulary(manifest, "item.brand") == [(None, 1), (7, 2), (8, 2)]
    assert rows_of(manifest, "item.brand") == [1, 1, 2, 2, 0]
    assert manifest.features["item.brand"].num_out_of_vocabulary == 1


def test_lists_keep_their_order_nulls_are_row_zero_and_long_lists_are_cut(tmp_path: Path) -> None:
    tags = [["b", "a", "b"], None, [], ["a", None], ["c", "b", "a", "a"]]
    path = write_parquet(tmp_path / "i.parquet", id=ITEMS, tags=pa.array(tags, pa.list_(pa.string())))
    manifest = ingest(
        tmp_path / "features", stage(tmp_path / "log"), **items(path, {"name": "tags", "kind": "list", "max_values": 3})
    )
    assert vocabulary(manifest, "item.tags") == [(None, 1), ("a", 3), ("b", 3), ("c", 1)]
    assert rows_of(manifest, "item.tags") == [[2, 1, 2], [], [], [1, 0], [3, 2, 1]]
    facts = manifest.features["item.tags"]
    assert (facts.num_rows, facts.num_values, facts.num_missing, facts.num_out_of_vocabulary, facts.num_truncated) == (
        4,
        8,
        2,
        1,
        1,
    )


def test_weights_stay_next_to_their_values(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "u.parquet", who=["cat", "ann"], likes=[[5, 6], [6]], much=[[0.5, 2.0], [1.5]])
    feature = {"name": "likes", "kind": "weighted_list", "weight_column": "much"}
    config = {"users": {"paths": path, "id_column": "who", "features": [feature]}}
    manifest = ingest(tmp_path / "features", stage(tmp_path / "log"), **config)
    assert vocabulary(manifest, "user.likes") == [(None, 0), (6, 2), (5, 1)]
    assert rows_of(manifest, "user.likes") == [[1], [], [2, 1]]
    assert weights_of(manifest, "user.likes") == [[1.5], [], [0.5, 2.0]]


def test_numbers_go_into_the_buckets_that_the_config_bounds(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "i.parquet", id=ITEMS, price=[0.5, 1.0, 99.0, None, float("nan")])
    manifest = ingest(
        tmp_path / "features",
        stage(tmp_path / "log"),
        **items(path, {"name": "price", "kind": "numeric", "boundaries": [1, 10]}),
    )
    assert rows_of(manifest, "item.price") == [1, 2, 3, 0, 0]
    assert (manifest.features["item.price"].num_rows, manifest.features["item.price"].num_missing) == (4, 2)


def test_buckets_are_equally_full_on_what_training_sees(tmp_path: Path) -> None:
    log = [([row], [], []) for row in range(8)]
    interactions = write_interactions(tmp_path / "log", users=list("abcdefgh"), items=list(range(9)), log=log)
    path = write_parquet(
        tmp_path / "i.parquet", id=list(range(9)), price=[8, 1, 7, 2, 6, 3, 5, 4, 1000]
    )  # 8 is never trained on
    manifest = ingest(tmp_path / "features", interactions, **items(path, {"name": "price", "kind": "numeric", "buckets": 4}))
    assert manifest.features["item.price"].boundaries == (3.0, 5.0, 7.0)
    assert rows_of(manifest, "item.price") == [4, 1, 4, 1, 3, 2, 3, 2, 4]


def test_a_frequent_number_has_its_own_bucket(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "i.parquet", id=ITEMS, price=[0.0, 0.0, 0.0, 2.0, 3.0])
    log = [([0, 1, 2, 3, 4], [], [])] * 3
    manifest = ingest(
        tmp_path / "features",
        stage(tmp_path / "log", log=log),
        **items(path, {"name": "price", "kind": "numeric", "buckets": 5}),
    )
    assert manifest.features["item.price"].boundaries == (2.0, 3.0)
    assert rows_of(manifest, "item.price") == [1, 1, 1, 2, 3]


def test_a_hash_needs_no_vocabulary_and_stays_the_same(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "i.parquet", id=ITEMS, brand=["a", "b", "a", None, "émile"])
    manifest = ingest(tmp_path / "features", stage(tmp_path / "log"), **items(path, {"name": "brand", "hash_rows": 1000}))
    digest = {value: hashlib.md5(value.encode()).digest() for value in ("a", "b", "émile")}
    row = {value: 1 + int.from_bytes(half[8:], "little") % 1000 for value, half in digest.items()}
    assert rows_of(manifest, "item.brand") == [row["a"], row["b"], row["a"], 0, row["émile"]]
    assert manifest.features["item.brand"].num_rows == 1001
    assert sorted(manifest.files) == ["item.brand.row.npy", "item_columns.parquet"]


def test_the_context_is_counted_only_on_training_events(tmp_path: Path) -> None:
    device = ["tv", "tv", "app", "web", "web", "app", "web", "car", "app"]  # LOG: 3 + 1 + 1, 1 + 0 + 1, 2
    hour = [3, 1, 2, 50, 60, 4, 70, 6, 5]
    interactions = stage(tmp_path / "log", context={"device": device, "hour": hour})
    features = [{"name": "device"}, {"name": "time", "column": "hour", "kind": "numeric", "buckets": 2}]
    manifest = ingest(tmp_path / "features", interactions, context=features)
    assert vocabulary(manifest, "context.device") == [(None, 0), ("app", 3), ("tv", 2), ("car", 1)]
    assert rows_of(manifest, "context.device") == [2, 2, 1, 0, 0, 1, 0, 3, 1]
    assert manifest.features["context.device"].num_out_of_vocabulary == 3
    assert manifest.features["context.time"].boundaries == (4.0,)
    assert rows_of(manifest, "context.time") == [1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert manifest.tables == {}


def test_a_workspace_in_a_folder_named_like_a_column_is_read_like_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "device=tv" / "id=7" / "value=a"
    interactions = stage(folder / "log", context={"device": ["tv", "app"] * 4 + ["car"]})
    brands = write_parquet(tmp_path / "brands.parquet", sku=ITEMS, brand=["a", "a", "b", "c", "c"])
    settings = {
        "items": {"paths": brands, "id_column": "sku", "features": [{"name": "brand"}]},
        "context": [{"name": "device"}],
    }
    first = ingest(folder / "run1", interactions, **settings)
    second = ingest(folder / "run2", interactions, previous=first, **settings)
    assert rows_of(first, "item.brand") == rows_of(second, "item.brand") == [1, 1, 3, 2, 2]
    assert set(rows_of(first, "context.device")) == {1, 2, 3}


def test_a_value_keeps_its_row_in_later_runs(tmp_path: Path) -> None:
    log = stage(tmp_path / "log")
    first = write_parquet(tmp_path / "1.parquet", id=ITEMS, brand=["a", "a", "b", "c", "c"], price=[1, 2, 3, 4, 5])
    second = write_parquet(tmp_path / "2.parquet", id=ITEMS, brand=["b", "d", "d", "d", "c"], price=[10, 20, 30, 40, 50])
    features = ({"name": "brand"}, {"name": "price", "kind": "numeric", "buckets": 2})
    first_manifest = ingest(tmp_path / "run1", log, **items(first, *features))
    assert not first_manifest.features["item.brand"].is_continued
    second_manifest = ingest(tmp_path / "run2", log, previous=first_manifest, **items(second, *features))
    assert vocabulary(second_manifest, "item.brand") == [(None, 0), ("a", 0), ("c", 1), ("b", 1), ("d", 3)]
    assert rows_of(second_manifest, "item.brand") == [3, 4, 4, 4, 2]
    brand = second_manifest.features["item.brand"]
    assert (brand.is_continued, brand.num_new_values) == (True, 1)
    assert second_manifest.features["item.price"].boundaries == first_manifest.features["item.price"].boundaries


@pytest.mark.parametrize("why", ["another lineage", "another definition", "a damaged vocabulary"])
def test_a_vocabulary_is_rebuilt_after_a_change(tmp_path: Path, why: str) -> None:
    log = stage(tmp_path / "log")
    path = write_parquet(tmp_path / "i.parquet", id=ITEMS, brand=["a", "a", "b", "b", "b"], kin=["a", "a", "b", "b", "b"])
    first_manifest = ingest(
        tmp_path / "run1",
        log,
        **items(write_parquet(tmp_path / "1.parquet", id=ITEMS, brand=["a", "a", "a", "b", "c"]), {"name": "brand"}),
    )
    feature = {"name": "brand"}
    if why == "another lineage":
        log = stage(tmp_path / "rebuilt", lineage="second")
    elif why == "another definition":
        feature["column"] = "kin"
    else:
        first_manifest.path("item.brand.vocabulary.parquet").write_bytes(b"stale")
    second_manifest = ingest(tmp_path / "run2", log, previous=first_manifest, **items(path, feature))
    assert vocabulary(second_manifest, "item.brand") == [(None, 0), ("b", 3), ("a", 2)]
    assert not second_manifest.features["item.brand"].is_continued


def test_the_same_input_is_not_read_again_and_a_changed_one_is(tmp_path: Path) -> None:
    log = stage(tmp_path / "log")
    path = write_parquet(tmp_path / "i.parquet", id=ITEMS, brand=["a"] * 5)
    config = items(path, {"name": "brand"})
    manifest = ingest(tmp_path / "features", log, **config)
    assert ingest(tmp_path / "features", log, **config) == manifest
    write_parquet(tmp_path / "i.parquet", id=ITEMS, brand=["a", "b"] + ["a"] * 3)
    assert ingest(tmp_path / "features", log, **config).fingerprint != manifest.fingerprint


values = st.none() | st.sampled_from(["a", "b", "", "A", "é", "e\u0301", "\u202e", "🎧", "x" * 300]) | st.text(max_size=3)
numbers = st.none() | st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, 2.0])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_features_are_stored_unchanged(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("case")
    described = data.draw(st.lists(st.integers(0, 9), unique=True, min_size=1))
    count = len(described)
    brand = data.draw(st.lists(values, min_size=count, max_size=count))
    tags = data.draw(st.lists(st.none() | st.lists(values, max_size=4), min_size=count, max_size=count))
    price = data.draw(st.lists(numbers, min_size=count, max_size=count))
    min_count = data.draw(st.integers(1, 2))
    path = write_parquet(
        folder / "i.parquet", row_group=3, id=described, brand=pa.array(brand, pa.string()),
        tags=pa.array(tags, pa.list_(pa.string())), price=pa.array(price, pa.float32()),
    )  # fmt: skip
    features = (
        {"name": "brand", "min_count": min_count},
        {"name": "tags", "kind": "list", "min_count": min_count},
        {"name": "price", "kind": "numeric", "buckets": 3},
    )
    log = write_interactions(folder / "log", users=["u"], items=list(range(12)), log=[(list(range(12)), [], [])])
    manifest = ingest(folder / "features", log, **items(path, *features))

    def expected(counts: collections.Counter[str], value: str | None) -> str | None:
        return value if value is not None and counts[value] >= min_count else None

    brands = [value for value, _ in vocabulary(manifest, "item.brand")]
    counts = collections.Counter(value for value in brand if value is not None)
    assert [brands[row] for row in rows_of(manifest, "item.brand")] == [
        expected(counts, brand[described.index(item)]) if item in described else None for item in range(12)
    ]
    words = [value for value, _ in vocabulary(manifest, "item.tags")]
    counts = collections.Counter(value for tag in tags for value in tag or [] if value is not None)
    assert [[words[row] for row in part] for part in rows_of(manifest, "item.tags")] == [
        [expected(counts, value) for value in tags[described.index(item)] or []] if item in described else []
        for item in range(12)
    ]
    boundaries = manifest.features["item.price"].boundaries
    assert boundaries is not None and list(boundaries) == sorted(set(boundaries)) and len(boundaries) < 3
    for item, row in enumerate(rows_of(manifest, "item.price")):
        value = price[described.index(item)] if item in described else None
        is_missing = value is None or math.isnan(value)
        assert row == (0 if is_missing else 1 + sum(value >= bound for bound in boundaries))


def test_the_context_follows_the_events_of_a_real_log(tmp_path: Path) -> None:
    events = [(f"u{at % 5}", 100 + at % 7, 1_000 * (at * 7 % 40)) for at in range(40)]
    path = write_log(tmp_path / "a.parquet", events, device=[f"at {time}" for _, _, time in events])
    log = ingest_log(tmp_path / "log", path, split={"kind": "leave_last_out"}, context_columns=("device",))
    manifest = ingest(tmp_path / "features", log, context=[{"name": "device"}])
    words = [value for value, _ in vocabulary(manifest, "context.device")]
    time = np.load(log.path("event_time.npy"))
    expected = []
    user_offset, train_end = (np.load(log.path(f"{name}.npy")) for name in ("user_offset", "train_end"))
    for start, stop, end in zip(user_offset[:-1], user_offset[1:], train_end, strict=True):
        expected += [f"at {time[at]}" if at < end else None for at in range(start, stop)]
    assert [words[row] for row in rows_of(manifest, "context.device")] == expected
    assert len(words) == 1 + log.num_train_events


@pytest.mark.parametrize("features", [[], [{"name": "genre"}]])
def test_titles_of_items_are_stored_by_row_with_or_without_features(tmp_path: Path, features: list[dict[str, Any]]) -> None:
    path = write_parquet(tmp_path / "i.parquet", id=[12, 10, 99], title=["Ω", None, "other"], genre=["rock", "pop", "pop"])
    table = {"paths": path, "id_column": "id", "title_column": "title", "features": features}
    interactions = stage(tmp_path / "log")
    manifest = ingest(tmp_path / "features", interactions, items=table)
    item_ids = pq.read_table(interactions.path("items.parquet"))["id"].to_pylist()
    titles = pq.read_table(manifest.path("item_titles.parquet")).to_pylist()
    assert [(item_ids[row["row"]], row["title"]) for row in titles] == [(12, "Ω")]
    assert len(manifest.features) == len(features)


def test_filter_columns_are_stored_by_row_in_their_types(tmp_path: Path) -> None:
    zone = timezone(timedelta(hours=2))
    path = write_parquet(
        tmp_path / "i.parquet",
        id=[12, 10, 99],
        price=[1.5, None, 3.0],
        genre=["rock", "pop", "pop"],
        since=[datetime(2026, 1, 1, 2, tzinfo=zone), None, None],
    )
    table = {"paths": path, "id_column": "id", "filter_columns": ["price", "genre", "since"], "features": [{"name": "genre"}]}
    interactions = stage(tmp_path / "log")
    manifest = ingest(tmp_path / "features", interactions, items=table)
    item_ids = pq.read_table(interactions.path("items.parquet"))["id"].to_pylist()
    stored = [row | {"row": item_ids[row["row"]]} for row in pq.read_table(manifest.path("item_columns.parquet")).to_pylist()]
    assert sorted(stored, key=lambda row: -row["row"]) == [
        {"row": 12, "price": 1.5, "genre": "rock", "since": datetime(2026, 1, 1)},
        {"row": 10, "price": None, "genre": "pop", "since": None},
    ]
