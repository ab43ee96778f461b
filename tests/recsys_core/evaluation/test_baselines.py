import numpy as np
import pyarrow as pa
import pytest
import torch

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.dataset.layout import EventArrays
from recsys_core.evaluation.baselines import ZeroShot, cold_rows, popularity_order, recent_popularity_order


def test_ids_with_equal_counts_are_sorted_by_integer_value_or_alphabetically() -> None:
    count = np.array([3, 3, 3])
    assert popularity_order(count, item_ids=pa.array([10, 9, 2])).tolist() == [2, 1, 0]
    assert popularity_order(count, item_ids=pa.array(["10", "9", "2"])).tolist() == [0, 2, 1]


def test_an_item_is_cold_until_its_first_event() -> None:
    # One user: training has item 0, validation 2, the test 3; item 1 is in no event at all.
    arrays = EventArrays(
        user_offset=np.array([0, 3]), train_end=np.array([1]), validation_end=np.array([2]),
        event_item=np.array([0, 2, 3], np.int32), train_user=np.array([0], np.int32), item_count=np.array([1, 0, 0, 0]),
        vector_row=np.full(4, -1),
    )  # fmt: skip
    store = EventStore(arrays, is_ordered=True)
    assert cold_rows(store, "validation").tolist() == [1, 2, 3]
    assert cold_rows(store, "test").tolist() == [1, 3]


def test_zero_shot_ranks_by_cosine_with_the_mean_of_the_normalised_history() -> None:
    vectors = np.array([[10, 0], [0, 1], [1, 1], [-1, 0]], np.float32)
    row_of_item = np.array([2, 0, -1, 1, 3])
    history = JaggedArray(np.array([0, 3, 6, 7, 7]), np.array([1, 3, 2, 1, 1, 3, 2]))
    model = ZeroShot(vectors, vector_row_I=row_of_item)
    query, item = model.query_vectors(history), model.item_vector_ID
    score = query @ item.T
    half = 2**-0.5
    # The long vector [10, 0] counts no more than [0, 1], and the item without a vector counts nothing.
    torch.testing.assert_close(score[0, [0, 1, 3, 4]], torch.tensor([1.0, half, half, -half]))
    torch.testing.assert_close(score[1, 1] / score[1, 3], torch.tensor(2.0))
    assert (score[:, 2] < score[:, [0, 1, 3, 4]].min(dim=1).values).all()
    assert (score[2:][:, [0, 1, 3, 4]] == 0).all()


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        (1, [3, 0, 1, 2]),  # only the newest event is recent; the other items are in the order of all events
        (3, [1, 3, 0, 2]),
        (30, [0, 1, 3, 2]),
    ],
)
def test_recent_popularity_counts_the_last_days_before_the_test(days: int, expected: list[int]) -> None:
    # User 0: items 0, 0, 1 and the test item 2. User 1: items 0, 1, 3 (validation) and the test item 2.
    day = np.array([1, 2, 8, 11, 3, 8, 10, 11])
    arrays = EventArrays(
        user_offset=np.array([0, 4, 8]), train_end=np.array([3, 6]), validation_end=np.array([3, 7]),
        event_item=np.array([0, 0, 1, 2, 0, 1, 3, 2], np.int32), train_user=np.array([0, 0, 0, 1, 1], np.int32),
        item_count=np.array([3, 2, 0, 0]), vector_row=np.full(4, -1), event_time=day * 86_400_000_000,
    )  # fmt: skip
    store = EventStore(arrays, is_ordered=True)
    order = recent_popularity_order("test", store=store, days=days, popularity_order_I=np.array([0, 1, 2, 3], np.int32))
    assert order.tolist() == expected
