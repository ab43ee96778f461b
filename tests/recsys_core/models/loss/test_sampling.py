import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.errors import InputError
from recsys_core.models.loss.sampling import (
    StreamingFrequency,
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


def estimate(batches, *, items, rate, frequency=None, first_step=0):
    frequency = frequency or StreamingFrequency(items, rate=rate)
    for step, rows in enumerate(batches, first_step):
        frequency.update(torch.as_tensor(rows), torch.tensor(step))
    return frequency


@pytest.mark.parametrize("batch_size", [1, 8, 256])
def test_frequencies_come_close_to_the_popularity_of_the_stream(batch_size):
    # From an item that is in every batch a hundred times to one that is in every fifteenth batch of 8.
    share_I = np.array([0.45, 0.2, 0.15, 0.1, 0.06, 0.03, 0.01])
    rng = np.random.default_rng(1)
    steps = 60_000 // batch_size
    batches = rng.choice(len(share_I), (min(steps, 8000), batch_size), p=share_I)
    frequency = estimate(batches, items=len(share_I), rate=0.0005)
    log_share_I = frequency.log_share(torch.arange(len(share_I)))
    np.testing.assert_allclose(log_share_I[:4].exp(), share_I[:4], rtol=0.06)
    np.testing.assert_allclose(log_share_I.exp(), share_I, rtol=0.25)


def test_frequencies_follow_a_popularity_that_changes():
    rng = np.random.default_rng(2)
    before, after = ([0.7, 0.2, 0.1], [0.1, 0.2, 0.7])
    batches = np.concatenate([rng.choice(3, (300, 32), p=before), rng.choice(3, (300, 32), p=after)])
    share_I = estimate(batches, items=3, rate=0.01).log_share(torch.arange(3)).exp()
    np.testing.assert_allclose(share_I, after, rtol=0.25)


def test_an_item_that_fills_every_batch_has_the_share_one_and_an_unseen_one_is_finite():
    frequency = estimate([[2] * 6] * 5, items=50, rate=0.01)
    assert frequency.log_share(torch.tensor([2, 9])).tolist() == pytest.approx([0.0, -np.log(50)])


def test_the_size_of_the_batches_does_not_change_a_share():
    # Every other row is item 0, in batches of 2 and then in batches of 10.
    frequency = estimate([[0, 1]] * 20 + [[0, 1] * 5] * 20, items=2, rate=0.05)
    assert frequency.log_share(torch.tensor([0, 1])).exp().tolist() == pytest.approx([0.5, 0.5])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=6), st.randoms(use_true_random=False))
def test_frequencies_are_the_mean_gap_of_a_plain_loop_whatever_the_order_in_a_batch(batches, random):
    rate = 0.1
    gap, weight, last = [6.0] * 6, [0.0] * 6, [-1] * 6
    for step, rows in enumerate(batches):
        for item in set(rows):
            times = rows.count(item)
            for _ in range(times):  # one occurrence after the other, evenly spaced
                total = gap[item] * weight[item] * (1 - rate) + rate * (step - last[item]) * len(rows) / times
                weight[item] = weight[item] * (1 - rate) + rate
                gap[item] = total / weight[item]
            last[item] = step
    shuffled = [random.sample(rows, len(rows)) for rows in batches]
    ordered, mixed = (
        estimate([torch.tensor(rows, dtype=torch.int64) for rows in order], items=6, rate=rate) for order in (batches, shuffled)
    )
    np.testing.assert_allclose(ordered.gap_I, gap, rtol=1e-5)
    np.testing.assert_allclose(mixed.gap_I, ordered.gap_I, rtol=1e-6)


def test_frequencies_continue_from_a_checkpoint():
    batches = np.random.default_rng(3).integers(0, 9, (40, 16))
    whole = estimate(batches, items=9, rate=0.02)
    resumed = StreamingFrequency(9, rate=0.02)
    resumed.load_state_dict(estimate(batches[:25], items=9, rate=0.02).state_dict())
    estimate(batches[25:], items=9, rate=0.02, frequency=resumed, first_step=25)
    assert torch.equal(whole.log_share(torch.arange(9)), resumed.log_share(torch.arange(9)))


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
