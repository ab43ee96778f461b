"""A batch looks up every distinct item once; its candidates, histories and features have the right indices."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_core.dataset.batch import Assembler, Batch, keyed_jagged
from recsys_core.dataset.feature_store import POOLED, POOLED_WEIGHTED, UNPOOLED, FeatureStore
from recsys_core.dataset.jagged import JaggedArray
from tests.recsys_core.ingest.random_features import FORMS, OWNER_KINDS, feature_store, values_of

NUM_USERS, NUM_ITEMS, NUM_EVENTS = 5, 9, 20
histories = st.lists(st.lists(st.integers(0, NUM_ITEMS - 1), max_size=4), min_size=1, max_size=5)


def lists_of(history: list[list[int]]) -> JaggedArray:
    return JaggedArray.from_lengths(
        np.array([len(items) for items in history], np.int64), np.array([item for items in history for item in items], np.int64)
    )


def made(
    history: list[list[int]],
    candidate: list[int],
    *,
    user: str | None = UNPOOLED,
    features: FeatureStore | None = None,
    weight: list[float] | None = None,
) -> Batch:
    """Return a batch in which query n belongs to user n and event 3 n."""
    row = np.arange(len(history))
    return Assembler(user_batch_key=user, features=features).batch(
        user_row_B=row,
        event_index_B=3 * row,
        history=lists_of(history),
        candidate_row_C=np.array(candidate, np.int64),
        loss_weight_B=None if weight is None else np.array(weight, np.float32),
    )


def rows_of(jagged: KeyedJaggedTensor, key: str, *, samples: int | None = None) -> list[list[int]]:
    """Return the rows of the first `samples`; the later lists must be empty."""
    rows = [part.tolist() for part in jagged[key].to_dense()]
    assert samples is None or not any(rows[samples:])
    return rows[:samples]


@settings(deadline=None)
@given(history=histories, candidate=st.lists(st.integers(0, NUM_ITEMS - 1), max_size=6))
def test_each_distinct_item_occurs_once_and_indices_restore_the_rows(history: list[list[int]], candidate: list[int]) -> None:
    batch = made(history, candidate)
    distinct = batch.item_row_V.tolist()
    assert sorted(distinct) == sorted({*candidate, *(item for items in history for item in items)} or {0})
    assert rows_of(batch.sparse[UNPOOLED], "item", samples=len(distinct)) == [[row] for row in distinct]
    assert rows_of(batch.sparse[UNPOOLED], "user", samples=len(history)) == [[row] for row in range(len(history))]
    assert [distinct[place] for place in batch.candidate_index_C.tolist()] == candidate
    offset = batch.history_offset.tolist()
    restored_histories = [
        [distinct[place] for place in batch.history_index_H[start:end].tolist()] for start, end in pairwise(offset)
    ]
    assert restored_histories == history
    assert batch.batch_size == len(history)


def test_an_item_of_two_candidates_and_a_history_is_looked_up_once() -> None:
    batch = made([[7, 4], []], [4, 2, 4])
    assert batch.item_row_V.tolist() == [4, 2, 7]
    assert (batch.candidate_index_C.tolist(), batch.history_index_H.tolist()) == ([0, 1, 0], [2, 0])
    assert batch.history_offset.tolist() == [0, 2, 2]


def test_without_any_item_one_unused_row_is_looked_up() -> None:
    batch = made([[], []], [], features=feature_store(users=NUM_USERS, items=NUM_ITEMS, events=NUM_EVENTS))
    assert (batch.item_row_V.tolist(), rows_of(batch.sparse[UNPOOLED], "item", samples=1)) == ([0], [[0]])
    assert batch.candidate_index_C.tolist() == batch.history_index_H.tolist() == []
    assert batch.history_offset.tolist() == [0, 0, 0]
    for form in FORMS:
        rows_of(batch.sparse[UNPOOLED], f"item.{form}", samples=1)
    assert rows_of(batch.sparse[UNPOOLED], "user") == [[0], [1]]


@settings(deadline=None, max_examples=40)
@given(history=histories, candidate=st.lists(st.integers(0, NUM_ITEMS - 1), max_size=6), seed=st.integers(0, 20))
def test_users_items_and_events_have_features_with_weights(history: list[list[int]], candidate: list[int], seed: int) -> None:
    store = feature_store(users=NUM_USERS, items=NUM_ITEMS, events=NUM_EVENTS, seed=seed)
    batch = made(history, candidate, features=store)
    assert batch.sparse[UNPOOLED].keys() == ["item", *(f"item.{form}" for form in FORMS), "user"]
    assert batch.sparse[POOLED].keys() == ["user.single", "user.list", "context.single", "context.list"]
    weighted = [f"{owner_kind}.{form}" for owner_kind in ("user", "context") for form in ("weighted_list", "number")]
    assert batch.sparse[POOLED_WEIGHTED].keys() == weighted
    owners = {"user": range(len(history)), "context": range(0, 3 * len(history), 3), "item": batch.item_row_V.tolist()}
    for owner_kind in OWNER_KINDS:
        for form in FORMS:
            key = f"{owner_kind}.{form}"
            expected = [values_of(store, key, owner) for owner in owners[owner_kind]]
            jagged = batch.sparse[UNPOOLED if owner_kind == "item" else POOLED_WEIGHTED if key in weighted else POOLED]
            assert rows_of(jagged, key, samples=len(expected)) == [rows for rows, _ in expected]
            weights = [weight for _, several in expected for weight in several or ()]
            if key in weighted:
                assert jagged[key].weights().tolist() == weights
            elif form in ("weighted_list", "number"):
                assert batch.item_feature_weight[key].tolist() == weights
            else:
                assert jagged.weights_or_none() is None and key not in batch.item_feature_weight


def test_users_are_under_the_key_of_their_table_and_missing_features_have_no_key() -> None:
    def keys(user: str | None) -> dict[str, list[str]]:
        return {name: jagged.keys() for name, jagged in made([[1]], [2], user=user).sparse.items()}

    assert keys(UNPOOLED) == {UNPOOLED: ["item", "user"]}
    assert keys(POOLED) == {UNPOOLED: ["item"], POOLED: ["user"]}
    assert keys(None) == {UNPOOLED: ["item"]}
    numbers = FeatureStore({"user.number": feature_store(users=NUM_USERS, items=1, events=1).feature_by_key["user.number"]})
    assert set(made([[1]], [2], user=None, features=numbers).sparse) == {UNPOOLED, POOLED_WEIGHTED}


def test_weights_are_those_of_the_queries() -> None:
    batch = made([[1], []], [2, 3, 4], weight=[0.5, 2.0])
    assert batch.loss_weight is not None and batch.loss_weight.tolist() == [0.5, 2.0]
    assert made([[1]], [2]).loss_weight is None


def test_an_item_batch_keeps_its_order_and_has_item_features() -> None:
    store = feature_store(users=NUM_USERS, items=NUM_ITEMS, events=NUM_EVENTS)
    for user in (None, POOLED, UNPOOLED):
        batch = Assembler(user_batch_key=user, features=store).item_batch(np.array([6, 0, 3]))
        assert (batch.batch_size, batch.item_row_V.tolist(), batch.candidate_index_C.tolist()) == (0, [6, 0, 3], [0, 1, 2])
        expected = [values_of(store, "item.list", item)[0] for item in (6, 0, 3)]
        assert rows_of(batch.sparse[UNPOOLED], "item.list", samples=3) == expected
        assert batch.sparse[POOLED].values().tolist() == batch.sparse[POOLED_WEIGHTED].values().tolist() == []


def test_keyed_lists_and_their_weights_are_stored_key_by_key() -> None:
    features = {"a": lists_of([[5], []]), "b": lists_of([[1, 2], [3]])}
    jagged = keyed_jagged(features, num_samples=2, weight_L=np.array([0.5, 1.0, 2.0, 3.0], np.float32))
    assert (jagged.keys(), jagged.values().tolist(), jagged.lengths().tolist()) == (["a", "b"], [5, 1, 2, 3], [1, 0, 2, 1])
    assert [part.tolist() for part in jagged["b"].to_dense_weights()] == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize("samples", [0, 3])
def test_empty_lists_are_kept(samples: int) -> None:
    jagged = keyed_jagged({"a": JaggedArray.empty(samples)}, num_samples=samples)
    assert rows_of(jagged, "a") == [[]] * samples
