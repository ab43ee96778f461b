"""Maps between ids and rows, compared with lookups in a list, and errors about invalid ids."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.errors import InputError
from recsys_core.serving.ids import IdMap

lists_of_integers = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=20)
lists_of_texts = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20), unique=True, max_size=20
)


@given(st.one_of(st.tuples(lists_of_integers, lists_of_integers), st.tuples(lists_of_texts, lists_of_texts)))
def test_ids_are_mapped_to_rows_and_back(known_and_requested_ids: tuple[list, list]) -> None:
    known_ids, requested_ids = known_and_requested_ids
    has_text_ids = bool(known_ids) and all(isinstance(known_id, str) for known_id in known_ids)
    id_map = IdMap(pa.array(known_ids, pa.string() if has_text_ids else pa.int64()), id_name="id")
    if not known_ids:
        assert (id_map.rows([]) == []).all()
        return
    assert id_map.rows(known_ids).tolist() == list(range(len(known_ids)))
    assert id_map.rows(requested_ids).tolist() == [
        known_ids.index(requested_id) if requested_id in known_ids else -1 for requested_id in requested_ids
    ]
    assert id_map.ids(np.arange(len(known_ids))).tolist() == known_ids


@pytest.mark.parametrize(
    ("known_ids", "requested_id", "message"),
    [
        (["a"], 5, "user_id 5 is not a string, but the model was trained on string ids"),
        (["a"], None, "user_id is missing"),
        (["a"], float("nan"), "user_id is missing"),
        (["a"], ["a"], r"user_id \['a'\] is not a string"),
        (["a"], "\ud800", r"user_id '\\ud800' is not valid Unicode"),
        ([5], "a", "user_id 'a' is not an integer, but the model was trained on integer ids"),
        ([5], "05", "user_id '05' is not an integer"),
        ([5], 1.5, "user_id 1.5 is not an integer"),
        ([5], True, "user_id True is not an integer"),
        ([5], None, "user_id is missing"),
        ([5], pd.NA, "user_id is missing"),
        ([5], float("inf"), "user_id inf is not an integer"),
        ([5], 2**70, f"user_id {2**70} is not a 64-bit integer"),
        ([5], str(2**70), f"user_id '{2**70}' is not a 64-bit integer"),
        ([5], 2.0**53, "is a float too large to be an exact integer"),
        ([5], {}, "user_id {} is not an integer"),
    ],
)
def test_an_invalid_id_is_rejected_alone_and_after_a_valid_one(known_ids: list, requested_id: object, message: str) -> None:
    for valid_ids in ([], known_ids):
        with pytest.raises(InputError, match=message):
            IdMap(pa.array(known_ids), id_name="user_id").rows([*valid_ids, requested_id])


def test_integer_ids_may_be_decimal_strings_and_whole_floats() -> None:
    id_map = IdMap(pa.array([5, -7]), id_name="user_id")
    assert id_map.rows(["5", np.int32(5), 5.0, np.float64(-7), "-7", "6"]).tolist() == [0, 0, 0, 1, 1, -1]
    assert id_map.rows(np.array([5.0, -7.0])).tolist() == [0, 1]


def test_strings_with_equal_hashes_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pandas.util.hash_array", lambda values, categorize: np.array([len(text) for text in values], np.uint64)
    )
    id_map = IdMap(pa.array(["bb", "aa", "c", "dd"]), id_name="id")
    assert id_map.rows(["dd", "aa", "zz", "c", "bb", "q", "long"]).tolist() == [3, 1, -1, 2, 0, -1, -1]
