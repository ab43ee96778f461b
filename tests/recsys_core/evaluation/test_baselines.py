"""Baselines that are not trained: popularity, recent popularity, and zero-shot by pretrained vectors."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.dataset.layout import EventArrays
from recsys_core.evaluation.baselines import ZeroShot, cold_rows, popularity_order, recent_popularity_order


def test_ids_with_equal_counts_are_sorted_by_integer_value_or_alphabetically() -> None:
    count_I = np.array([3, 3, 3])
    assert popularity_order(count_I, item_ids=pa.array([10, 9, 2])).tolist() == [2, 1, 0]
    assert popularity_order(count_I, item_ids=pa.array(["10", "9", "2"])).tolist() == [0, 2, 1]


def test_an_item_is_cold_until_its_first_event() -> None:
    # One user has item 0 in training, item 2 in validation and item 3 in the test. Item 1 has no event.
    arrays = EventArrays(
        user_offset=np.array([0, 3]), train_end=np.array([1]), validation_end=np.array([2]),
        event_item=np.array([0, 2, 3], np.int32), train_user=np.array([0], np.int32), item_count=np.array([1, 0, 0, 0]),
        vector_row=np.full(4, -1),
    )  # fmt: skip
    store = EventStore(arrays, is_ordered=True)
    assert cold_rows(store, "validation").tolist() == [1, 2, 3]
    assert cold_rows(store, "test").tolist() == [1, 3]


def test_zero_shot_ranks_by_cosine_with_the_mean_of_the_normalised_history() -> None:
    vectors_RD = np.array([[10, 0], [0, 1], [1, 1], [-1, 0]], np.float32)
    vector_row_I = np.array([2, 0, -1, 1, 3])  # item 2 has no vector
    # The histories of four queries are the items 1, 3, 2; the items 1, 1, 3; item 2 alone; and no item.
    histories = JaggedArray(np.array([0, 3, 6, 7, 7]), np.array([1, 3, 2, 1, 1, 3, 2]))
    model = ZeroShot(vectors_RD, vector_row_I=vector_row_I)
    score_BI = model.query_vectors(histories) @ model.item_vectors(slice(0, 5)).T
    cosine = 2**-0.5  # of [1, 1] and [1, 0]
    # The vector [10, 0] has the same weight as [0, 1], and item 2 does not change the mean.
    torch.testing.assert_close(score_BI[0, [0, 1, 3, 4]], torch.tensor([1.0, cosine, cosine, -cosine]))
    torch.testing.assert_close(score_BI[1, 1] / score_BI[1, 3], torch.tensor(2.0))
    assert (score_BI[:, 2] < score_BI[:, [0, 1, 3, 4]].min(dim=1).values).all()
    assert (score_BI[2:][:, [0, 1, 3, 4]] == 0).all()


@pytest.mark.parametrize(
    ("days", "expected_order"),
    [
        (1, [3, 0, 1, 2]),  # only item 3 has a recent event; the other items are in the order of all events
        (3, [1, 3, 0, 2]),
        (30, [0, 1, 3, 2]),
    ],
)
def test_recent_popularity_counts_the_last_days_before_the_test(days: int, expected_order: list[int]) -> None:
    # User 0 has items 0, 0, 1 in training and 2 in the test. User 1 has 0, 1 in training, 3 in validation and 2 in the test.
    day_E = np.array([1, 2, 8, 11, 3, 8, 10, 11])
    arrays = EventArrays(
        user_offset=np.array([0, 4, 8]), train_end=np.array([3, 6]), validation_end=np.array([3, 7]),
        event_item=np.array([0, 0, 1, 2, 0, 1, 3, 2], np.int32), train_user=np.array([0, 0, 0, 1, 1], np.int32),
        item_count=np.array([3, 2, 0, 0]), vector_row=np.full(4, -1), event_time=day_E * 86_400_000_000,
    )  # fmt: skip
    store = EventStore(arrays, is_ordered=True)
    order = recent_popularity_order("test", store=store, days=days, popularity_order_I=np.array([0, 1, 2, 3], np.int32))
    assert order.tolist() == expected_order
