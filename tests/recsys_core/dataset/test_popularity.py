import numpy as np
import pyarrow as pa

from recsys_core.dataset.popularity import popularity_order


def test_ids_with_equal_counts_are_sorted_by_integer_value_or_alphabetically() -> None:
    count = np.array([3, 3, 3])
    assert popularity_order(count, item_ids=pa.array([10, 9, 2])).tolist() == [2, 1, 0]
    assert popularity_order(count, item_ids=pa.array(["10", "9", "2"])).tolist() == [0, 2, 1]
