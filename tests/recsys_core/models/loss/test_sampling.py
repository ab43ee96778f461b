import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.errors import InputError
from recsys_core.models.loss.sampling import (
    log_expected_count,
    negative_share,
    seen_pairs,
)


def test_the_expected_count_of_an_item_that_is_never_drawn_has_a_finite_log():
    log_q_C = log_expected_count(torch.tensor([0.0, 0.5]), torch.tensor([0.0, 0.0]), num_positives=4, num_negatives=2)
    assert log_q_C.isfinite().all() and log_q_C[0] < -80 and log_q_C[1].item() == pytest.approx(np.log(2))


def test_the_expected_count_is_that_of_the_draws():
    rng = np.random.default_rng(0)
    positive_I, negative_I = np.array([0.6, 0.3, 0.1]), negative_share(np.array([6, 3, 1]), 0.0)
    drawn_I = rng.multinomial(20, positive_I, 4000).mean(0) + rng.multinomial(5, negative_I, 4000).mean(0)
    log_q_I = log_expected_count(torch.from_numpy(positive_I), torch.from_numpy(negative_I), num_positives=20, num_negatives=5)
    np.testing.assert_allclose(log_q_I.exp(), drawn_I, rtol=0.05)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20).filter(any), st.sampled_from([0.0, 0.5, 0.75, 1.0, 40.0]))
def test_the_shares_of_negatives_add_to_one_and_rise_with_the_count(counts, alpha):
    count_I = np.array(counts)
    share_I = negative_share(count_I, alpha)
    assert share_I.dtype == np.float64 and share_I.sum() == pytest.approx(1)
    assert (share_I[count_I == 0] == 0).all()
    assert (np.diff(share_I[np.argsort(count_I, kind="stable")]) >= 0).all()
    if alpha == 1:
        np.testing.assert_allclose(share_I, count_I / count_I.sum())


def test_drawing_negatives_without_any_training_event_raises():
    with pytest.raises(InputError, match="0 of 3 items have a training event"):
        negative_share(np.zeros(3, dtype=np.int64), 0.75)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 7), max_size=5), max_size=5),
    st.lists(st.integers(0, 7), max_size=8),
)
def test_seen_pairs_equal_those_of_a_plain_loop(histories, candidates):
    history_H = torch.tensor([row for history in histories for row in history], dtype=torch.int64)
    offset = torch.tensor([0, *np.cumsum([len(history) for history in histories], dtype=int).tolist()])
    query_index, column_index = seen_pairs(history_H, offset, torch.tensor(candidates, dtype=torch.int64))
    assert query_index.dtype == column_index.dtype == torch.int64
    expected = [
        (b, k) for b, history in enumerate(histories) for row in history for k, item in enumerate(candidates) if item == row
    ]
    assert list(zip(query_index.tolist(), column_index.tolist(), strict=True)) == expected
