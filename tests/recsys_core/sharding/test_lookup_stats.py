"""Expected numbers of lookups, compared with the batches of the loader."""

import numpy as np
import pytest

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import POOLED, UNPOOLED
from recsys_core.dataset.layout import EventArrays
from recsys_core.dataset.loader import ExampleSource, RankShare, TrainLoader
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.history_config import MeanHistory
from recsys_core.models.loss.catalogue import catalogue_share
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.loss.objective import negative_share
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.lookup_stats import lookup_probability, measure_lookups, num_distinct_items
from tests.recsys_core.ingest.random_features import feature_store, ingested_features

NUM_USERS, NUM_ITEMS, NUM_EVENTS, BATCH_SIZE, NUM_NEGATIVES = 300, 2000, 9000, 128, 64


def skewed_store(*, is_ordered: bool) -> EventStore:
    """Return a store of users with very different numbers of events and of items with very different popularities.

    Each user has up to 4 known negatives before the first event.
    """
    rng = np.random.default_rng(1)
    num_events_U = 1 + rng.multinomial(NUM_EVENTS - NUM_USERS, rng.dirichlet(np.full(NUM_USERS, 0.7)))
    weight_I = 1 / np.arange(1, NUM_ITEMS + 1)
    popularity_I = weight_I / weight_I.sum()
    item_E = rng.choice(NUM_ITEMS, NUM_EVENTS, p=popularity_I).astype(np.int32)
    user_offset = np.concatenate([[0], num_events_U.cumsum()])
    num_negatives_U = rng.integers(0, 5, NUM_USERS)
    num_negatives_by_split = np.stack([num_negatives_U, 0 * num_negatives_U, 0 * num_negatives_U], axis=1)
    arrays = EventArrays(
        user_offset=user_offset,
        train_end=user_offset[1:],
        validation_end=user_offset[1:],
        event_item=item_E,
        train_user=np.repeat(np.arange(NUM_USERS, dtype=np.int32), num_events_U),
        item_count=np.bincount(item_E, minlength=NUM_ITEMS),
        vector_row=np.full(NUM_ITEMS, -1),
        negative_offset=np.cumsum([0, *num_negatives_by_split.ravel()]),
        negative_item=rng.choice(NUM_ITEMS, num_negatives_U.sum(), p=popularity_I).astype(np.int32),
        negative_event=np.repeat(user_offset[:-1], num_negatives_U) if is_ordered else None,
    )
    return EventStore(arrays, is_ordered=is_ordered)


@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered log", "unordered log"])
@pytest.mark.parametrize(("history_length", "alpha", "max_known_negatives"), [(0, 0.0, 4), (5, 0.75, 0), (50, 0.0, 1)])
def test_expected_lookups_match_the_lookups_of_real_batches(
    is_ordered: bool, history_length: int, alpha: float, max_known_negatives: int
) -> None:
    store = skewed_store(is_ordered=is_ordered)
    features = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS)
    model_config = TwoTowerConfig(
        learn_user_embedding=True, history=MeanHistory(length=history_length, last_item_feature=history_length > 0)
    )
    spec = ModelSpec.sized(model_config, num_users=NUM_USERS, num_items=NUM_ITEMS, ingested_by_feature=ingested_features())
    loss_config = LossConfig(num_negatives=NUM_NEGATIVES, negative_sampling_alpha=alpha, explicit_negatives=max_known_negatives)
    lookup_stats = measure_lookups(spec, batch_size=BATCH_SIZE, world_size=1, loss=loss_config, store=store, features=features)
    loader = TrainLoader(
        ExampleSource(
            store,
            Assembler(user_batch_key=UNPOOLED, features=features),
            max_history=history_length,
            max_known_negatives=max_known_negatives,
        ),
        batch_size=BATCH_SIZE,
        rank_share=RankShare(0, 1),
        seed=3,
        num_negatives=NUM_NEGATIVES,
        negative_share_I=negative_share(store.train_count_I, alpha),
    )
    batches = [loader.batch(epoch, batch_index) for epoch in range(2) for batch_index in range(len(loader) - 1)]

    def lookups_per_query(batch_key: str, feature_name: str) -> float:
        return float(np.mean([len(batch.sparse[batch_key][feature_name].values()) for batch in batches])) / BATCH_SIZE

    assert lookup_stats.values_per_query["item"] == pytest.approx(lookups_per_query(UNPOOLED, "item"), rel=0.05)
    assert lookup_stats.values_per_query["item.list"] == pytest.approx(lookups_per_query(UNPOOLED, "item.list"), rel=0.05)
    assert lookup_stats.values_per_query["user.list"] == pytest.approx(lookups_per_query(POOLED, "user.list"), rel=0.05)
    assert lookup_stats.values_per_query["context.list"] == pytest.approx(lookups_per_query(POOLED, "context.list"), rel=0.05)
    assert lookup_stats.values_per_query["user"] == lookup_stats.values_per_query["user.single"] == 1.0


def test_the_hot_row_curve_is_the_share_of_events_of_the_most_frequent_rows() -> None:
    store = skewed_store(is_ordered=True)
    spec = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=True), num_users=NUM_USERS, num_items=NUM_ITEMS)
    curve_by_table = measure_lookups(spec, batch_size=BATCH_SIZE, world_size=2, loss=LossConfig(), store=store).hot_row_curve
    assert set(curve_by_table) == {"item", "user"}
    assert curve_by_table["item"][-1] == curve_by_table["user"][-1] == 1.0
    assert curve_by_table["item"][9] > 0.1  # the share of the most frequent 10 % of the items
    descending_count_U = np.sort(store.train_count_U)[::-1]
    expected_share = descending_count_U[: NUM_USERS // 10].sum() / NUM_EVENTS
    assert curve_by_table["user"][9] == pytest.approx(expected_share, abs=1e-6)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_softmax_over_the_catalogue_looks_up_the_items_of_the_batch_and_of_the_ranks_share(world_size: int) -> None:
    store, loss_config = skewed_store(is_ordered=True), LossConfig(negatives="all")
    spec = ModelSpec.sized(TwoTowerConfig(history=MeanHistory(length=5)), num_users=NUM_USERS, num_items=NUM_ITEMS)
    lookup_stats = measure_lookups(spec, batch_size=BATCH_SIZE, world_size=world_size, loss=loss_config, store=store)
    num_lookups = []
    for rank in range(world_size):
        loader = TrainLoader(
            ExampleSource(store, Assembler(user_batch_key=None), max_history=5),
            batch_size=BATCH_SIZE,
            rank_share=RankShare(rank, world_size),
            seed=3,
            catalogue_row_N=catalogue_share(store.train_count_I, rank=rank, world_size=world_size),
        )
        num_lookups += [len(loader.batch(0, batch_index).item_row_V) for batch_index in range(len(loader) - 1)]
    assert lookup_stats.values_per_query["item"] == pytest.approx(np.mean(num_lookups) / BATCH_SIZE, rel=0.03)


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
def test_the_number_of_distinct_items_of_a_zipf_law_equals_a_sum_over_all_items(exponent: float) -> None:
    num_items, num_draws, num_negatives = 20_000, 5_000, 300
    count_I = np.rint(1e12 * np.arange(1, num_items + 1, dtype=np.float64) ** -exponent).astype(np.int64)
    expected_num_distinct = lookup_probability(count_I, num_draws=num_draws, num_negatives=num_negatives, alpha=0.0).sum()
    num_distinct = num_distinct_items(num_items, num_draws=num_draws, num_negatives=num_negatives, exponent=exponent)
    assert num_distinct == pytest.approx(expected_num_distinct, rel=0.005)
