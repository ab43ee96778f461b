"""The contract of every rule: equal values are accepted, and a better version is never worse off."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from recsys_core.evaluation.config import Rule, RuleConfig

RULES: list[Rule] = [kind() for kind in get_args(RuleConfig) or (RuleConfig,)]
VALUES = arrays(np.float64, st.integers(1, 50), elements=st.floats(0, 1))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
@given(value_U=VALUES)
def test_equal_values_are_accepted(rule: Rule, value_U: np.ndarray) -> None:
    assert rule.compare(value_U, value_U, baseline="version 1").is_accepted


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
@given(baseline_U=VALUES, seed=st.integers(0, 2**32 - 1), gain=st.floats(0, 1))
def test_an_accepted_version_stays_accepted_with_larger_values(
    rule: Rule, baseline_U: np.ndarray, seed: int, gain: float
) -> None:
    new_U = np.random.default_rng(seed).random(len(baseline_U))
    if rule.compare(new_U, baseline_U, baseline="version 1").is_accepted:
        assert rule.compare(new_U + gain, baseline_U, baseline="version 1").is_accepted


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_a_version_without_a_hit_does_not_replace_a_good_one_and_the_reason_names_both_values(rule: Rule) -> None:
    comparison = rule.compare(np.zeros(1000), np.full(1000, 0.25), baseline="version 7")
    assert not comparison.is_accepted
    assert "0.0000" in comparison.reason and "0.2500" in comparison.reason and "version 7" in comparison.reason
