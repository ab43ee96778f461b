"""Rankings of items by segment, compared with a count of the events in plain Python."""

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
from tests.recsys_core.evaluation.stage_folders import write_features_stage, write_interactions_stage
from tests.recsys_core.ingest.random_features import ingested_features

NUM_USERS, NUM_ITEMS, MIN_EVENTS = 60, 30, 40


@pytest.fixture
def stages(tmp_path: Path) -> tuple[InteractionsManifest, FeaturesManifest]:
    """Random events, and a user feature and an event feature with four values each."""
    rng = np.random.default_rng(3)
    splits = [[rng.integers(0, NUM_ITEMS, size).tolist() for size in rng.integers(0, 9, NUM_USERS)] for _ in range(3)]
    interactions = write_interactions_stage(
        tmp_path / "interactions", train=splits[0], validation=splits[1], test=splits[2], num_items=NUM_ITEMS
    )
    num_events = sum(len(items) for split in splits for items in split)
    # Row 0 is for unknown values. Row 1 has the most frequent value, and row 4 the rarest.
    value_rows = [rng.choice(5, count, p=[0.1, 0.45, 0.3, 0.1, 0.05]).astype(np.int32) for count in (NUM_USERS, num_events)]
    features = {
        f"{owner}.single": Feature(value_row, None, None)
        for owner, value_row in zip(("user", "context"), value_rows, strict=True)
    }
    manifest = write_features_stage(
        tmp_path / "features", FeatureStore(features), ingested_by_feature=ingested_features(*features, "user.list")
    )
    return interactions, manifest


@pytest.mark.parametrize("key", ["user.single", "context.single"])
@pytest.mark.parametrize("chunk_events", [1, 100, 1 << 25])
def test_each_value_with_enough_events_has_its_own_ranking_of_items(
    stages: tuple[InteractionsManifest, FeaturesManifest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    chunk_events: int,
) -> None:
    monkeypatch.setattr(segment_counts, "_MAX_CHUNK_EVENTS", chunk_events)
    monkeypatch.setattr(segment_counts, "MAX_SEGMENT_ITEMS", 12)
    interactions, features = stages
    item_by_popularity_I = np.random.default_rng(0).permutation(NUM_ITEMS).astype(np.int32)  # breaks ties
    path = tmp_path / "segments.parquet"
    write_segments(
        path,
        key,
        interactions=interactions,
        features=features,
        item_by_popularity_I=item_by_popularity_I,
        min_events=MIN_EVENTS,
    )
    user_offset, validation_end, event_item = (
        np.load(interactions.path(f"{name}.npy")) for name in ("user_offset", "validation_end", "event_item")
    )
    value_row = np.load(features.path(f"{key}.row.npy"))
    counts_by_value: dict[int, Counter[int]] = {value: Counter() for value in range(5)}
    for user in range(NUM_USERS):
        for event in range(user_offset[user], validation_end[user]):
            counts_by_value[int(value_row[user if key.startswith("user.") else event])][int(event_item[event])] += 1
    popularity_rank = item_by_popularity_I.argsort()
    expected_segments = []
    for value in range(1, 5):
        count_by_item = counts_by_value[value]
        num_events = count_by_item.total()
        if num_events >= MIN_EVENTS:
            top_items = sorted(count_by_item, key=lambda item: (-count_by_item[item], popularity_rank[item]))[:12]
            shares = [count_by_item[item] / num_events for item in top_items]
            expected_segments.append({"value_row": value, "item_rows": top_items, "shares": pytest.approx(shares)})
    assert 1 < len(expected_segments) < 4  # some of the four values have too few events
    assert pq.read_table(path).to_pylist() == expected_segments


def test_segments_of_a_feature_without_a_vocabulary_are_rejected(
    stages: tuple[InteractionsManifest, FeaturesManifest], tmp_path: Path
) -> None:
    interactions, features = stages
    single_feature = features.features["user.single"]
    hashed_feature = single_feature.model_copy(update={"hash_rows": 1_000})
    features = features.model_copy(
        update={"features": features.features | {"user.hash": hashed_feature, "item.single": single_feature}}
    )
    item_by_popularity_I = np.arange(NUM_ITEMS, dtype=np.int32)
    path = tmp_path / "segments.parquet"
    for key, manifest in (
        ("user.list", features),
        ("user.more", features),
        ("user.single", None),
        ("user.hash", features),
        ("item.single", features),
    ):
        with pytest.raises(InputError, match=f"package.popularity_by: {key} is not a categorical user or context feature"):
            write_segments(
                path,
                key,
                interactions=interactions,
                features=manifest,
                item_by_popularity_I=item_by_popularity_I,
                min_events=1,
            )
    assert not path.exists()


def test_items_get_new_rows_in_the_segments_and_removed_items_are_dropped_from_them(tmp_path: Path) -> None:
    columns = {"value_row": [1, 4], "item_rows": [[3, 0, 2], [2]], "shares": [[0.5, 0.25, 0.25], [1.0]]}
    types = {"value_row": pa.int32(), "item_rows": pa.list_(pa.int32()), "shares": pa.list_(pa.float32())}
    pq.write_table(pa.table({name: pa.array(values, types[name]) for name, values in columns.items()}), tmp_path / "old")
    new_row_I = np.array([0, 1, -1, 2], np.int32)  # item 2 is removed
    replace_items_of_segments(tmp_path / "old", tmp_path / "new", new_row_I)
    assert pq.read_table(tmp_path / "new").to_pydict() == {
        "value_row": [1, 4],
        "item_rows": [[2, 0], []],
        "shares": [[0.5, 0.25], []],
    }
    segments = Segments.read(tmp_path / "new", key="user.country", num_items=3)
    assert segments.item_rows.lengths.tolist() == [2, 0]
