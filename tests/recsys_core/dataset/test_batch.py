"""Lookups, candidates, histories, features and weights of a batch."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_core.dataset.batch import Assembler, Batch, keyed_jagged
from recsys_core.dataset.feature_store import POOLED, POOLED_WEIGHTED, UNPOOLED, FeatureStore
from recsys_core.dataset.jagged import JaggedArray
from tests.recsys_core.ingest.random_features import FORMS, OWNER_KINDS, feature_store, values_of

NUM_USERS, NUM_ITEMS, NUM_EVENTS = 5, 9, 20
history_lists = st.lists(st.lists(st.integers(0, NUM_ITEMS - 1), max_size=4), min_size=1, max_size=5)


def jagged_of(lists: list[list[int]]) -> JaggedArray:
    """Return the lists as one jagged array."""
    return JaggedArray.from_lengths(
        np.array([len(values) for values in lists], np.int64),
        np.array([value for values in lists for value in values], np.int64),
    )


def batch_of(
    histories: list[list[int]],
    candidates: list[int],
    *,
    user_batch_key: str | None = UNPOOLED,
    features: FeatureStore | None = None,
    loss_weight: list[float] | None = None,
) -> Batch:
    """Return a batch in which query b belongs to user b and event 3 * b."""
    query_index_B = np.arange(len(histories))
    return Assembler(user_batch_key=user_batch_key, features=features).batch(
        user_row_B=query_index_B,
        event_index_B=3 * query_index_B,
        history=jagged_of(histories),
        candidate_row_C=np.array(candidates, np.int64),
        loss_weight_B=None if loss_weight is None else np.array(loss_weight, np.float32),
    )


def rows_of(jagged: KeyedJaggedTensor, key: str, *, num_samples: int | None = None) -> list[list[int]]:
    """Return the rows that each of the first `num_samples` samples looks up. The later samples must look up no row."""
    rows_by_sample = [sample_rows.tolist() for sample_rows in jagged[key].to_dense()]
    assert num_samples is None or not any(rows_by_sample[num_samples:])
    return rows_by_sample[:num_samples]


@given(histories=history_lists, candidates=st.lists(st.integers(0, NUM_ITEMS - 1), max_size=6))
def test_each_item_is_looked_up_once_and_indices_restore_candidates_and_histories(
    histories: list[list[int]], candidates: list[int]
) -> None:
    batch = batch_of(histories, candidates)
    distinct_items = batch.item_row_V.tolist()
    assert sorted(distinct_items) == sorted({*candidates, *(item for items in histories for item in items)} or {0})
    assert rows_of(batch.sparse[UNPOOLED], "item", num_samples=len(distinct_items)) == [[row] for row in distinct_items]
    assert rows_of(batch.sparse[UNPOOLED], "user", num_samples=len(histories)) == [[row] for row in range(len(histories))]
    assert [distinct_items[index] for index in batch.candidate_index_C.tolist()] == candidates
    offsets = batch.history_offset.tolist()
    restored_histories = [
        [distinct_items[index] for index in batch.history_index_H[start:end].tolist()] for start, end in pairwise(offsets)
    ]
    assert restored_histories == histories
    assert batch.batch_size == len(histories)


def test_an_item_of_two_candidates_and_a_history_is_looked_up_once() -> None:
    batch = batch_of([[7, 4], []], [4, 2, 4])
    assert batch.item_row_V.tolist() == [4, 2, 7]
    assert (batch.candidate_index_C.tolist(), batch.history_index_H.tolist()) == ([0, 1, 0], [2, 0])
    assert batch.history_offset.tolist() == [0, 2, 2]


def test_a_batch_without_items_looks_up_one_unused_row() -> None:
    batch = batch_of([[], []], [], features=feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS))
    assert (batch.item_row_V.tolist(), rows_of(batch.sparse[UNPOOLED], "item", num_samples=1)) == ([0], [[0]])
    assert batch.candidate_index_C.tolist() == batch.history_index_H.tolist() == []
    assert batch.history_offset.tolist() == [0, 0, 0]
    for form in FORMS:
        rows_of(batch.sparse[UNPOOLED], f"item.{form}", num_samples=1)
    assert rows_of(batch.sparse[UNPOOLED], "user") == [[0], [1]]


@given(histories=history_lists, candidates=st.lists(st.integers(0, NUM_ITEMS - 1), max_size=6), seed=st.integers(0, 20))
def test_a_batch_has_the_features_and_weights_of_its_users_items_and_events(
    histories: list[list[int]], candidates: list[int], seed: int
) -> None:
    store = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS, seed=seed)
    batch = batch_of(histories, candidates, features=store)
    assert batch.sparse[UNPOOLED].keys() == ["item", *(f"item.{form}" for form in FORMS), "user"]
    assert batch.sparse[POOLED].keys() == ["user.single", "user.list", "context.single", "context.list"]
    weighted_keys = [f"{owner_kind}.{form}" for owner_kind in ("user", "context") for form in ("weighted_list", "number")]
    assert batch.sparse[POOLED_WEIGHTED].keys() == weighted_keys
    owners_by_kind = {
        "user": range(len(histories)),
        "context": range(0, 3 * len(histories), 3),
        "item": batch.item_row_V.tolist(),
    }
    for owner_kind in OWNER_KINDS:
        for form in FORMS:
            key = f"{owner_kind}.{form}"
            expected_rows_and_weights = [values_of(store, key, owner) for owner in owners_by_kind[owner_kind]]
            jagged = batch.sparse[UNPOOLED if owner_kind == "item" else POOLED_WEIGHTED if key in weighted_keys else POOLED]
            assert rows_of(jagged, key, num_samples=len(expected_rows_and_weights)) == [
                rows for rows, _ in expected_rows_and_weights
            ]
            expected_weights = [weight for _, owner_weights in expected_rows_and_weights for weight in owner_weights or ()]
            if key in weighted_keys:
                assert jagged[key].weights().tolist() == expected_weights
            elif form in ("weighted_list", "number"):
                assert batch.item_feature_weight[key].tolist() == expected_weights
            else:
                assert jagged.weights_or_none() is None and key not in batch.item_feature_weight


def test_users_are_looked_up_under_the_user_batch_key_and_missing_features_have_no_key() -> None:
    def keys_by_lookup_kind(user_batch_key: str | None) -> dict[str, list[str]]:
        batch = batch_of([[1]], [2], user_batch_key=user_batch_key)
        return {lookup_kind: jagged.keys() for lookup_kind, jagged in batch.sparse.items()}

    assert keys_by_lookup_kind(UNPOOLED) == {UNPOOLED: ["item", "user"]}
    assert keys_by_lookup_kind(POOLED) == {UNPOOLED: ["item"], POOLED: ["user"]}
    assert keys_by_lookup_kind(None) == {UNPOOLED: ["item"]}
    user_numbers = FeatureStore(
        {"user.number": feature_store(num_users=NUM_USERS, num_items=1, num_events=1).feature_by_key["user.number"]}
    )
    assert set(batch_of([[1]], [2], user_batch_key=None, features=user_numbers).sparse) == {UNPOOLED, POOLED_WEIGHTED}


def test_a_batch_has_the_loss_weights_of_its_queries_if_there_are_any() -> None:
    batch = batch_of([[1], []], [2, 3, 4], loss_weight=[0.5, 2.0])
    assert batch.loss_weight is not None and batch.loss_weight.tolist() == [0.5, 2.0]
    assert batch_of([[1]], [2]).loss_weight is None


def test_an_item_batch_keeps_the_order_of_its_items_and_has_their_features() -> None:
    store = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS)
    for user_batch_key in (None, POOLED, UNPOOLED):
        batch = Assembler(user_batch_key=user_batch_key, features=store).item_batch(np.array([6, 0, 3]))
        assert (batch.batch_size, batch.item_row_V.tolist(), batch.candidate_index_C.tolist()) == (0, [6, 0, 3], [0, 1, 2])
        expected_rows = [values_of(store, "item.list", item)[0] for item in (6, 0, 3)]
        assert rows_of(batch.sparse[UNPOOLED], "item.list", num_samples=3) == expected_rows
        assert batch.sparse[POOLED].values().tolist() == batch.sparse[POOLED_WEIGHTED].values().tolist() == []


def test_lists_and_their_weights_are_stored_key_by_key() -> None:
    features = {"a": jagged_of([[5], []]), "b": jagged_of([[1, 2], [3]])}
    jagged = keyed_jagged(features, num_samples=2, weight_L=np.array([0.5, 1.0, 2.0, 3.0], np.float32))
    assert (jagged.keys(), jagged.values().tolist(), jagged.lengths().tolist()) == (["a", "b"], [5, 1, 2, 3], [1, 0, 2, 1])
    assert [values.tolist() for values in jagged["b"].to_dense_weights()] == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize("num_samples", [0, 3])
def test_empty_lists_are_kept(num_samples: int) -> None:
    jagged = keyed_jagged({"a": JaggedArray.empty(num_samples)}, num_samples=num_samples)
    assert rows_of(jagged, "a") == [[]] * num_samples
