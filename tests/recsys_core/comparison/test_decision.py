"""Verdicts about a version, and alarms about a champion over many runs."""

from typing import get_args

import numpy as np
import pytest

from recsys_core.comparison.decision import ALARM_E_VALUE, Evidence, Verdict, decide, e_value, missing_evidence
from recsys_core.comparison.rules import Comparison, Outcome

NUM_SERIES, NUM_RUNS, NUM_DIFFERING_USERS = 500, 60, 200


def evidence_of(subject: str, outcome: Outcome, *, is_guardrail: bool = False) -> Evidence:
    comparison = Comparison(
        outcome=outcome, reason="0.5", num_users=1, new_mean=0.5, baseline_mean=0.5, num_better_users=0, num_worse_users=0
    )
    return Evidence(subject=subject, baseline="version 1", is_guardrail=is_guardrail, comparison=comparison)


ACCEPTED, REJECTED, NOT_ENOUGH_DATA = (evidence_of(outcome, outcome) for outcome in get_args(Outcome))
ACCEPTED_GUARDRAIL, REJECTED_GUARDRAIL, NOT_ENOUGH_DATA_GUARDRAIL = (
    evidence_of(f"guardrail {outcome}", outcome, is_guardrail=True) for outcome in get_args(Outcome)
)


@pytest.mark.parametrize(
    ("evidence", "verdict", "reasons"),
    [
        ([ACCEPTED, ACCEPTED_GUARDRAIL], "promoted", ["accepted is 0.5"]),
        ([ACCEPTED, NOT_ENOUGH_DATA_GUARDRAIL], "promoted", ["accepted is 0.5"]),
        ([ACCEPTED, NOT_ENOUGH_DATA], "not_enough_data", ["not_enough_data is 0.5"]),
        ([ACCEPTED, REJECTED_GUARDRAIL], "not_promoted", ["guardrail rejected is 0.5"]),
        ([NOT_ENOUGH_DATA, REJECTED_GUARDRAIL], "not_promoted", ["guardrail rejected is 0.5"]),
        ([NOT_ENOUGH_DATA, REJECTED_GUARDRAIL, REJECTED], "not_promoted", ["rejected is 0.5"]),
    ],
)
def test_a_rejection_takes_precedence_over_missing_data_and_guardrails_can_only_prevent_a_promotion(
    evidence: list[Evidence], verdict: Verdict, reasons: list[str]
) -> None:
    assert decide(evidence) == (verdict, tuple(reasons))


def test_the_guardrails_with_too_few_users_are_named() -> None:
    assert missing_evidence([NOT_ENOUGH_DATA, ACCEPTED_GUARDRAIL, REJECTED_GUARDRAIL]) == ()
    assert missing_evidence([ACCEPTED, ACCEPTED_GUARDRAIL, NOT_ENOUGH_DATA_GUARDRAIL]) == (
        "not enough data for 1 of 2 guardrails: guardrail not_enough_data",
    )


def largest_products(win_rate: float) -> np.ndarray:
    """Return the largest product of e-values that each series of runs reaches.

    win_rate: probability that the new version is better for a user whose metric differs from that with the champion.
    """
    num_wins = np.random.default_rng(0).binomial(NUM_DIFFERING_USERS, win_rate, size=(NUM_SERIES, NUM_RUNS))
    e_value_by_num_wins = {
        int(win_count): e_value(int(win_count), NUM_DIFFERING_USERS - int(win_count)) for win_count in np.unique(num_wins)
    }
    products = np.cumprod(np.vectorize(e_value_by_num_wins.get)(num_wins), axis=1)
    return np.asarray(products.max(axis=1))


def test_an_equal_champion_raises_an_alarm_in_at_most_one_of_twenty_series() -> None:
    assert np.mean(largest_products(0.5) >= ALARM_E_VALUE) <= 1 / ALARM_E_VALUE + 0.01


def test_a_champion_that_keeps_losing_raises_an_alarm_in_most_series() -> None:
    assert np.mean(largest_products(0.57) >= ALARM_E_VALUE) >= 0.95


def test_the_e_value_grows_with_the_number_of_users_that_are_better_off() -> None:
    e_values = [e_value(num_better, 100 - num_better) for num_better in range(101)]
    assert e_values == sorted(e_values)
