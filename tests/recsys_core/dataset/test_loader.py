"""An epoch has every example once over all ranks, with its own history; a batch depends on seed, epoch, rank and index only."""

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.dataset.batch import Assembler, Batch
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import UNPOOLED
from recsys_core.dataset.loader import ExampleSource, RankShare, TrainLoader, prefetch, query_batch
from recsys_core.errors import InputError
from recsys_core.models.loss.objective import negative_share
from tests.recsys_core.dataset.test_events import Users, store_of, users
from tests.recsys_core.dataset.test_known_negatives import (
    Places,
    items_by_user,
    logs_with_negatives,
    store_with_negatives,
)

MAX_HISTORY, NUM_ITEMS = 3, 10_000
TENSORS = ("item_row_V", "candidate_index_C", "history_index_H", "history_offset")


pytestmark = pytest.mark.usefixtures("shards")


def loader_of(
    store: EventStore,
    *,
    rank: int = 0,
    world_size: int = 1,
    max_history: int = MAX_HISTORY,
    include_target: bool = False,
    num_planned_ranks: int | None = None,
    max_known_negatives: int = 0,
    **loader_settings: Any,
) -> TrainLoader:
    """Return a loader. By default every item is sampled with the same probability."""
    examples = ExampleSource(
        store,
        Assembler(user_batch_key=UNPOOLED),
        max_history=max_history,
        include_target=include_target,
        max_known_negatives=max_known_negatives,
    )
    base = {"batch_size": 4, "seed": 5, "negative_share_I": np.full(store.num_items, 1 / store.num_items)}
    return TrainLoader(examples, rank_share=RankShare(rank, world_size, num_planned_ranks), **(base | loader_settings))


def numbered(sizes: list[int]) -> Users:
    """Return users with the given numbers of training events, each of another item, so that an item identifies its event."""
    counter = iter(range(1_000_000))
    return [([next(counter) for _ in range(size)], [], []) for size in sizes]


def candidates(batch: Batch) -> list[int]:
    """Return the catalogue rows of the candidates."""
    return batch.item_row_V[batch.candidate_index_C].tolist()


def positives(batch: Batch) -> list[int]:
    return candidates(batch)[: batch.batch_size]


def histories(batch: Batch) -> list[list[int]]:
    """Return the catalogue rows of the history of each query."""
    row_H = batch.item_row_V[batch.history_index_H]
    return [row_H[start:end].tolist() for start, end in pairwise(batch.history_offset.tolist())]


def are_equal(batch: Batch, other_batch: Batch) -> bool:
    pairs = [(getattr(batch, name), getattr(other_batch, name)) for name in TENSORS]
    for key in batch.sparse:
        pairs += [(batch.sparse[key].values(), other_batch.sparse[key].values())]
        pairs += [(batch.sparse[key].lengths(), other_batch.sparse[key].lengths())]
    fits = batch.batch_size == other_batch.batch_size and set(batch.sparse) == set(other_batch.sparse)
    return fits and all(torch.equal(left, right) for left, right in pairs)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 7),
    epoch=st.integers(0, 3),
)
def test_over_all_ranks_an_epoch_covers_every_example_at_most_once(
    sizes: list[int], world_size: int, batch_size: int, epoch: int
) -> None:
    store = store_of(numbered(sizes))
    seen, shapes = [], []
    for rank in range(world_size):
        loader = loader_of(store, rank=rank, world_size=world_size, batch_size=batch_size)
        batches = [loader.batch(epoch, batch) for batch in range(len(loader))]
        seen += [item for batch in batches for item in positives(batch)]
        shapes.append([batch.batch_size for batch in batches])
        assert shapes[-1] == [loader.num_batch_queries(batch) for batch in range(len(loader))]
    assert all(shape == shapes[0] for shape in shapes)
    assert sum(shapes[0]) == loader.num_epoch_queries
    assert all(0 < size <= batch_size for size in shapes[0])
    assert len(set(seen)) == len(seen)
    assert sum(sizes) - world_size < len(seen) <= sum(sizes)


