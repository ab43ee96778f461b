"""Expected lookups compared with the batches that the loader makes."""

import numpy as np
import pytest

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import POOLED, UNPOOLED
from recsys_core.dataset.layout import EventArrays
from recsys_core.dataset.loader import ExampleSource, RankShare, TrainLoader
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.history_config import MeanHistory
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.loss.objective import negative_share
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.lookup_stats import lookup_probability, measure_lookups, num_distinct_items
from tests.recsys_core.ingest.random_features import feature_store, ingested_features

NUM_USERS, NUM_ITEMS, NUM_EVENTS, BATCH, NUM_NEGATIVES = 300, 2000, 9000, 128, 64


def skewed_store(*, ordered: bool) -> EventStore:
    """Return a store with very different numbers of events per user and a power law of item popularity.

    Each user has up to 4 known negatives before the first event.
    """
    rng = np.random.default_rng(1)
    lengths = 1 + rng.multinomial(NUM_EVENTS - NUM_USERS, rng.dirichlet(np.full(NUM_USERS, 0.7)))
    weight = 1 / np.arange(1, NUM_ITEMS + 1)
    item = rng.choice(NUM_ITEMS, NUM_EVENTS, p=weight / weight.sum()).astype(np.int32)
    offset = np.concatenate([[0], lengths.cumsum()])
    num_negatives = rng.integers(0, 5, NUM_USERS)
    arrays = EventArrays(
        user_offset=offset,
        train_end=offset[1:],
        validation_end=offset[1:],
        event_item=item,
        train_user=np.repeat(np.arange(NUM_USERS, dtype=np.int32), lengths),
        item_count=np.bincount(item, minlength=NUM_ITEMS),
        vector_row=np.full(NUM_ITEMS, -1),
        negative_offset=np.cumsum([0, *np.stack([num_negatives, 0 * num_negatives, 0 * num_negatives], axis=1).ravel()]),
        negative_item=rng.choice(NUM_ITEMS, num_negatives.sum(), p=weight / weight.sum()).astype(np.int32),
        negative_event=np.repeat(offset[:-1], num_negatives) if ordered else None,
    )
    return EventStore(arrays, is_ordered=ordered)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("length", "alpha", "known_negatives"), [(0, 0.0, 4), (5, 0.75, 0), (50, 0.0, 1)])
def test_expected_lookups_match_those_of_real_batches(ordered: bool, length: int, alpha: float, known_negatives: int) -> None:
    store = skewed_store(ordered=ordered)
    features = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS)
    config = TwoTowerConfig(learn_user_embedding=True, history=MeanHistory(length=length, last_item_feature=length > 0))
    spec = ModelSpec.sized(config, num_users=NUM_USERS, num_items=NUM_ITEMS, ingested_by_feature=ingested_features())
    loss = LossConfig(num_negatives=NUM_NEGATIVES, negative_sampling_alpha=alpha, explicit_negatives=known_negatives)
    lookup_stats = measure_lookups(spec, batch_size=BATCH, loss=loss, store=store, features=features)
    loader = TrainLoader(
        ExampleSource(
            store,
            Assembler(user_batch_key=UNPOOLED, features=features),
            max_history=length,
            max_known_negatives=known_negatives,
        ),
        batch_size=BATCH,
        rank_share=RankShare(0, 1),
        seed=3,
        num_negatives=NUM_NEGATIVES,
        negative_share_I=negative_share(store.train_count_I, alpha),
    )
    batches = [loader.batch(epoch, batch) for epoch in range(2) for batch in range(len(loader) - 1)]

    def looked_up(collection: str, feature: str) -> float:
        return float(np.mean([len(batch.sparse[collection][feature].values()) for batch in batches])) / BATCH

    assert lookup_stats.values_per_query["item"] == pytest.approx(looked_up(UNPOOLED, "item"), rel=0.05)
    assert lookup_stats.values_per_query["item.list"] == pytest.approx(looked_up(UNPOOLED, "item.list"), rel=0.05)
    assert lookup_stats.values_per_query["user.list"] == pytest.approx(looked_up(POOLED, "user.list"), rel=0.05)
    assert lookup_stats.values_per_query["context.list"] == pytest.approx(looked_up(POOLED, "context.list"), rel=0.05)
    assert lookup_stats.values_per_query["user"] == lookup_stats.values_per_query["user.single"] == 1.0


def test_the_hot_row_curve_is_the_share_of_the_events() -> None:
    store = skewed_store(ordered=True)
    spec = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=True), num_users=NUM_USERS, num_items=NUM_ITEMS)
    shares = measure_lookups(spec, batch_size=BATCH, loss=LossConfig(), store=store).hot_row_curve
    assert set(shares) == {"item", "user"}
    assert shares["item"][-1] == shares["user"][-1] == 1.0
    assert shares["item"][9] > 0.1, "the most frequent tenth of the items gets more than a tenth of the lookups"
    by_events = np.sort(store.train_count_U)[::-1]
    assert shares["user"][9] == pytest.approx(by_events[: NUM_USERS // 10].sum() / NUM_EVENTS, abs=1e-6)


def test_a_softmax_over_the_whole_catalogue_looks_up_every_item_that_has_an_event() -> None:
    store = skewed_store(ordered=True)
    spec = ModelSpec.sized(TwoTowerConfig(), num_users=NUM_USERS, num_items=NUM_ITEMS)
    lookup_stats = measure_lookups(spec, batch_size=BATCH, loss=LossConfig(negatives="all"), store=store)
    assert lookup_stats.values_per_query["item"] == pytest.approx(np.count_nonzero(store.train_count_I) / BATCH, rel=1e-5)


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
def test_distinct_items_of_a_zipf_law_equal_a_count_over_all_items(exponent: float) -> None:
    items, draws, negatives = 20_000, 5_000, 300
    count_I = np.rint(1e12 * np.arange(1, items + 1, dtype=np.float64) ** -exponent).astype(np.int64)
    expected = lookup_probability(count_I, num_draws=draws, num_negatives=negatives, alpha=0.0).sum()
    assert num_distinct_items(items, num_draws=draws, num_negatives=negatives, exponent=exponent) == pytest.approx(
        expected, rel=0.005
    )
