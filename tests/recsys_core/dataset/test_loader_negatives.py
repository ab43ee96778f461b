"""Known negatives among the candidates of training batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.dataset.feature_store import UNPOOLED
from recsys_core.errors import InputError
from tests.recsys_core.dataset.test_events import Log, store_of
from tests.recsys_core.dataset.test_known_negatives import (
    NegativeTimes,
    logs_with_negatives,
    negative_items,
    store_with_negatives,
)
from tests.recsys_core.dataset.test_loader import candidates, histories, loader_of, log_of_distinct_items, positives

pytestmark = pytest.mark.usefixtures("num_shards")  # each test runs with several numbers of shards


def has_train_negatives(log_with_negatives: tuple[Log, NegativeTimes]) -> bool:
    _, negative_times = log_with_negatives
    return any(train_times for train_times, _, _ in negative_times)


@given(
    log_with_negatives=logs_with_negatives().filter(has_train_negatives),
    batch_size=st.integers(1, 9),
    num_negatives=st.integers(0, 4),
    max_known_negatives=st.integers(1, 3),
    is_ordered=st.booleans(),
)
def test_the_last_candidates_are_known_negatives_or_copies_of_the_positive(
    log_with_negatives: tuple[Log, NegativeTimes],
    batch_size: int,
    num_negatives: int,
    max_known_negatives: int,
    is_ordered: bool,
) -> None:
    """All earlier candidates are equal to the candidates of a loader with max_known_negatives 0."""
    log, negative_times = log_with_negatives
    store = store_with_negatives(log, negative_times, is_ordered=is_ordered)
    train_negatives_by_user = [train_items for train_items, _, _ in negative_items(negative_times)]
    loader_settings = {"batch_size": batch_size, "num_negatives": num_negatives}
    loader, plain_loader = (
        loader_of(store, max_known_negatives=max_known_negatives, **loader_settings),
        loader_of(store, **loader_settings),
    )
    for batch, plain_batch in zip(loader.epoch(1), plain_loader.epoch(1), strict=True):
        num_plain_candidates = batch.batch_size + num_negatives
        assert candidates(batch)[:num_plain_candidates] == candidates(plain_batch)
        assert histories(batch) == histories(plain_batch)
        last_candidates_BK = np.array(candidates(batch)[num_plain_candidates:]).reshape(batch.batch_size, max_known_negatives)
        users_B = batch.sparse[UNPOOLED]["user"].to_dense()[: batch.batch_size]
        for last_candidates, user, positive in zip(last_candidates_BK.tolist(), users_B, positives(batch), strict=True):
            known_negatives = [item for item in last_candidates if item != positive]
            train_negatives = train_negatives_by_user[int(user)]
            assert set(known_negatives) <= set(train_negatives) and len(set(known_negatives)) == len(known_negatives)
            assert last_candidates == known_negatives + [positive] * (max_known_negatives - len(known_negatives))
            if not is_ordered:
                assert len(known_negatives) == min(max_known_negatives, len(train_negatives))


def test_known_negatives_of_an_unordered_log_differ_by_epoch_rank_and_batch() -> None:
    negative_times: NegativeTimes = [([0] * 900, [], [])]
    store = store_with_negatives(log_of_distinct_items([40]), negative_times, is_ordered=False)
    loaders = [loader_of(store, rank=rank, world_size=2, max_known_negatives=1) for rank in range(2)]
    batches = [loader.batch(epoch, batch_index) for loader in loaders for epoch in range(2) for batch_index in range(2)]
    assert len({tuple(candidates(batch)[batch.batch_size :]) for batch in batches}) == 8


def test_explicit_negatives_are_rejected_if_the_store_has_no_training_negatives() -> None:
    log: Log = [([1, 2], [3], [4])]
    times_after_training: NegativeTimes = [([], [0, 0], [1])]
    message = r"explicit_negatives is 2, but the ingest did not keep .*; set interactions.explicit_negatives to true"
    with pytest.raises(InputError, match=message):
        loader_of(store_of(log), max_known_negatives=2)
    message = r"explicit_negatives is 2, but 0 known negatives are before the validation period, and 3 are after"
    with pytest.raises(InputError, match=message):
        loader_of(store_with_negatives(log, times_after_training), max_known_negatives=2)