@settings(max_examples=60, deadline=None)
@given(
    log=users,
    batch_size=st.integers(1, 9),
    negatives=st.integers(0, 5),
    max_history=st.integers(0, MAX_HISTORY),
    ordered=st.booleans(),
    include_target=st.booleans(),
)
def test_positives_users_and_histories_are_those_of_one_example(
    log: Users, batch_size: int, negatives: int, max_history: int, ordered: bool, include_target: bool
) -> None:
    counter = iter(range(NUM_ITEMS))
    log = [([next(counter) for _ in train], validation, test) for train, validation, test in log]  # an item tells its event
    owner = {item: (row, event_index) for row, (train, _, _) in enumerate(log) for event_index, item in enumerate(train)}
    loader = loader_of(
        store_of(log, ordered=ordered),
        batch_size=batch_size, num_negatives=negatives, max_history=max_history, include_target=include_target and not ordered,
    )  # fmt: skip
    for batch in (loader.batch(0, number) for number in range(len(loader))):
        assert len(batch.candidate_index_C) == batch.batch_size + negatives
        users_B = batch.sparse[UNPOOLED]["user"].to_dense()[: batch.batch_size]
        for item, history, user in zip(positives(batch), histories(batch), users_B, strict=True):
            row, event_index = owner[item]
            train = log[row][0]
            before = train[max(0, event_index - max_history) : event_index] if max_history else []
            around = train[event_index : event_index + include_target] + train[event_index + 1 :] + train[:event_index]
            assert user.tolist() == [row]
            assert history == (before if ordered else around[:max_history])


@settings(max_examples=40, deadline=None)
@given(log=users, batch_size=st.integers(1, 9), negatives=st.integers(0, 9), ordered=st.booleans())
def test_an_item_is_looked_up_once_however_often_it_occurs(log: Users, batch_size: int, negatives: int, ordered: bool) -> None:
    loader = loader_of(store_of(log, ordered=ordered), batch_size=batch_size, num_negatives=negatives)
    for batch in loader.epoch(0):
        occurring = set(candidates(batch)) | {item for history in histories(batch) for item in history}
        assert sorted(batch.item_row_V.tolist()) == sorted(occurring)
        assert batch.sparse[UNPOOLED]["item"].values().tolist() == batch.item_row_V.tolist()


def test_negatives_come_from_the_whole_catalogue_and_differ_by_rank_and_batch() -> None:
    store = store_of(numbered([50]))
    batches = [
        loader_of(store, rank=rank, world_size=2, batch_size=5, num_negatives=400).batch(0, batch)
        for rank in range(2)
        for batch in range(2)
    ]
    negatives_by_batch = [tuple(candidates(batch)[5:]) for batch in batches]
    assert len(set(negatives_by_batch)) == 4
    assert set(negatives_by_batch[0]) == set(range(store.num_items))


