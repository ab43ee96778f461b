"""Examples, sampled negatives, weights and threads of the training loader, and batches of queries.

A log has a tuple for each user: (training items, validation items, test items).
"""

import itertools
import threading
import time
from collections.abc import Iterator
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
from tests.recsys_core.dataset.test_events import Log, logs, store_of
from tests.recsys_core.dataset.test_known_negatives import NegativeTimes, store_with_negatives

MAX_HISTORY = 3
TENSOR_NAMES = ("item_row_V", "candidate_index_C", "history_index_H", "history_offset")
"""Fields of a batch that are tensors. `sparse` has further tensors."""


pytestmark = pytest.mark.usefixtures("num_shards")  # each test runs with several numbers of shards


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
    """Return a loader. By default it has batches of 4 examples, and every item is sampled with the same probability."""
    examples = ExampleSource(
        store,
        Assembler(user_batch_key=UNPOOLED),
        max_history=max_history,
        include_target=include_target,
        max_known_negatives=max_known_negatives,
    )
    default_settings = {"batch_size": 4, "seed": 5, "negative_share_I": np.full(store.num_items, 1 / store.num_items)}
    return TrainLoader(
        examples, rank_share=RankShare(rank, world_size, num_planned_ranks), **(default_settings | loader_settings)
    )


def log_of_distinct_items(num_events_by_user: list[int]) -> Log:
    """Return a log of training events with the items 0, 1, 2, ..., so that an item identifies its event."""
    item_counter = itertools.count()
    return [([next(item_counter) for _ in range(num_events)], [], []) for num_events in num_events_by_user]


def first_batch(loader: TrainLoader) -> Batch:
    """Return the first batch of the first epoch."""
    return loader.batch(0, 0)


def candidates(batch: Batch) -> list[int]:
    """Return the catalogue rows of the candidates."""
    return batch.item_row_V[batch.candidate_index_C].tolist()


def positives(batch: Batch) -> list[int]:
    """Return the catalogue rows of the positives."""
    return candidates(batch)[: batch.batch_size]


