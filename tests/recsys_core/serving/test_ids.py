import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.errors import InputError
from recsys_core.serving.ids import IdMap

int_ids = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=20)
text_ids = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20), unique=True, max_size=20
)


@given(st.one_of(st.tuples(int_ids, int_ids), st.tuples(text_ids, text_ids)))
def test_ids_go_to_rows_and_back(both: tuple[list, list]) -> None:
    known, asked = both
    ids = IdMap(pa.array(known, pa.string() if all(isinstance(i, str) for i in known) and known else pa.int64()), name="id")
    if not known:
        assert (ids.rows([]) == []).all()
        return
    assert ids.rows(known).tolist() == list(range(len(known)))
    assert ids.rows(asked).tolist() == [known.index(i) if i in known else -1 for i in asked]
    assert ids.ids(np.arange(len(known))).tolist() == known


def test_ids_of_the_wrong_type_are_refused_in_words() -> None:
    with pytest.raises(InputError, match=r"user_id 5 is no string, but the model was trained on string ids"):
        IdMap(pa.array(["a"]), name="user_id").rows([5])
    numbers = IdMap(pa.array([5]), name="user_id")
    for wrong in ("a", 1.5, None, 2**70):
        with pytest.raises(InputError, match="no whole numbers, but the model was trained on integer ids"):
            numbers.rows([wrong])
    assert numbers.rows(["5", np.int32(5)]).tolist() == [0, 0]


def test_strings_whose_hashes_collide_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pandas.util.hash_array", lambda values, categorize: np.array([len(v) for v in values], np.uint64))
    ids = IdMap(pa.array(["bb", "aa", "c", "dd"]), name="id")
    assert ids.rows(["dd", "aa", "zz", "c", "bb", "q", "long"]).tolist() == [3, 1, -1, 2, 0, -1, -1]
