"""Filters on the columns of items, compared with Python's comparisons, which are exact for integers and floats."""

import math
import operator
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from recsys_core.serving.items import ItemTable, write_items

COMPARISON_BY_OPERATOR: dict[str, Callable[[object, object], bool]] = {
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
}
INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
OPERANDS = st.one_of(INTEGERS, st.floats(-(2.0**62), 2.0**62), st.integers(-9, 9).map(lambda number: number / 2))


def write_item_table(folder: Path, values: pa.Array) -> ItemTable:
    columns = pa.table({"item_id": pa.array(range(len(values))), "value": values})
    write_items(folder / "items.parquet", columns=columns, item_vector_ID=np.zeros((len(values), 4), np.float32), space_id="s")
    return ItemTable(folder / "items.parquet", filter_columns=("value",), has_titles=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(values=[-2, -1, 0, 1, 2], operand=0.5)
@example(values=[-2, -1, 0, 1, 2], operand=-0.5)
@example(values=[-2, -1, 0, 1, 2], operand=1)
@given(values=st.lists(st.one_of(INTEGERS, st.integers(-9, 9)), min_size=1, max_size=8), operand=OPERANDS)
def test_integers_are_compared_exactly_with_integers_and_floats(tmp_path: Path, values: list[int], operand: float) -> None:
    table = write_item_table(tmp_path, pa.array(values, pa.int64()))
    for operator_name, comparison in COMPARISON_BY_OPERATOR.items():
        expected_matches = [comparison(value, operand) for value in values]
        assert table.matching({"value": {operator_name: operand}}).tolist() == expected_matches, operator_name
    operands = [operand, values[0]]
    assert table.matching({"value": {"in": operands}}).tolist() == [value in operands for value in values]


def test_a_column_of_floats_is_compared_exactly_with_large_integers(tmp_path: Path) -> None:
    table = write_item_table(tmp_path, pa.array([1.0, 2.0, 1e300]))
    assert table.matching({"value": {"in": [2, 2**60 + 1]}}).tolist() == [False, True, False]
    assert table.matching({"value": {"lt": 2**60 + 1, "ge": 1.5}}).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("values", "condition", "expected_matches"),
    [
        (pa.array([1, 2, 3]), np.int64(2), [False, True, False]),
        (pa.array([1, 2, 3]), np.array([3, 1], np.uint64), [True, False, True]),
        (pa.array([1, 2, 3]), {"in": np.array([2])}, [False, True, False]),
        (pa.array([1.5, 2.5]), {"ge": np.float32(2.5)}, [False, True]),
        (pa.array([True, False]), {"in": [np.bool_(True)]}, [True, False]),
        (pa.array(["a", "b"]), np.array(["b"]), [False, True]),
        (pa.array([datetime(2026, 1, 1), datetime(2026, 1, 3)]), {"since": np.datetime64("2026-01-02")}, [False, True]),
    ],
)
def test_a_filter_may_have_numbers_and_arrays_of_numpy(
    tmp_path: Path, values: pa.Array, condition: object, expected_matches: list[bool]
) -> None:
    assert write_item_table(tmp_path, values).matching({"value": condition}).tolist() == expected_matches


def test_a_filter_on_text_may_have_characters_that_cannot_be_printed(tmp_path: Path) -> None:
    table = write_item_table(tmp_path, pa.array(["rock\u00a0and roll", "rock\x00", None]))
    assert table.matching({"value": ["rock\u00a0and roll", "rock\x00"]}).tolist() == [True, True, False]


def test_nan_satisfies_no_condition_and_is_never_the_most_frequent_value(tmp_path: Path) -> None:
    table = write_item_table(tmp_path, pa.array([math.nan, math.nan, math.nan, 2.5, 1.5, 1.5, math.inf]))
    assert table.most_frequent("value") == 1.5
    assert table.matching({"value": {"le": 2}}).tolist() == [False, False, False, False, True, True, False]
