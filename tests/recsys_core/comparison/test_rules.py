"""Properties that every rule of the comparison has, and the error rates of the bootstrap over simulated runs."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.gate import outcome_rates
from recsys_core.comparison.bootstrap import resample_means
from recsys_core.comparison.rules import MIN_MARGIN, Margin, Outcome, PairedBootstrap, Rule, RuleConfig

RULES: list[Rule] = [rule_class() for rule_class in get_args(get_args(RuleConfig)[0])]
FAST_RULES: list[Rule] = [
    rule.model_copy(update={"num_resamples": 200, "min_users": 2}) if isinstance(rule, PairedBootstrap) else rule
    for rule in RULES
]
"""The rules with fewer resamples, for property tests."""
user_values = arrays(np.float64, st.integers(2, 50), elements=st.floats(0.125, 1))

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
every_fast_rule = pytest.mark.parametrize("rule", FAST_RULES, ids=lambda rule: rule.kind)


@every_fast_rule
@given(value_U=user_values)
def test_equal_values_are_accepted(rule: Rule, value_U: np.ndarray) -> None:
    assert rule.compare(value_U, value_U, baseline="version 1").is_accepted


@every_fast_rule
@given(baseline_U=user_values, seed=st.integers(0, 2**32 - 1), gain=st.floats(0, 1))
def test_an_accepted_version_is_also_accepted_with_larger_values(
    rule: Rule, baseline_U: np.ndarray, seed: int, gain: float
) -> None:
    new_U = np.random.default_rng(seed).random(len(baseline_U))
    if rule.compare(new_U, baseline_U, baseline="version 1").is_accepted:
        assert rule.compare(new_U + gain, baseline_U, baseline="version 1").is_accepted


@every_rule
def test_a_version_without_a_hit_is_rejected_and_the_reason_has_both_values(rule: Rule) -> None:
    comparison = rule.compare(np.zeros(1000), np.full(1000, 0.25), baseline="version 7")
    assert comparison.outcome == "rejected"
    assert "0.0000" in comparison.reason and "0.2500" in comparison.reason and "version 7" in comparison.reason


def test_a_baseline_with_very_few_hits_gives_a_difference_without_an_upper_bound() -> None:
    rule, new_U, baseline_U = PairedBootstrap(num_resamples=1000), np.zeros(500), np.zeros(500)
    new_U[5:10], baseline_U[:2] = 1, 1  # in 13 % of the resamples, the baseline has no hit
    comparison = rule.for_guardrail(0.15).compare(new_U, baseline_U, baseline="version 3")
    assert comparison.interval is None and comparison.absolute_interval is not None
    assert comparison.reason.startswith("0.0100, +150.0 % (-33.3 % or more) from the 0.0040 of version 3 (margin -15 %; users")
    baseline_U[:8] = 1  # in 0.03 % of the resamples
    assert rule.for_guardrail(0.15).compare(new_U, baseline_U, baseline="version 3").interval is not None


def test_a_baseline_without_a_hit_gives_an_absolute_difference() -> None:
    comparison = PairedBootstrap(num_resamples=500).compare(np.tile([0.0, 0.1], 250), np.zeros(500), baseline="version 3")
    assert comparison.reason == "0.0500, +0.0500 from the 0.0000 of version 3 (margin -5 %; users +250 / -0)"


@every_rule
def test_a_margin_is_wider_for_guardrails_and_absent_for_baselines(rule: Rule) -> None:
    baseline_U = np.tile([0.0, 0.2, 0.4], 1_000)
    new_U = baseline_U * 0.9
    assert not rule.compare(new_U, baseline_U, baseline="version 1").is_accepted
    assert rule.with_margin(0.2).compare(new_U, baseline_U, baseline="version 1").is_accepted
    assert rule.for_guardrail(0.2).compare(new_U, baseline_U, baseline="version 1").is_accepted
    assert not rule.for_baseline().compare(new_U, baseline_U, baseline="popularity").is_accepted
    assert rule.for_baseline().compare(baseline_U * 1.1, baseline_U, baseline="popularity").is_accepted


def test_a_drop_of_exactly_the_margin_is_accepted_by_the_rule_without_a_test_of_significance() -> None:
    rule = Margin(max_relative_drop=0.5)
    assert rule.compare(np.full(10, 0.25), np.full(10, 0.5), baseline="version 1").outcome == "accepted"
    assert rule.compare(np.full(10, 0.2499), np.full(10, 0.5), baseline="version 1").outcome == "rejected"


@every_rule
def test_a_guardrail_has_its_own_minimum_of_users_or_the_minimum_of_the_rule(rule: Rule) -> None:
    value_U = np.tile([0.0, 0.5], 150)
    assert rule.for_guardrail(0.2).min_users == rule.min_users
    assert rule.for_guardrail(0.2, min_users=300).compare(value_U, value_U, baseline="version 1").is_accepted
    comparison = rule.for_guardrail(0.2, min_users=301).compare(value_U, value_U, baseline="version 1")
    assert (comparison.outcome, comparison.num_needed_users) == ("not_enough_data", 301)


def test_a_margin_of_0_becomes_the_smallest_margin_of_a_bootstrap() -> None:
    rule = PairedBootstrap(num_resamples=500)
    assert rule.with_margin(0).max_relative_drop == rule.for_guardrail(0).max_relative_drop == MIN_MARGIN
    comparison = rule.with_margin(0).compare(np.tile([0.0, 1.0], 150), np.tile([1.0, 0.0], 150), baseline="version 1")
    assert comparison.outcome == "not_enough_data" and comparison.num_needed_users is not None


def test_several_comparisons_need_more_users_and_reject_fewer_versions() -> None:
    baseline_U = np.tile([0.0, 1.0], 200)
    new_U = baseline_U.copy()
    new_U[:40:2], new_U[1:80:2] = 1, 0  # 20 users are better, and 40 users are worse
    rule = PairedBootstrap(num_resamples=1000)
    only_comparison, one_of_twenty_comparisons = (
        rule.compare(new_U, baseline_U, baseline="version 1", num_comparisons=num_comparisons) for num_comparisons in (1, 20)
    )
    for comparison in (only_comparison, one_of_twenty_comparisons):
        assert (comparison.num_better_users, comparison.num_worse_users) == (20, 40)
    assert (only_comparison.outcome, one_of_twenty_comparisons.outcome) == ("rejected", "not_enough_data")
    assert only_comparison.detectable_drop is not None and one_of_twenty_comparisons.detectable_drop is not None
    assert one_of_twenty_comparisons.detectable_drop > 1.2 * only_comparison.detectable_drop
    assert only_comparison.absolute_interval is not None and only_comparison.interval is not None
    for (low, high), difference in ((only_comparison.absolute_interval, -0.05), (only_comparison.interval, -0.1)):
        assert low < difference < high < 0


def test_a_rule_that_requires_a_better_version_does_not_require_better_guardrails() -> None:
    baseline_U = np.tile([0.0, 0.2, 0.4], 1_000)
    rule = PairedBootstrap(must_be_better=True, num_resamples=500)
    assert not rule.compare(baseline_U, baseline_U, baseline="version 1").is_accepted
    assert rule.for_guardrail(0.1).compare(baseline_U, baseline_U, baseline="version 1").is_accepted


@pytest.mark.parametrize(
    ("new_U", "baseline_U", "reason"),
    [
        (np.ones(8), np.zeros(8), "8 test users, but the gate needs at least 200"),
        (np.zeros(1000), np.zeros(1000), "neither has a hit for any of 1,000 test users"),
        (
            np.tile([0.0, 1.0], 150),
            np.tile([1.0, 0.0], 150),
            "300 test users are too few for this margin, which needs about 9,436",
        ),
    ],
)
def test_too_few_users_or_hits_are_no_evidence(new_U: np.ndarray, baseline_U: np.ndarray, reason: str) -> None:
    comparison = PairedBootstrap().compare(new_U, baseline_U, baseline="version 1")
    assert (comparison.outcome, comparison.is_accepted) == ("not_enough_data", False)
    assert reason in comparison.reason


@pytest.mark.parametrize(
    ("relative_drop", "num_users", "num_runs", "min_rate_by_outcome"),
    [
        (0.05, 5_000, 300, {}),  # exactly the margin
        (0.10, 5_000, 100, {"rejected": 0.90}),
        (0.0, 20_000, 100, {"accepted": 0.95}),
    ],
)
def test_few_worse_versions_are_accepted_over_many_simulated_runs(
    relative_drop: float, num_users: int, num_runs: int, min_rate_by_outcome: dict[Outcome, float]
) -> None:
    rule = PairedBootstrap(num_resamples=200)
    rate_by_outcome = outcome_rates(rule, relative_drop=relative_drop, num_users=num_users, num_runs=num_runs)
    if relative_drop >= 0.05:  # the error rate is 5 %, and three standard deviations are allowed
        assert rate_by_outcome["accepted"] <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / num_runs)
    for outcome, min_rate in min_rate_by_outcome.items():
        assert rate_by_outcome[outcome] >= min_rate, rate_by_outcome


def test_the_means_of_resamples_have_the_standard_error_and_covariance_of_the_mean() -> None:
    value_UM = np.random.default_rng(1).normal(size=(400, 2))
    mean_RM = resample_means(value_UM, num_resamples=4_000)
    np.testing.assert_allclose(mean_RM.mean(axis=0), value_UM.mean(axis=0), atol=0.01)
    np.testing.assert_allclose(mean_RM.std(axis=0), value_UM.std(axis=0) / 20, rtol=0.05)
    np.testing.assert_allclose(np.cov(mean_RM.T)[0, 1], np.cov(value_UM.T)[0, 1] / 400, atol=2e-4)
    np.testing.assert_array_equal(mean_RM, resample_means(value_UM, num_resamples=4_000))