def test_negatives_are_sampled_in_proportion_to_their_share() -> None:
    share_I = np.array([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    loader = loader_of(store_of([([1, 3, 4], [], [])]), batch_size=3, num_negatives=100_000, negative_share_I=share_I)
    sampled_share_I = np.bincount(candidates(loader.batch(0, 0))[3:], minlength=6) / 100_000
    assert sampled_share_I[share_I == 0].sum() == 0
    np.testing.assert_allclose(sampled_share_I, share_I, atol=0.01)


@given(count=st.lists(st.integers(0, 5), min_size=1, max_size=50).filter(any), alpha=st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_only_items_with_a_training_event_are_sampled(count: list[int], alpha: float) -> None:
    share_I = negative_share(np.array(count), alpha)
    batch = loader_of(store_of([([0], [], [])]), num_negatives=200, negative_share_I=share_I).batch(0, 0)
    assert all(count[item] for item in candidates(batch)[1:])


def test_a_retry_with_half_the_ranks_has_the_examples_and_batches_of_the_plan() -> None:
    store = store_of(numbered([11]))
    planned = loader_of(store, world_size=4, batch_size=1)
    retried = loader_of(store, world_size=2, batch_size=2, num_planned_ranks=4)
    assert (planned.num_epoch_queries * 4, len(planned)) == (retried.num_epoch_queries * 2, len(retried)) == (8, 2)


@pytest.mark.parametrize("start", [0, 1, 5, 12, 13])
def test_resuming_at_a_batch_gives_exactly_the_later_batches(start: int, small_chunks: None) -> None:
    loader = loader_of(store_of(numbered([13] * 4)), num_negatives=3)
    assert len(loader) == 13
    batches, resumed_batches = list(loader.epoch(2)), list(loader.epoch(2, start_batch=start))
    assert len(batches) == 13 and len(resumed_batches) == 13 - start
    assert all(are_equal(batch, resumed_batch) for batch, resumed_batch in zip(batches[start:], resumed_batches, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    log=users,
    ordered=st.booleans(),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 5),
    data=st.data(),
)
def test_a_batch_is_a_function_of_seed_epoch_rank_and_number(
    log: Users, ordered: bool, batch_size: int, world_size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    loader_settings = {"batch_size": batch_size, "world_size": world_size, "rank": rank, "seed": seed, "num_negatives": 3}
    loader_settings |= {"max_known_negatives": 2}
    store = store_with_negatives(log, [([0] * 4, [], [0])] * len(log), ordered=ordered)
    loader, equal_loader = loader_of(store, **loader_settings), loader_of(store, **loader_settings)
    in_order = list(loader.epoch(epoch))
    assert len(in_order) == len(loader)
    for number in data.draw(st.permutations(range(len(loader)))):
        assert are_equal(equal_loader.batch(epoch, number), in_order[number])
    start = data.draw(st.integers(0, len(loader)))
    resumed = equal_loader.epoch(epoch, start_batch=start)
    assert all(are_equal(batch, resumed_batch) for batch, resumed_batch in zip(in_order[start:], resumed, strict=True))


def test_epochs_and_seeds_differ_and_the_same_ones_are_equal() -> None:
    store = store_of(numbered([40] * 3))

    def order(seed: int, epoch: int) -> list[int]:
        batches = loader_of(store, seed=seed, batch_size=50).epoch(epoch)
        return [item for batch in batches for item in candidates(batch)]

    orders = [order(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert all(sorted(order_of_epoch) == list(range(120)) for order_of_epoch in orders)
    assert len({tuple(order_of_epoch) for order_of_epoch in orders}) == 4
    assert order(2, 1) == orders[3]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks of three batches of the size in loader_of, or of two batches with three negatives each."""
    monkeypatch.setattr("recsys_core.dataset.loader.CHUNK_CANDIDATES", 14)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_closing_an_epoch_early_ends_its_thread(small_chunks: None) -> None:
    batches = loader_of(store_of(numbered([400]))).epoch(0)
    next(batches)
    assert len(loader_threads()) == 1
    batches.close()
    assert loader_threads() == []


@pytest.mark.parametrize("error", [ValueError("page 7 is gone"), SystemExit(3)])
def test_an_error_of_the_background_thread_is_raised_after_the_items_before_it(error: BaseException) -> None:
    def fail_after_six() -> Iterator[int]:
        yield from range(6)
        raise error

    received = []
    with pytest.raises(type(error)) as caught:
        for item in prefetch(fail_after_six(), depth=2):
            received.append(item)
    assert caught.value is error and received == [*range(6)]
    assert loader_threads() == []


def test_the_background_thread_computes_no_more_than_depth_items_ahead() -> None:
    computed, full = [], threading.Event()

    def count() -> Iterator[int]:
        for number in range(100):
            computed.append(number)
            if number == 3:
                full.set()
            yield number

    numbers = prefetch(count(), depth=3)
    next(numbers)
    assert full.wait(10)
    time.sleep(0.05)
    assert computed == [0, 1, 2, 3]  # one received, three ahead
    numbers.close()
    assert loader_threads() == []


def test_the_batch_moves_as_a_whole() -> None:
    batch = loader_of(store_of(numbered([9])), num_negatives=2).batch(0, 0)
    assert are_equal(batch, batch.to(torch.device("cpu")))
    meta = batch.to(torch.device("meta"))
    parts = [getattr(meta, name) for name in TENSORS] + [sparse.values() for sparse in meta.sparse.values()]
    assert {part.device.type for part in parts} == {"meta"}


def test_a_query_batch_has_the_history_of_each_user_before_the_split() -> None:
    store = store_of([([1, 2, 3], [4], [5]), ([6], [], [7]), ([8, 9], [10], [])])
    for split, expected in (("test", [[3, 4], [6]]), ("validation", [[2, 3], [6]])):
        batch = query_batch(store, np.array([0, 1]), split, assembler=Assembler(user_batch_key=UNPOOLED), max_history=2)
        assert histories(batch) == expected
        assert batch.sparse[UNPOOLED]["user"].values().tolist() == [0, 1]
        assert candidates(batch) == []


def test_without_a_history_a_query_batch_points_at_no_item() -> None:
    store = store_of([([1, 2, 3], [4], [5])])
    batch = query_batch(store, np.array([0, 0]), "test", assembler=Assembler(user_batch_key=UNPOOLED), max_history=0)
    assert histories(batch) == [[], []] and candidates(batch) == []


def test_the_weight_of_an_example_is_that_of_its_event_over_the_mean_of_the_training_events() -> None:
    store = store_of(numbered([3, 4]), weight=list(range(7)))
    for batch in loader_of(store, num_negatives=2).epoch(0):
        assert batch.loss_weight is not None and (3 * batch.loss_weight).tolist() == pytest.approx(positives(batch))


@pytest.mark.parametrize("weight", [None, list(range(1, 8))])
def test_the_user_exponent_multiplies_the_weights_and_keeps_their_mean(weight: list[int] | None) -> None:
    log: Users = [([1, 2, 3, 4], [], []), ([5], [6], [7])]
    store = store_of(log, weight=weight)
    examples = ExampleSource(store, Assembler(user_batch_key=UNPOOLED), max_history=1, user_exponent=-0.5)
    loader = TrainLoader(examples, batch_size=2, rank_share=RankShare(0, 1), seed=3)
    weight_by_item = {}
    for batch in loader.epoch(0):
        assert batch.loss_weight is not None
        weight_by_item |= dict(zip(positives(batch), batch.loss_weight.tolist(), strict=True))
    event_weight_by_item = dict(zip(range(1, 6), weight or [1] * 5, strict=False))
    expected = {item: value * (0.5 if item < 5 else 1.0) for item, value in event_weight_by_item.items()}
    mean = sum(expected.values()) / 5
    assert weight_by_item == pytest.approx({item: value / mean for item, value in expected.items()})


def test_weights_of_held_out_events_do_not_count_in_the_mean() -> None:
    store = store_of([([1, 2], [3], [4]), ([5], [], [6])], weight=[1, 2, 70, 80, 6, 90])
    assert store.mean_weight() == 3


def test_a_log_whose_training_events_all_weigh_nothing_is_rejected() -> None:
    store = store_of([([1, 2], [3], [4])], weight=[0, 0, 1, 1])
    with pytest.raises(InputError, match="all 2 training events have the weight 0"):
        loader_of(store)


def test_the_share_of_the_catalogue_follows_the_positives_of_every_batch() -> None:
    store, share = store_of(numbered([5, 4])), np.array([7, 2, 9])
    with_share, without = loader_of(store, catalogue_row_N=share), loader_of(store)
    batches = list(with_share.epoch(1))
    assert [positives(batch) for batch in batches] == [positives(batch) for batch in without.epoch(1)]
    assert [candidates(batch)[batch.batch_size :] for batch in batches] == [share.tolist()] * 3


@settings(max_examples=60, deadline=None)
@given(
    log=logs_with_negatives().filter(lambda log: any(places[0] for places in log[1])),
    batch_size=st.integers(1, 9),
    negatives=st.integers(0, 4),
    max_known_negatives=st.integers(1, 3),
    ordered=st.booleans(),
)
def test_the_last_candidates_are_training_negatives_of_the_user_or_copies_of_the_positive(
    log: tuple[Users, Places], batch_size: int, negatives: int, max_known_negatives: int, ordered: bool
) -> None:
    store, items = store_with_negatives(*log, ordered=ordered), items_by_user(log[1])
    settings = {"batch_size": batch_size, "num_negatives": negatives}
    loader, without = loader_of(store, max_known_negatives=max_known_negatives, **settings), loader_of(store, **settings)
    for batch, batch_without in zip(loader.epoch(1), without.epoch(1), strict=True):
        num_shared = batch.batch_size + negatives
        assert candidates(batch)[:num_shared] == candidates(batch_without)
        assert histories(batch) == histories(batch_without)
        known_BK = np.array(candidates(batch)[num_shared:]).reshape(batch.batch_size, max_known_negatives).tolist()
        users_B = batch.sparse[UNPOOLED]["user"].to_dense()[: batch.batch_size]
        for known, user, positive in zip(known_BK, users_B, positives(batch), strict=True):
            rejected = [item for item in known if item != positive]
            assert set(rejected) <= set(items[int(user)][0]) and len(set(rejected)) == len(rejected)
            assert known == rejected + [positive] * (max_known_negatives - len(rejected))
            if not ordered:
                assert len(rejected) == min(max_known_negatives, len(items[int(user)][0]))


def test_known_negatives_of_an_unordered_log_differ_by_epoch_rank_and_batch() -> None:
    store = store_with_negatives(numbered([40]), [([0] * 900, [], [])], ordered=False)
    drawn = [
        tuple(candidates(loader_of(store, rank=rank, world_size=2, max_known_negatives=1).batch(epoch, batch))[4:])
        for rank in range(2)
        for batch in range(2)
        for epoch in range(2)
    ]
    assert len(set(drawn)) == 8


def test_known_negatives_that_the_store_does_not_have_are_refused() -> None:
    log: Users = [([1, 2], [3], [4])]
    message = r"explicit_negatives is 2, but the ingest did not keep .*; set interactions.explicit_negatives to true"
    with pytest.raises(InputError, match=message):
        loader_of(store_of(log), max_known_negatives=2)
    message = r"explicit_negatives is 2, but 0 known negatives are before the validation period, and 3 are after"
    with pytest.raises(InputError, match=message):
        loader_of(store_with_negatives(log, [([], [0, 0], [1])]), max_known_negatives=2)
