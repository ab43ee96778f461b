"""Features of users that are sent to a package without users: its query tower reads the rows and weights of the ingest."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.manifests import Dataset, FeaturesManifest
from recsys_core.serving.description import PackageDescription, QueryFeature
from recsys_core.serving.given_features import RequestFeatures
from tasks.gate.user_features import user_feature_columns
from tests.recsys_core.ingest.interactions_with_context import write_interactions
from tests.recsys_core.ingest.parquet_files import write_parquet

NUM_USERS = 60
FEATURES: list[dict[str, Any]] = [
    {"name": "country", "min_count": 3},
    {"name": "frequent_country", "column": "country", "min_count": 10},
    {"name": "number", "min_count": 5},
    {"name": "is_member"},
    {"name": "bucket", "column": "age", "kind": "numeric", "buckets": 7},
    {"name": "boundary", "column": "age", "kind": "numeric", "boundaries": [20, 40, 60]},
    {"name": "standard", "column": "age", "kind": "numeric", "standardise": True},
    {"name": "income", "kind": "numeric", "boundaries": [-1.5, 0, 1e9]},
    {"name": "same_income", "column": "constant", "kind": "numeric", "standardise": True},
    {"name": "tags", "kind": "list", "min_count": 9, "max_values": 3},
    {"name": "numbers", "kind": "list", "min_count": 9},
    {"name": "topics", "kind": "weighted_list", "weight_column": "topic_weights", "max_values": 3, "min_count": 9},
]
HASHED_FEATURES: list[dict[str, Any]] = [
    {"name": "city", "hash_rows": 20},
    {"name": "labels", "kind": "list", "hash_rows": 9},
    {"name": "shared", "column": "shared_tags", "kind": "list"},
    {"name": "shared_pair", "column": "shared_tags", "kind": "list", "max_values": 2},
]
"""Features that cannot be decoded: two hashed features, and two lists with a common column."""


def random_columns() -> dict[str, Any]:
    """Return a table of users with missing, rare and extreme values."""
    random = np.random.default_rng(6)

    def or_none(values: list[Any]) -> list[Any]:
        return [None if random.random() < 0.1 else value for value in values]

    frequent_texts, rare_texts = ["a", "b", "é", "unknown value 0"], list("uvwxyz")
    words = [*frequent_texts * 3, *rare_texts]
    texts = [[str(text) for text in random.choice(words, random.integers(0, 5))] for _ in range(NUM_USERS)]
    text_lists = pa.array(or_none(texts), pa.list_(pa.string()))
    weights = [None if texts is None else random.random(len(texts)).tolist() for texts in text_lists.to_pylist()]
    return {
        "country": or_none([f"country {value}" for value in random.integers(0, 6, NUM_USERS)]),
        "number": or_none(random.integers(-9, 9, NUM_USERS).tolist()),
        "is_member": or_none((random.random(NUM_USERS) < 0.5).tolist()),
        "age": pa.array(or_none([1e6, *random.integers(0, 90, NUM_USERS - 1).tolist()]), pa.float64()),
        "income": or_none([1e300, -1e300, -1.5, *random.normal(0, 2, NUM_USERS - 3).tolist()]),
        "constant": or_none([1e12 / 3] * NUM_USERS),
        "tags": text_lists,
        "numbers": pa.array([random.integers(-3, 9, size).tolist() for size in random.integers(0, 5, NUM_USERS)]),
        "topics": text_lists,
        "topic_weights": pa.array(weights, pa.list_(pa.float32())),
        "city": [f"city {user}" for user in range(NUM_USERS)],
        "labels": text_lists,
        "shared_tags": text_lists,
    }


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeaturesManifest:
    folder = tmp_path_factory.mktemp("ingest")
    user_ids = [f"user {user}" for user in range(NUM_USERS + 1)]  # the table does not have the last user
    log = [([user % 3], [], []) for user in range(NUM_USERS + 1)]
    interactions = write_interactions(folder / "log", user_ids=user_ids, item_ids=[1, 2, 3], log=log)
    path = write_parquet(folder / "users.parquet", id=user_ids[:NUM_USERS], **random_columns())
    table = {"paths": path, "id_column": "id", "features": FEATURES + HASHED_FEATURES}
    return ingest_features(
        FeaturesConfig.model_validate({"users": table}),
        dataset=Dataset(interactions),
        previous=None,
        memory_limit="500MB",
        threads=1,
        folder=folder / "features",
    )


def package_of(features: FeaturesManifest, keys: list[str], *, users: str = "none") -> PackageDescription:
    """Return the description of a package that reads the features `keys`."""
    query_features = {key: QueryFeature.of(key, features) for key in keys}
    return PackageDescription.model_construct(users=users, features=query_features)


@settings(max_examples=40, deadline=None)
@given(
    names=st.sets(st.sampled_from([feature["name"] for feature in FEATURES]), min_size=1),
    users=st.lists(st.integers(0, NUM_USERS), min_size=1),
)
def test_the_package_encodes_the_decoded_values_as_the_rows_and_weights_of_the_ingest(
    features: FeaturesManifest, names: set[str], users: list[int]
) -> None:
    package, user_row_U = package_of(features, [f"user.{name}" for name in sorted(names)]), np.array(users)
    columns = {
        name: values.to_pylist() for name, values in user_feature_columns(package, features, user_row_U=user_row_U).items()
    }
    encoded_features = RequestFeatures(package.features, folder=features.folder).encode(columns, num_rows=len(users))
    assert encoded_features.keys() == package.features.keys()
    for key, encoded_feature in encoded_features.items():
        rows, weights = FeatureStore.open(features).feature_by_key[key].rows_and_weights(user_row_U)
        is_list = features.features[key].kind in ("list", "weighted_list")
        if is_list:
            assert encoded_feature.rows.lengths.tolist() == rows.lengths.tolist(), key
        encoded_row_L = np.zeros(len(rows.values_L), np.int64)  # without a value, the query tower reads row 0
        encoded_row_L[slice(None) if is_list else encoded_feature.is_given_B] = encoded_feature.rows.values_L
        assert encoded_row_L.tolist() == rows.values_L.tolist(), key
        if weights is not None:
            given_weights = weights if is_list else weights[encoded_feature.is_given_B]
            np.testing.assert_allclose(encoded_feature.weight_L, given_weights, rtol=1e-6, err_msg=key)


def test_hashed_values_and_lists_with_a_common_column_are_left_out(features: FeaturesManifest) -> None:
    names = ["country", "city", "labels", "shared", "shared_pair"]
    package = package_of(features, [f"user.{name}" for name in names])
    assert user_feature_columns(package, features, user_row_U=np.arange(5)).keys() == {"country"}


def test_a_package_that_stores_users_gets_no_features(features: FeaturesManifest) -> None:
    package = package_of(features, ["user.country"], users="stored")
    assert user_feature_columns(package, features, user_row_U=np.arange(5)) == {}
    assert user_feature_columns(package_of(features, ["user.country"]), None, user_row_U=np.arange(5)) == {}


@pytest.mark.parametrize(
    "change", [{"value_type": "int64"}, {"column": "nation"}, {"kind": "list"}, {"kind": "numeric", "value_type": None}]
)
def test_a_feature_that_the_package_reads_differently_from_the_run_is_left_out(
    features: FeaturesManifest, change: dict[str, Any]
) -> None:
    """The values of the run would be invalid for the package."""
    package = package_of(features, ["user.country", "user.number"])
    package.features["user.country"] = package.features["user.country"].model_copy(update=change)
    package.features["user.new"] = QueryFeature(kind="numeric", column="number", boundaries=(1.0,))
    assert user_feature_columns(package, features, user_row_U=np.arange(5)) == {}