def histories(batch: Batch) -> list[list[int]]:
    """Return the catalogue rows of the history of each query."""
    row_H = batch.item_row_V[batch.history_index_H]
    return [row_H[start:end].tolist() for start, end in itertools.pairwise(batch.history_offset.tolist())]


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Return all tensors of a batch. The batch must not have features."""
    tensors = [getattr(batch, name) for name in TENSOR_NAMES]
    for jagged in batch.sparse.values():
        tensors += [jagged.values(), jagged.lengths()]
    return tensors


def are_equal(batch: Batch, other_batch: Batch) -> bool:
    """Return whether two batches without features have equal tensors."""
    if (batch.batch_size, list(batch.sparse)) != (other_batch.batch_size, list(other_batch.sparse)):
        return False
    return all(itertools.starmap(torch.equal, zip(tensors_of(batch), tensors_of(other_batch), strict=True)))


@given(
    num_events_by_user=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 7),
    epoch=st.integers(0, 3),
)
def test_an_epoch_of_all_ranks_has_each_example_at_most_once(
    num_events_by_user: list[int], world_size: int, batch_size: int, epoch: int
) -> None:
    store = store_of(log_of_distinct_items(num_events_by_user))
    epoch_items: list[int] = []
    batch_sizes_by_rank: list[list[int]] = []
    for rank in range(world_size):
        loader = loader_of(store, rank=rank, world_size=world_size, batch_size=batch_size)
        batches = [loader.batch(epoch, batch_index) for batch_index in range(len(loader))]
        epoch_items += [item for batch in batches for item in positives(batch)]
        batch_sizes_by_rank.append([batch.batch_size for batch in batches])
        assert batch_sizes_by_rank[-1] == [loader.num_batch_queries(batch_index) for batch_index in range(len(loader))]
        assert sum(batch_sizes_by_rank[-1]) == loader.num_epoch_queries
    assert batch_sizes_by_rank == [batch_sizes_by_rank[0]] * world_size
    assert all(0 < size <= batch_size for size in batch_sizes_by_rank[0])
    assert len(set(epoch_items)) == len(epoch_items)
    assert sum(num_events_by_user) - world_size < len(epoch_items) <= sum(num_events_by_user)


@given(
    log=logs,
    batch_size=st.integers(1, 9),
    num_negatives=st.integers(0, 5),
    max_history=st.integers(0, MAX_HISTORY),
    is_ordered=st.booleans(),
    include_target=st.booleans(),
)
def test_positives_users_and_histories_belong_to_one_example(
    log: Log, batch_size: int, num_negatives: int, max_history: int, is_ordered: bool, include_target: bool
) -> None:
    item_counter = itertools.count()
    # Each training event has its own item, so an item identifies an event.
    log = [
        ([next(item_counter) for _ in train_items], validation_items, test_items)
        for train_items, validation_items, test_items in log
    ]
    event_by_item = {
        item: (user, train_index)
        for user, (train_items, _, _) in enumerate(log)
        for train_index, item in enumerate(train_items)
    }
    loader = loader_of(
        store_of(log, is_ordered=is_ordered),
        batch_size=batch_size,
        num_negatives=num_negatives,
        max_history=max_history,
        include_target=include_target and not is_ordered,
    )
    for batch in (loader.batch(0, batch_index) for batch_index in range(len(loader))):
        assert len(batch.candidate_index_C) == batch.batch_size + num_negatives
        user_row_B1 = batch.sparse[UNPOOLED]["user"].to_dense()[: batch.batch_size]
        for item, history, looked_up_user_rows in zip(positives(batch), histories(batch), user_row_B1, strict=True):
            user, train_index = event_by_item[item]
            train_items = log[user][0]
            ordered_history = train_items[max(0, train_index - max_history) : train_index] if max_history else []
            target_items = train_items[train_index : train_index + 1] if include_target else []
            unordered_history = (target_items + train_items[train_index + 1 :] + train_items[:train_index])[:max_history]
            assert looked_up_user_rows.tolist() == [user]
            assert history == (ordered_history if is_ordered else unordered_history)


def test_negatives_come_from_the_whole_catalogue_and_differ_by_rank_and_batch() -> None:
    store = store_of(log_of_distinct_items([50]))
    batches = [
        loader_of(store, rank=rank, world_size=2, batch_size=5, num_negatives=400).batch(epoch=0, batch_index=batch_index)
        for rank in range(2)
        for batch_index in range(2)
    ]
    negatives_by_batch = [tuple(candidates(batch)[5:]) for batch in batches]
    assert len(set(negatives_by_batch)) == 4
    assert set(negatives_by_batch[0]) == set(range(store.num_items))


def test_negatives_are_sampled_in_proportion_to_their_share() -> None:
    share_I = np.array([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    loader = loader_of(store_of([([1, 3, 4], [], [])]), batch_size=3, num_negatives=100_000, negative_share_I=share_I)
    sampled_share_I = np.bincount(candidates(first_batch(loader))[3:], minlength=6) / 100_000
    assert sampled_share_I[share_I == 0].sum() == 0
    np.testing.assert_allclose(sampled_share_I, share_I, atol=0.01)


@given(event_counts=st.lists(st.integers(0, 5), min_size=1, max_size=50).filter(any), alpha=st.sampled_from([0.0, 0.5, 1.0]))
def test_only_items_with_a_training_event_are_sampled(event_counts: list[int], alpha: float) -> None:
    share_I = negative_share(np.array(event_counts), alpha)
    batch = first_batch(loader_of(store_of([([0], [], [])]), num_negatives=200, negative_share_I=share_I))
    assert all(event_counts[item] > 0 for item in candidates(batch)[1:])


def test_a_retry_with_half_the_ranks_has_as_many_examples_and_batches_as_planned() -> None:
    store = store_of(log_of_distinct_items([11]))
    planned_loader = loader_of(store, world_size=4, batch_size=1)
    retry_loader = loader_of(store, world_size=2, batch_size=2, num_planned_ranks=4)
    assert (4 * planned_loader.num_epoch_queries, len(planned_loader)) == (8, 2)
    assert (2 * retry_loader.num_epoch_queries, len(retry_loader)) == (8, 2)


@pytest.mark.parametrize("start_batch", [0, 1, 5, 12, 13])
def test_an_epoch_resumed_at_a_batch_has_this_batch_and_all_later_batches(start_batch: int, small_chunks: None) -> None:
    loader = loader_of(store_of(log_of_distinct_items([13] * 4)), num_negatives=3)
    assert len(loader) == 13
    batches, resumed_batches = list(loader.epoch(2)), list(loader.epoch(2, start_batch=start_batch))
    assert len(batches) == 13 and len(resumed_batches) == 13 - start_batch
    assert all(itertools.starmap(are_equal, zip(batches[start_batch:], resumed_batches, strict=True)))


@settings(max_examples=25)
@given(
    log=logs,
    is_ordered=st.booleans(),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 5),
    data=st.data(),
)
def test_a_batch_depends_only_on_seed_epoch_rank_and_index(
    log: Log, is_ordered: bool, batch_size: int, world_size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    known_negative_times: NegativeTimes = [([0] * 4, [], [0])] * len(log)
    store = store_with_negatives(log, known_negative_times, is_ordered=is_ordered)
    loader, equal_loader = (
        loader_of(
            store,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            seed=seed,
            num_negatives=3,
            max_known_negatives=2,
        )
        for _ in range(2)
    )
    batches = list(loader.epoch(epoch))
    assert len(batches) == len(loader)
    for batch_index in data.draw(st.permutations(range(len(loader)))):
        assert are_equal(equal_loader.batch(epoch, batch_index), batches[batch_index])
    start_batch = data.draw(st.integers(0, len(loader)))
    resumed_batches = equal_loader.epoch(epoch, start_batch=start_batch)
    assert all(itertools.starmap(are_equal, zip(batches[start_batch:], resumed_batches, strict=True)))


def test_the_order_of_the_examples_depends_on_seed_and_epoch() -> None:
    store = store_of(log_of_distinct_items([40] * 3))

    def epoch_order(seed: int, epoch: int) -> list[int]:
        batches = loader_of(store, seed=seed, batch_size=50).epoch(epoch)
        return [item for batch in batches for item in positives(batch)]

    orders = [epoch_order(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(120)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert epoch_order(seed=2, epoch=1) == orders[3]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a chunk have 14 candidates: three batches of 4 examples, or two batches of 4 examples and 3 negatives."""
    monkeypatch.setattr("recsys_core.dataset.loader.CHUNK_CANDIDATES", 14)


