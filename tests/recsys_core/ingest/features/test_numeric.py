"""Numeric features without buckets: standardised over the training events, with the same mean in later runs."""

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
# Items 0 to 5 have training events.
LOG = [([0, 1, 2], [6], [7]), ([3, 4, 5], [], [])]


def ingest(folder: Path, price: Any, *, previous: FeaturesManifest | None = None, **log: Any) -> FeaturesManifest:
    interactions = write_interactions(folder / "log", users=["u", "v"], items=ITEMS, log=LOG, **log)
    path = write_parquet(folder / "i.parquet", row_group=3, id=ITEMS[: len(price)], price=price)
    return features_of(folder, interactions, previous, items={"paths": path, "id_column": "id", "features": [PRICE]})


def features_of(
    folder: Path, interactions: InteractionsManifest, previous: FeaturesManifest | None = None, **config: Any
) -> FeaturesManifest:
    return ingest_features(
        FeaturesConfig(**config), dataset=Dataset(interactions), previous=previous, memory_limit="500MB", threads=2,
        folder=folder / "features",
    )  # fmt: skip


def stored(manifest: FeaturesManifest, key: str = "item.price") -> tuple[list[int], list[float]]:
    row, weight = (np.load(manifest.path(f"{key}.{name}.npy")) for name in ("row", "weight"))
    assert (row.dtype, weight.dtype) == (np.int32, np.float32)
    return row.tolist(), weight.tolist()


def test_a_number_is_standardised_with_the_training_events(tmp_path: Path) -> None:
    # Of 1, 3, 1 and 3: mean 2, standard deviation 1. Item 6 is not in training, item 7 not in the table.
    manifest = ingest(tmp_path, [1.0, 3.0, 1.0, 3.0, None, math.nan, 4.5])
    assert stored(manifest) == ([1, 1, 1, 1, 0, 0, 1, 0], [-1.0, 1.0, -1.0, 1.0, 0.0, 0.0, 2.5, 0.0])
    facts = manifest.features["item.price"]
    assert (facts.mean, facts.std, facts.num_rows, facts.num_missing, facts.num_values) == (2.0, 1.0, 2, 3, 8)
    assert facts.is_weighted and facts.boundaries is None
    assert sorted(manifest.files) == ["item.price.row.npy", "item.price.weight.npy", "item_columns.parquet"]


def test_infinities_and_outliers_are_cut_off_and_infinities_move_no_mean(tmp_path: Path) -> None:
    manifest = ingest(tmp_path, [1.0, 3.0, math.inf, -math.inf, 1.0, 3.0, 1e30, -200.0])
    assert stored(manifest) == ([1] * 8, [-1.0, 1.0, 10.0, -10.0, -1.0, 1.0, 10.0, -10.0])


@pytest.mark.parametrize("price", [[0.1] * 6 + [7.0], [None] * 6 + [7.0]])
def test_a_feature_without_variance_in_training_has_zero_weights(tmp_path: Path, price: list[float | None]) -> None:
    manifest = ingest(tmp_path, pa.array(price, pa.float64()))
    assert manifest.features["item.price"].std == 0
    assert stored(manifest) == ([int(value is not None) for value in price] + [0], [0.0] * 8)


@pytest.mark.parametrize("kind", [pa.int16(), pa.uint64(), pa.float32(), pa.decimal128(9, 2)])
def test_every_numeric_type_is_accepted(tmp_path: Path, kind: pa.DataType) -> None:
    manifest = ingest(tmp_path, pa.array([1.0, 3.0] * 3).cast(kind))
    assert stored(manifest)[1][:6] == [-1.0, 1.0] * 3


def test_later_runs_keep_the_mean_until_the_vocabulary_is_rebuilt(tmp_path: Path) -> None:
    first_manifest = ingest(tmp_path / "1", [1.0, 3.0, 1.0, 3.0])
    second_manifest = ingest(tmp_path / "2", [10.0, 12.0, 14.0, 2.0], previous=first_manifest)
    facts = second_manifest.features["item.price"]
    assert (facts.mean, facts.std, facts.is_continued) == (2.0, 1.0, True)
    assert stored(second_manifest)[1][:4] == [8.0, 10.0, 10.0, 0.0]
    rebuilt_manifest = ingest(tmp_path / "3", [10.0, 12.0, 10.0, 12.0], previous=second_manifest, lineage="second")
    facts = rebuilt_manifest.features["item.price"]
    assert (facts.mean, facts.std, facts.is_continued) == (11.0, 1.0, False)


