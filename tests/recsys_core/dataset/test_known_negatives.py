"""Known negatives of events and users compared with plain Python."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.known_negatives import KnownNegatives
from recsys_core.dataset.layout import EventArrays
from tests.recsys_core.dataset import test_events
from tests.recsys_core.dataset.test_events import Users, arrays_of, lists_of, train_positions, users

Places = list[tuple[list[int], list[int], list[int]]]
"""For each user and split, the number of earlier events of the split for each known negative, ascending."""
FIRST_ITEM = 20_000


pytestmark = pytest.mark.usefixtures("shards")


@st.composite
def logs_with_negatives(draw: st.DrawFn) -> tuple[Users, Places]:
    log = draw(users)
    places = [
        tuple(sorted(draw(st.lists(st.integers(0, len(part)), max_size=6))) for part in user)  # 0: before the first event
        for user in log
    ]
    return log, places


def store_with_negatives(log: Users, places: Places, *, ordered: bool = True) -> EventStore:
    """Return a store. The known negatives are the items FIRST_ITEM, FIRST_ITEM + 1, ..., so an item identifies a negative."""
    items = items_by_user(places)
    arrays = arrays_with_negatives(log, places, items, ordered=ordered)
    shards = [
        arrays_with_negatives(log[users], places[users], items[users], ordered=ordered)
        for users in test_events.users_by_shard()
    ]
    return EventStore(test_events.in_shards(arrays, shards), is_ordered=ordered)


def arrays_with_negatives(log: Users, places: Places, items: list[list[list[int]]], *, ordered: bool) -> EventArrays:
    block_start = np.concatenate([[0], np.cumsum([len(part) for user in log for part in user])])
    flat = [part for user in places for part in user]
    event = [block_start[block] + place for block, part in enumerate(flat) for place in part]
    return replace(
        arrays_of(log),
        negative_offset=np.concatenate([[0], np.cumsum([len(part) for part in flat])]).astype(np.int64),
        negative_item=np.array([item for user in items for part in user for item in part], np.int32),
        negative_event=np.array(event, np.int64) if ordered else None,
    )


def items_by_user(places: Places) -> list[list[list[int]]]:
    items = count(FIRST_ITEM)
    return [[[next(items) for _ in part] for part in user] for user in places]


def negatives_of(store: EventStore) -> KnownNegatives:
    assert store.known_negatives is not None
    return store.known_negatives


@given(log=logs_with_negatives(), max_items=st.integers(1, 5))
@settings(deadline=None)
def test_an_event_has_the_newest_negatives_of_its_user_that_are_not_later(log: tuple[Users, Places], max_items: int) -> None:
    store = store_with_negatives(*log)
    event, user = train_positions(store)
    stored = negatives_of(store).at_events(event, user, max_items=max_items, draw_B=np.full(len(event), 0.5))
    expected = [
        [item for item, place in zip(items[0], places[0], strict=True) if place <= at][-max_items:]
        for (train, _, _), places, items in zip(*log, items_by_user(log[1]), strict=True)
        for at in range(len(train))
    ]
    assert lists_of(stored) == expected


@given(log=logs_with_negatives())
@settings(deadline=None)
def test_the_negatives_before_a_split_are_those_of_the_earlier_splits(log: tuple[Users, Places]) -> None:
    negatives, items = negatives_of(store_with_negatives(*log)), items_by_user(log[1])
    user = np.arange(len(items))[::-1]
    assert lists_of(negatives.before(user, "validation")) == [own[0] for own in items[::-1]]
    assert lists_of(negatives.before(user, "test")) == [own[0] + own[1] for own in items[::-1]]
    assert negatives.num_train_negatives_U.tolist() == [len(own[0]) for own in items]


@given(log=logs_with_negatives(), max_items=st.integers(1, 5), draw=st.floats(0, 0.999))
@settings(deadline=None)
def test_without_an_order_distinct_negatives_of_the_training_split_are_drawn(
    log: tuple[Users, Places], max_items: int, draw: float
) -> None:
    store = store_with_negatives(*log, ordered=False)
    event, user = train_positions(store)
    drawn = lists_of(negatives_of(store).at_events(event, user, max_items=max_items, draw_B=np.full(len(event), draw)))
    training_negatives = [items_by_user(log[1])[row][0] for row in user]
    for items, all_items in zip(drawn, training_negatives, strict=True):
        assert len(set(items)) == len(items) == min(max_items, len(all_items)) and set(items) <= set(all_items)


def test_every_negative_of_an_unordered_log_is_drawn_equally_often() -> None:
    store = store_with_negatives([([1], [], [])], [([0] * 5, [0], [])], ordered=False)
    event, draw = np.zeros(5_000, np.int64), np.random.default_rng(0).random(5_000)
    drawn = negatives_of(store).at_events(event, event, max_items=2, draw_B=draw)
    share = np.bincount(drawn.values_L - FIRST_ITEM, minlength=6) / 5_000
    np.testing.assert_allclose(share, [0.4] * 5 + [0], atol=0.03)


def test_a_store_without_the_arrays_has_no_known_negatives() -> None:
    assert EventStore(arrays_of([([1], [], [])]), is_ordered=True).known_negatives is None