def loader_threads() -> list[threading.Thread]:
    """Return the running background threads of loaders."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_closing_an_epoch_early_ends_its_thread(small_chunks: None) -> None:
    batches = loader_of(store_of(log_of_distinct_items([400]))).epoch(0)
    next(batches)
    assert len(loader_threads()) == 1
    batches.close()
    assert loader_threads() == []


@pytest.mark.parametrize("error", [ValueError("page 7 is gone"), SystemExit(3)])
def test_an_error_in_the_background_thread_is_raised_after_the_values_before_it(error: BaseException) -> None:
    def numbers_before_error() -> Iterator[int]:
        yield from range(6)
        raise error

    received_numbers = []
    with pytest.raises(type(error)) as error_info:
        for number in prefetch(numbers_before_error(), depth=2):
            received_numbers.append(number)
    assert error_info.value is error and received_numbers == [*range(6)]
    assert loader_threads() == []


def test_the_background_thread_computes_no_more_than_depth_values_ahead() -> None:
    computed_numbers, buffer_is_full = [], threading.Event()

    def count_to_100() -> Iterator[int]:
        for number in range(100):
            computed_numbers.append(number)
            if number == 3:
                buffer_is_full.set()
            yield number

    numbers = prefetch(count_to_100(), depth=3)
    next(numbers)
    assert buffer_is_full.wait(10)
    time.sleep(0.05)  # time in which a thread without a limit would compute more numbers
    assert computed_numbers == [0, 1, 2, 3]  # one received, three ahead
    numbers.close()
    assert loader_threads() == []


def test_all_tensors_of_a_batch_move_to_the_device() -> None:
    batch = first_batch(loader_of(store_of(log_of_distinct_items([9])), num_negatives=2))
    assert are_equal(batch, batch.to(torch.device("cpu")))
    assert {tensor.device.type for tensor in tensors_of(batch.to(torch.device("meta")))} == {"meta"}


def test_a_query_batch_has_the_history_of_each_user_before_the_split() -> None:
    store = store_of([([1, 2, 3], [4], [5]), ([6], [], [7]), ([8, 9], [10], [])])
    for split, expected_histories in (("test", [[3, 4], [6]]), ("validation", [[2, 3], [6]])):
        batch = query_batch(store, np.array([0, 1]), split, assembler=Assembler(user_batch_key=UNPOOLED), max_history=2)
        assert histories(batch) == expected_histories
        assert batch.sparse[UNPOOLED]["user"].values().tolist() == [0, 1]
        assert candidates(batch) == []


def test_with_max_history_0_a_query_batch_has_empty_histories() -> None:
    store = store_of([([1, 2, 3], [4], [5])])
    batch = query_batch(store, np.array([0, 0]), "test", assembler=Assembler(user_batch_key=UNPOOLED), max_history=0)
    assert histories(batch) == [[], []] and candidates(batch) == []


def test_the_weight_of_an_example_is_the_weight_of_its_event_over_the_mean_weight() -> None:
    """The event of item i has the weight i, so the mean of the seven weights is 3."""
    store = store_of(log_of_distinct_items([3, 4]), event_weights=list(range(7)))
    for batch in loader_of(store, num_negatives=2).epoch(0):
        assert batch.loss_weight is not None and (3 * batch.loss_weight).tolist() == pytest.approx(positives(batch))


@pytest.mark.parametrize("event_weights", [None, list(range(1, 8))])
def test_the_user_exponent_scales_the_weights_of_a_user_and_keeps_the_mean_weight(event_weights: list[int] | None) -> None:
    """A user with n training events has the factor n ** -0.5, which is 0.5 for the first user and 1 for the second user."""
    store = store_of([([1, 2, 3, 4], [], []), ([5], [6], [7])], event_weights=event_weights)
    examples = ExampleSource(store, Assembler(user_batch_key=UNPOOLED), max_history=1, user_exponent=-0.5)
    loader = TrainLoader(examples, batch_size=2, rank_share=RankShare(0, 1), seed=3)
    weight_by_item = {}
    for batch in loader.epoch(0):
        assert batch.loss_weight is not None
        weight_by_item |= dict(zip(positives(batch), batch.loss_weight.tolist(), strict=True))
    event_weight_by_item = dict(zip(range(1, 6), event_weights or [1] * 5, strict=False))
    scaled_weight_by_item = {item: weight * (0.5 if item < 5 else 1.0) for item, weight in event_weight_by_item.items()}
    mean_weight = sum(scaled_weight_by_item.values()) / 5
    assert weight_by_item == pytest.approx({item: weight / mean_weight for item, weight in scaled_weight_by_item.items()})


def test_the_mean_weight_leaves_out_held_out_events() -> None:
    store = store_of([([1, 2], [3], [4]), ([5], [], [6])], event_weights=[1, 2, 70, 80, 6, 90])
    assert store.mean_weight() == 3  # of the weights 1, 2 and 6


def test_a_log_in_which_all_training_events_have_weight_0_is_rejected() -> None:
    store = store_of([([1, 2], [3], [4])], event_weights=[0, 0, 1, 1])
    with pytest.raises(InputError, match="all 2 training events have the weight 0"):
        loader_of(store)


def test_fixed_catalogue_rows_follow_the_positives_of_every_batch() -> None:
    store, catalogue_row_N = store_of(log_of_distinct_items([5, 4])), np.array([7, 2, 9])
    batches = list(loader_of(store, catalogue_row_N=catalogue_row_N).epoch(1))
    assert [positives(batch) for batch in batches] == [positives(batch) for batch in loader_of(store).epoch(1)]
    assert [candidates(batch)[batch.batch_size :] for batch in batches] == [catalogue_row_N.tolist()] * 3