def test_a_feature_that_had_buckets_in_the_previous_run_gets_a_new_mean(tmp_path: Path) -> None:
    log = write_interactions(tmp_path / "log", users=["u", "v"], items=ITEMS, log=LOG)
    table = {"paths": write_parquet(tmp_path / "i.parquet", id=ITEMS[:4], price=[1.0, 3.0, 1.0, 3.0]), "id_column": "id"}
    buckets = {"name": "price", "kind": "numeric", "buckets": 2}
    with_buckets = features_of(tmp_path / "1", log, items=table | {"features": [buckets]})
    without_buckets = features_of(tmp_path / "2", log, with_buckets, items=table | {"features": [PRICE]})
    assert not without_buckets.features["item.price"].is_continued and without_buckets.features["item.price"].mean == 2.0
    with_buckets_again = features_of(tmp_path / "3", log, without_buckets, items=table | {"features": [buckets]})
    assert not with_buckets_again.features["item.price"].is_continued and with_buckets_again.features["item.price"].mean is None


def test_the_context_is_standardised_over_training_events(tmp_path: Path) -> None:
    # Events in the order of the store: three of training, validation, test; three of training.
    interactions = write_interactions(
        tmp_path / "log", users=["u", "v"], items=ITEMS, log=LOG, context={"hour": [4, 8, 4, 100, 12, 8, 4, 8]}
    )
    manifest = features_of(tmp_path, interactions, context=[{"name": "hour", "kind": "numeric", "standardise": True}])
    assert stored(manifest, "context.hour") == ([1] * 8, [-1.0, 1.0, -1.0, 10.0, 3.0, 1.0, -1.0, 1.0])


def test_the_store_gives_each_number_as_the_weight_of_its_row(tmp_path: Path) -> None:
    store = FeatureStore.open(ingest(tmp_path, [1.0, 3.0, 1.0, 3.0, None, math.nan, 4.5]))
    lists, weight = store.feature_by_key["item.price"].rows_and_weights(np.array([6, 4, 0]))
    assert (lists.values_L.tolist(), lists.lengths.tolist()) == ([1, 0, 1], [1, 1, 1])
    assert weight is not None and weight.tolist() == [2.5, 0.0, -1.0]
    batch = Assembler(user_batch_key=None, features=store).item_batch(np.array([1, 6]))
    assert batch.sparse[UNPOOLED]["item.price"].lengths().tolist() == [1, 1]
    assert batch.item_feature_weight["item.price"].tolist() == [1.0, 2.5]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.none() | st.floats(), min_size=1, max_size=8))
@example([1.7e308, -1.7e308, 1.7e308])
@example([5e-324, 0.0])
def test_any_number_becomes_a_finite_one_and_training_has_mean_0_and_spread_1(
    tmp_path_factory: pytest.TempPathFactory, price: list[float | None]
) -> None:
    manifest = ingest(tmp_path_factory.mktemp("case"), pa.array(price, pa.float64()))
    row, weight = stored(manifest)
    facts = manifest.features["item.price"]
    assert facts.mean is not None and facts.std is not None
    assert math.isfinite(facts.mean) and math.isfinite(facts.std)
    assert all(abs(value) <= 10 for value in weight)
    assert row == [int(value is not None and not math.isnan(value)) for value in price] + [0] * (8 - len(price))
    assert all(value == 0 for value, there in zip(weight, row, strict=True) if not there)
    trained = [at for at, value in enumerate(price[:6]) if value is not None and math.isfinite(value)]
    if facts.std > 1e-300 and facts.std > 1e-12 * abs(facts.mean):  # a smaller spread is rounding error
        assert np.mean([weight[at] for at in trained]) == pytest.approx(0, abs=1e-3)
        assert np.std([weight[at] for at in trained]) == pytest.approx(1, abs=1e-3)
