"""Features of a request: a value gets the table rows and weights that the ingest stores for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.errors import InputError
from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.manifests import Dataset, FeaturesManifest
from recsys_core.serving.description import QueryFeature, request_columns
from recsys_core.serving.given_features import RequestFeatures
from tests.recsys_core.ingest.interactions_with_context import write_interactions
from tests.recsys_core.ingest.parquet_files import write_parquet

NUM_USERS = 40
RANDOM = np.random.default_rng(4)
LETTERS_OF_USERS = [[str(letter) for letter in RANDOM.choice(list("abcdé"), RANDOM.integers(1, 5))] for _ in range(NUM_USERS)]
COLUMNS: dict[str, Any] = {
    "country": [f"country {value}" for value in RANDOM.integers(0, 6, NUM_USERS)],
    "number": RANDOM.integers(-5, 5, NUM_USERS).tolist(),
    "is_member": (RANDOM.random(NUM_USERS) < 0.5).tolist(),
    "age": RANDOM.normal(40, 20, NUM_USERS).tolist(),
    "score": (np.arange(NUM_USERS) % 10 / 10).tolist(),
    "tags": LETTERS_OF_USERS,
    "topics": LETTERS_OF_USERS,
    "topic_weights": [RANDOM.random(len(letters)).astype(np.float32).tolist() for letters in LETTERS_OF_USERS],
}
"""Columns of the table of users, which are also the columns of the request."""
FEATURES: list[dict[str, Any]] = [
    {"name": "country", "min_count": 3},
    {"name": "number"},
    {"name": "member", "column": "is_member"},
    {"name": "hashed_country", "column": "country", "hash_rows": 50},
    {"name": "hashed_number", "column": "number", "hash_rows": 50},
    {"name": "hashed_member", "column": "is_member", "hash_rows": 50},
    {"name": "bucket", "column": "age", "kind": "numeric", "buckets": 7},
    {"name": "boundary", "column": "age", "kind": "numeric", "boundaries": [20, 40.5, 60]},
    {"name": "score_bucket", "column": "score", "kind": "numeric", "buckets": 10},
    {"name": "score_boundary", "column": "score", "kind": "numeric", "boundaries": [0.1, 0.3, 0.7, 0.9]},
    {"name": "standard", "column": "age", "kind": "numeric", "standardise": True},
    {"name": "tags", "kind": "list", "max_values": 2},
    {"name": "topics", "kind": "weighted_list", "weight_column": "topic_weights", "max_values": 3},
    {"name": "hashed_tags", "column": "tags", "kind": "list", "hash_rows": 9},
]


@pytest.fixture(scope="module")
def features_manifest(tmp_path_factory: pytest.TempPathFactory) -> FeaturesManifest:
    folder = tmp_path_factory.mktemp("ingest")
    log = [([user % 3], [], []) for user in range(NUM_USERS)]
    interactions = write_interactions(
        folder / "log", user_ids=[f"user {user}" for user in range(NUM_USERS)], item_ids=[1, 2, 3], log=log
    )
    list_columns = {name: pa.array(COLUMNS[name], pa.list_(pa.string())) for name in ("tags", "topics")}
    # The float32 values of 0.7 and 0.9 are below the boundaries 0.7 and 0.9.
    score_column = pa.array(COLUMNS["score"], pa.float32())
    columns = COLUMNS | list_columns | {"score": score_column}
    users_path = write_parquet(folder / "users.parquet", id=[f"user {user}" for user in range(NUM_USERS)], **columns)
    return ingest_features(
        FeaturesConfig.model_validate({"users": {"paths": users_path, "id_column": "id", "features": FEATURES}}),
        dataset=Dataset(interactions),
        previous=None,
        memory_limit="500MB",
        threads=1,
        folder=folder / "features",
    )


def test_a_value_gets_the_rows_and_weights_that_the_ingest_stored(features_manifest: FeaturesManifest) -> None:
    features = {key: QueryFeature.of(key, features_manifest) for key in features_manifest.features}
    encoded_features = RequestFeatures(features, folder=features_manifest.folder).encode(COLUMNS, num_rows=NUM_USERS)
    stored_features = FeatureStore.open(features_manifest).feature_by_key
    assert encoded_features.keys() == stored_features.keys()
    for key, feature in encoded_features.items():
        rows, weights = stored_features[key].rows_and_weights(np.arange(NUM_USERS))
        assert feature.is_given_B.all(), key
        np.testing.assert_array_equal(feature.rows.offset, rows.offset, err_msg=key)
        np.testing.assert_array_equal(feature.rows.values_L, rows.values_L, err_msg=key)
        assert (feature.weight_L is None) == (weights is None), key
        if weights is not None:
            np.testing.assert_array_equal(feature.weight_L, weights, err_msg=key)


def test_a_value_that_the_ingest_has_not_seen_gets_row_0(features_manifest: FeaturesManifest, tmp_path: Path) -> None:
    features = {key: QueryFeature.of(key, features_manifest) for key in ("user.country", "user.number", "user.tags")}
    encoded_features = RequestFeatures(features, folder=features_manifest.folder).encode(
        {"country": ["nowhere", None], "number": [10**6, -5.0], "tags": [["z"], []]}, num_rows=2
    )
    assert encoded_features["user.country"].rows.values_L.tolist() == [0]
    assert encoded_features["user.country"].is_given_B.tolist() == [True, False]
    assert encoded_features["user.number"].rows.values_L[0] == 0 and encoded_features["user.number"].rows.values_L[1] > 0
    assert encoded_features["user.tags"].rows.offset.tolist() == [0, 1, 1]


@pytest.mark.parametrize("key", ["user.number", "user.hashed_number"])
def test_an_integer_may_be_a_whole_float_or_a_decimal_string(features_manifest: FeaturesManifest, key: str) -> None:
    """pandas converts a column of integers with a missing value to floats."""
    request_features = RequestFeatures({key: QueryFeature.of(key, features_manifest)}, folder=features_manifest.folder)
    encoded_feature = request_features.encode({"number": [-4, -4.0, "-4", None]}, num_rows=4)[key]
    row_of_integer, *rows_of_float_and_text = encoded_feature.rows.values_L.tolist()
    assert row_of_integer > 0 and rows_of_float_and_text == [row_of_integer] * 2
    assert encoded_feature.is_given_B.tolist() == [True, True, True, False]
    with pytest.raises(InputError, match=r"number: value 0\.5 is not an integer"):
        request_features.encode({"number": [0.5]}, num_rows=1)


def test_a_column_that_users_and_context_share_has_a_prefix_in_requests() -> None:
    features = {
        "user.country": QueryFeature(kind="categorical", column="country"),
        "context.place": QueryFeature(kind="categorical", column="country"),
        "context.history": QueryFeature(kind="weighted_list", column="history", weight_column="weights"),
    }
    assert request_columns(features) == {
        "user.country": ("user.country", None),
        "context.place": ("context.country", None),
        "context.history": ("context.history", "weights"),
    }
