"""The watch over several runs: false alarms stay rare however long it watches, and a worse champion raises one soon."""

import numpy as np

from recsys_core.comparison.decision import e_value

NUM_SERIES, NUM_RUNS, NUM_CHANGED_USERS = 500, 60, 200
THRESHOLD = 20.0


def largest_products(win_rate: float) -> np.ndarray:
    """Return the largest product of e-values in each of many series of runs."""
    wins = np.random.default_rng(0).binomial(NUM_CHANGED_USERS, win_rate, size=(NUM_SERIES, NUM_RUNS))
    e_value_by_wins = {int(count): e_value(int(count), NUM_CHANGED_USERS - int(count)) for count in np.unique(wins)}
    products = np.cumprod(np.vectorize(e_value_by_wins.get)(wins), axis=1)
    return np.asarray(products.max(axis=1))


def test_an_equal_champion_raises_an_alarm_in_at_most_one_of_twenty_series() -> None:
    assert np.mean(largest_products(0.5) >= THRESHOLD) <= 1 / THRESHOLD + 0.01


def test_a_champion_that_loses_57_percent_of_the_changed_users_is_found() -> None:
    assert np.mean(largest_products(0.57) >= THRESHOLD) >= 0.95


def test_the_evidence_grows_with_the_users_that_are_better_off() -> None:
    evidence = [e_value(num_better, 100 - num_better) for num_better in range(101)]
    assert evidence == sorted(evidence)
