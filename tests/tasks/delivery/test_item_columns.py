"""Columns of items that vector stores receive."""

import sys

import numpy as np
import pyarrow as pa
import pytest

from tasks.delivery.item_columns import rows_of


@pytest.mark.parametrize(
    ("data_type", "largest_number"), [(pa.float64(), sys.float_info.max), (pa.float32(), float(np.finfo(np.float32).max))]
)
def test_nan_becomes_null_and_infinity_the_largest_number(data_type: pa.DataType, largest_number: float) -> None:
    prices = pa.array([1.5, None, float("nan"), float("inf"), float("-inf")], data_type)
    rows = rows_of(pa.table({"price": prices, "vector": pa.nulls(5)}))
    assert rows == [{"price": 1.5}, {}, {}, {"price": largest_number}, {"price": -largest_number}]
