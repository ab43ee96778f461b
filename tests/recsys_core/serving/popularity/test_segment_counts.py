"""The most popular items of each value of a feature are those of a count by hand."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.dataset.feature_store import Feature, FeatureStore
from recsys_core.errors import InputError
from recsys_core.manifests import FeaturesManifest, InteractionsManifest
from recsys_core.serving.popularity import segment_counts
from recsys_core.serving.popularity.ranking import Segments
from recsys_core.serving.popularity.segment_counts import replace_items_of_segments, write_segments
from tests.recsys_core.evaluation.stage_folders import features_stage, interactions_stage
from tests.recsys_core.ingest.random_features import ingested_features

NUM_USERS, NUM_ITEMS, MIN_EVENTS = 60, 30, 40


@pytest.fixture
def stages(tmp_path: Path) -> tuple[InteractionsManifest, FeaturesManifest]:
    rng = np.random.default_rng(3)
    splits = [[rng.integers(0, NUM_ITEMS, size).tolist() for size in rng.integers(0, 9, NUM_USERS)] for _ in range(3)]
    interactions = interactions_stage(
        tmp_path / "interactions", train=splits[0], validation=splits[1], test=splits[2], items=NUM_ITEMS
    )
    num_events = sum(len(items) for split in splits for items in split)
    # The values 1 to 4 get rarer and rarer; 0 has the values without a row.
    rows = [rng.choice(5, count, p=[0.1, 0.45, 0.3, 0.1, 0.05]).astype(np.int32) for count in (NUM_USERS, num_events)]
    features = {f"{kind}.single": Feature(row, None, None) for kind, row in zip(("user", "context"), rows, strict=True)}
    stage = features_stage(tmp_path / "features", FeatureStore(features), facts=ingested_features(*features, "user.list"))
    return interactions, stage


@pytest.mark.parametrize("key", ["user.single", "context.single"])
@pytest.mark.parametrize("chunk_events", [1, 100, 1 << 25])
def test_items_are_ranked_by_the_events_with_each_value_before_the_test_split(
    stages: tuple[InteractionsManifest, FeaturesManifest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    chunk_events: int,
) -> None:
    monkeypatch.setattr(segment_counts, "_CHUNK_EVENTS", chunk_events)
    monkeypatch.setattr(segment_counts, "MAX_SEGMENT_ITEMS", 12)
    interactions, features = stages
    order = np.random.default_rng(0).permutation(NUM_ITEMS).astype(np.int32)
    path = tmp_path / "segments.parquet"
    write_segments(path, key, interactions=interactions, features=features, item_by_popularity_I=order, min_events=MIN_EVENTS)
    offset, end, items = (np.load(interactions.path(f"{name}.npy")) for name in ("user_offset", "validation_end", "event_item"))
    value_row = np.load(features.path(f"{key}.row.npy"))
    counts: dict[int, Counter[int]] = {value: Counter() for value in range(5)}
    for user in range(NUM_USERS):
        for event in range(offset[user], end[user]):
            counts[int(value_row[user if key.startswith("user.") else event])][int(items[event])] += 1
    expected = []
    for value in range(1, 5):
        total = counts[value].total()
        if total >= MIN_EVENTS:
            best = sorted(counts[value], key=lambda item: (-counts[value][item], order.tolist().index(item)))[:12]
            shares = [counts[value][item] / total for item in best]
            expected.append({"value_row": value, "item_rows": best, "shares": pytest.approx(shares)})
    assert 1 < len(expected) < 4
    assert pq.read_table(path).to_pylist() == expected


def test_a_feature_without_single_values_of_a_vocabulary_is_rejected(
    stages: tuple[InteractionsManifest, FeaturesManifest], tmp_path: Path
) -> None:
    interactions, features = stages
    order = np.arange(NUM_ITEMS, dtype=np.int32)
    for key, manifest in (("user.list", features), ("user.more", features), ("user.single", None)):
        with pytest.raises(InputError, match=f"package.popularity_by: {key} is no categorical feature of users or context"):
            write_segments(
                tmp_path / "x", key, interactions=interactions, features=manifest, item_by_popularity_I=order, min_events=1
            )
    assert not (tmp_path / "x").exists()


def test_segments_get_other_item_rows_without_the_items_that_left(tmp_path: Path) -> None:
    columns = {"value_row": [1, 4], "item_rows": [[3, 0, 2], [2]], "shares": [[0.5, 0.25, 0.25], [1.0]]}
    types = {"value_row": pa.int32(), "item_rows": pa.list_(pa.int32()), "shares": pa.list_(pa.float32())}
    pq.write_table(pa.table({name: pa.array(values, types[name]) for name, values in columns.items()}), tmp_path / "old")
    replace_items_of_segments(tmp_path / "old", tmp_path / "new", np.array([0, 1, -1, 2], np.int32))
    assert pq.read_table(tmp_path / "new").to_pydict() == {
        "value_row": [1, 4],
        "item_rows": [[2, 0], []],
        "shares": [[0.5, 0.25], []],
    }
    segments = Segments.read(tmp_path / "new", key="user.country", num_items=3)
    assert segments.items.lengths.tolist() == [2, 0]
