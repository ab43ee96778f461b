"""Standardised numeric features: the mean and standard deviation over training events, which later runs use again."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.feature_store import UNPOOLED, FeatureStore
from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.manifests import Dataset, FeaturesManifest, InteractionsManifest
from tests.recsys_core.ingest.interactions_with_context import write_interactions
from tests.recsys_core.ingest.parquet_files import write_parquet

ITEMS = list(range(8))
PRICE = {"name": "price", "kind": "numeric", "standardise": True}
LOG = [([0, 1, 2], [6], [7]), ([3, 4, 5], [], [])]
"""For each user, the rows of the training, validation and test items. Items 0 to 5 have one training event each."""


def ingest(folder: Path, prices: Any, *, previous: FeaturesManifest | None = None, **log_settings: Any) -> FeaturesManifest:
    """Ingest the prices of the first items. The other items have no row in the table."""
    interactions = write_interactions(folder / "log", user_ids=["u", "v"], item_ids=ITEMS, log=LOG, **log_settings)
    path = write_parquet(folder / "items.parquet", row_group_size=3, id=ITEMS[: len(prices)], price=prices)
    return ingest_config(folder, interactions, previous, items={"paths": path, "id_column": "id", "features": [PRICE]})


def ingest_config(
    folder: Path, interactions: InteractionsManifest, previous: FeaturesManifest | None = None, **config: Any
) -> FeaturesManifest:
    """Ingest features. `config` has the fields of FeaturesConfig."""
    return ingest_features(
        FeaturesConfig(**config), dataset=Dataset(interactions), previous=previous, memory_limit="500MB", threads=2,
        folder=folder / "features",
    )  # fmt: skip


def rows_and_weights_of(manifest: FeaturesManifest, key: str = "item.price") -> tuple[list[int], list[float]]:
    """Return the table row of each item or event, and the weight of this row."""
    rows, weights = (np.load(manifest.path(f"{key}.{name}.npy")) for name in ("row", "weight"))
    assert (rows.dtype, weights.dtype) == (np.int32, np.float32)
    return rows.tolist(), weights.tolist()


def test_a_number_is_standardised_with_the_training_events(tmp_path: Path) -> None:
    # The training events have the prices 1, 3, 1 and 3: mean 2, standard deviation 1. Item 7 is not in the table.
    manifest = ingest(tmp_path, [1.0, 3.0, 1.0, 3.0, None, math.nan, 4.5])
    assert rows_and_weights_of(manifest) == ([1, 1, 1, 1, 0, 0, 1, 0], [-1.0, 1.0, -1.0, 1.0, 0.0, 0.0, 2.5, 0.0])
    feature = manifest.features["item.price"]
    assert (feature.mean, feature.std, feature.num_rows, feature.num_missing, feature.num_values) == (2.0, 1.0, 2, 3, 8)
    assert feature.is_weighted and feature.boundaries is None
    assert sorted(manifest.files) == ["item.price.row.npy", "item.price.weight.npy", "item_columns.parquet"]


def test_numbers_are_clipped_at_10_deviations_and_infinities_do_not_change_the_mean(tmp_path: Path) -> None:
    manifest = ingest(tmp_path, [1.0, 3.0, math.inf, -math.inf, 1.0, 3.0, 1e30, -200.0])
    assert rows_and_weights_of(manifest) == ([1] * 8, [-1.0, 1.0, 10.0, -10.0, -1.0, 1.0, 10.0, -10.0])


@pytest.mark.parametrize("prices", [[0.1] * 6 + [7.0], [None] * 6 + [7.0]])
def test_a_feature_without_variance_in_training_has_zero_weights(tmp_path: Path, prices: list[float | None]) -> None:
    manifest = ingest(tmp_path, pa.array(prices, pa.float64()))
    assert manifest.features["item.price"].std == 0
    assert rows_and_weights_of(manifest) == ([int(price is not None) for price in prices] + [0], [0.0] * 8)


@pytest.mark.parametrize("number_type", [pa.int16(), pa.uint64(), pa.float32(), pa.decimal128(9, 2)])
def test_every_numeric_type_is_accepted(tmp_path: Path, number_type: pa.DataType) -> None:
    manifest = ingest(tmp_path, pa.array([1.0, 3.0] * 3).cast(number_type))
    assert rows_and_weights_of(manifest)[1][:6] == [-1.0, 1.0] * 3


def test_later_runs_keep_the_mean_until_the_vocabulary_is_rebuilt(tmp_path: Path) -> None:
    first_manifest = ingest(tmp_path / "1", [1.0, 3.0, 1.0, 3.0])
    second_manifest = ingest(tmp_path / "2", [10.0, 12.0, 14.0, 2.0], previous=first_manifest)
    feature = second_manifest.features["item.price"]
    assert (feature.mean, feature.std, feature.is_continued) == (2.0, 1.0, True)
    assert rows_and_weights_of(second_manifest)[1][:4] == [8.0, 10.0, 10.0, 0.0]
    rebuilt_manifest = ingest(tmp_path / "3", [10.0, 12.0, 10.0, 12.0], previous=second_manifest, lineage="second")
    feature = rebuilt_manifest.features["item.price"]
    assert (feature.mean, feature.std, feature.is_continued) == (11.0, 1.0, False)


def test_a_feature_that_had_buckets_in_the_previous_run_gets_a_new_mean(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path / "log", user_ids=["u", "v"], item_ids=ITEMS, log=LOG)
    item_table = {
        "paths": write_parquet(tmp_path / "items.parquet", id=ITEMS[:4], price=[1.0, 3.0, 1.0, 3.0]),
        "id_column": "id",
    }
    bucket_feature = {"name": "price", "kind": "numeric", "buckets": 2}
    bucket_manifest = ingest_config(tmp_path / "1", interactions, items=item_table | {"features": [bucket_feature]})
    manifest = ingest_config(tmp_path / "2", interactions, bucket_manifest, items=item_table | {"features": [PRICE]})
    assert not manifest.features["item.price"].is_continued and manifest.features["item.price"].mean == 2.0
    later_bucket_manifest = ingest_config(
        tmp_path / "3", interactions, manifest, items=item_table | {"features": [bucket_feature]}
    )
    assert not later_bucket_manifest.features["item.price"].is_continued
    assert later_bucket_manifest.features["item.price"].mean is None


def test_the_context_is_standardised_over_training_events(tmp_path: Path) -> None:
    # The hours are in the order of the store: three training events, a validation event, a test event, three training events.
    interactions = write_interactions(
        tmp_path / "log", user_ids=["u", "v"], item_ids=ITEMS, log=LOG, context={"hour": [4, 8, 4, 100, 12, 8, 4, 8]}
    )
    manifest = ingest_config(tmp_path, interactions, context=[{"name": "hour", "kind": "numeric", "standardise": True}])
    assert rows_and_weights_of(manifest, "context.hour") == ([1] * 8, [-1.0, 1.0, -1.0, 10.0, 3.0, 1.0, -1.0, 1.0])


def test_the_store_returns_each_number_as_the_weight_of_row_1(tmp_path: Path) -> None:
    store = FeatureStore.open(ingest(tmp_path, [1.0, 3.0, 1.0, 3.0, None, math.nan, 4.5]))
    rows, weights = store.feature_by_key["item.price"].rows_and_weights(np.array([6, 4, 0]))
    assert (rows.values_L.tolist(), rows.lengths.tolist()) == ([1, 0, 1], [1, 1, 1])
    assert weights is not None and weights.tolist() == [2.5, 0.0, -1.0]
    batch = Assembler(user_batch_key=None, features=store).item_batch(np.array([1, 6]))
    assert batch.sparse[UNPOOLED]["item.price"].lengths().tolist() == [1, 1]
    assert batch.item_feature_weight["item.price"].tolist() == [1.0, 2.5]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.none() | st.floats(), min_size=1, max_size=8))
@example([1.7e308, -1.7e308, 1.7e308])
@example([5e-324, 0.0])
def test_standardised_numbers_have_mean_0_and_deviation_1_over_the_training_events(
    tmp_path_factory: pytest.TempPathFactory, prices: list[float | None]
) -> None:
    manifest = ingest(tmp_path_factory.mktemp("case"), pa.array(prices, pa.float64()))
    rows, weights = rows_and_weights_of(manifest)
    feature = manifest.features["item.price"]
    assert feature.mean is not None and feature.std is not None
    assert math.isfinite(feature.mean) and math.isfinite(feature.std)
    assert all(abs(weight) <= 10 for weight in weights)
    assert rows == [int(price is not None and not math.isnan(price)) for price in prices] + [0] * (8 - len(prices))
    assert all(weight == 0 for weight, row in zip(weights, rows, strict=True) if row == 0)
    train_items = [item for item, price in enumerate(prices[:6]) if price is not None and math.isfinite(price)]
    if feature.std > 1e-300 and feature.std > 1e-12 * abs(feature.mean):  # a smaller deviation is a rounding error
        assert np.mean([weights[item] for item in train_items]) == pytest.approx(0, abs=1e-3)
        assert np.std([weights[item] for item in train_items]) == pytest.approx(1, abs=1e-3)
