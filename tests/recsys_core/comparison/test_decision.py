"""The evidence over many runs: an equal champion rarely causes an alarm, and a worse champion nearly always does."""

import numpy as np

from recsys_core.comparison.decision import ALARM_E_VALUE, e_value

NUM_SERIES, NUM_RUNS, NUM_CHANGED_USERS = 500, 60, 200


def largest_products(win_rate: float) -> np.ndarray:
    """Return the largest product of e-values that each series of runs reaches.

    win_rate: probability that a user with a changed value is better off with the new version than with the champion.
    """
    num_wins = np.random.default_rng(0).binomial(NUM_CHANGED_USERS, win_rate, size=(NUM_SERIES, NUM_RUNS))
    e_value_by_num_wins = {int(count): e_value(int(count), NUM_CHANGED_USERS - int(count)) for count in np.unique(num_wins)}
    products = np.cumprod(np.vectorize(e_value_by_num_wins.get)(num_wins), axis=1)
    return np.asarray(products.max(axis=1))


def test_an_equal_champion_raises_an_alarm_in_at_most_one_of_twenty_series() -> None:
    assert np.mean(largest_products(0.5) >= ALARM_E_VALUE) <= 1 / ALARM_E_VALUE + 0.01


def test_a_champion_that_keeps_losing_raises_an_alarm_in_most_series() -> None:
    assert np.mean(largest_products(0.57) >= ALARM_E_VALUE) >= 0.95


def test_the_evidence_grows_with_the_users_that_are_better_off() -> None:
    e_values = [e_value(num_better, 100 - num_better) for num_better in range(101)]
    assert e_values == sorted(e_values)
