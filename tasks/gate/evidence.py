"""Evidence of the gate: comparisons of a new version with another version, with baselines, and with an exact search.

Shapes: U users.
"""

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from recsys_core.comparison.decision import Evidence
from recsys_core.comparison.rules import Comparison, Margin, Outcome, Rule
from recsys_core.evaluation.metrics import UserMetrics
from tasks.gate.sample import K, ServedMetrics
from tasks.gate.serving_loss import INDEX, PACKAGED, TRAINED
from tasks.registry.config import RegistryConfig


def version_evidence(
    config: RegistryConfig,
    new_metrics: ServedMetrics,
    other_metrics: ServedMetrics,
    *,
    baseline: str,
    spent_drop: float,
    min_users_by_slice: Mapping[str, int | None] = MappingProxyType({}),
) -> list[Evidence]:
    """Compare the new version with another version: first on `registry.metric`, then on the guardrails.

    Args:
        baseline: name of the other version.
        spent_drop: relative drop of the metric in earlier promotions. It is subtracted from the margin, so that many small
            drops together do not exceed the margin.
        min_users_by_slice: smallest number of users for which a feature slice is compared; None: `gate.min_users`.
    """
    rule = config.gate.with_margin(max(0.0, config.gate.max_relative_drop - spent_drop))
    evidence = [_compare(config.metric, rule, new_metrics.user_metrics, other_metrics.user_metrics, baseline=baseline)]
    evidence += _metric_guardrails(config, new_metrics, other_metrics, baseline=baseline, min_users_by_slice=min_users_by_slice)
    guardrails = config.guardrails
    if guardrails.max_coverage_drop < 1:
        evidence.append(
            _compare_coverage(new_metrics, other_metrics, baseline=baseline, max_relative_drop=guardrails.max_coverage_drop)
        )
    costs = (
        ("CPU ms per user", new_metrics.cpu_ms_per_user, other_metrics.cpu_ms_per_user),
        ("model size in MB", new_metrics.num_bytes / 1e6, other_metrics.num_bytes / 1e6),
    )
    return evidence + [
        _compare_costs(cost_name, new_cost, other_cost, baseline=baseline, max_increase=guardrails.max_cost_increase)
        for cost_name, new_cost, other_cost in costs
    ]


def _metric_guardrails(
    config: RegistryConfig,
    new_metrics: ServedMetrics,
    other_metrics: ServedMetrics,
    *,
    baseline: str,
    min_users_by_slice: Mapping[str, int | None],
) -> list[Evidence]:
    """Compare the metrics of `registry.guardrails.metrics` over all users, and `registry.metric` over the users of each slice.

    A slice by a feature is always compared, because the config names the feature. Any other slice is compared only if it has a
    user and `guardrails.slices` is set.
    """
    metric, guardrails = config.metric, config.guardrails
    guardrail_rule = partial(config.gate.for_guardrail, guardrails.max_relative_drop)
    metric_names = [name for name in guardrails.metrics if name != metric]
    rule_by_slice = {
        slice_name: guardrail_rule(min_users=min_users_by_slice.get(slice_name))
        for slice_name, slice_metrics in new_metrics.user_metrics_by_slice.items()
        if slice_name in min_users_by_slice or (guardrails.slices and len(slice_metrics.user_row_U))
    }
    # Only a slice with enough users can reject the version by chance.
    large_slices = [
        slice_name
        for slice_name, rule in rule_by_slice.items()
        if len(new_metrics.user_metrics_by_slice[slice_name].user_row_U) >= rule.min_users
    ]
    compare = partial(_compare, baseline=baseline, num_guardrails=max(1, len(metric_names) + len(large_slices)))
    metric_evidence = [
        compare(metric_name, guardrail_rule(), new_metrics.user_metrics, other_metrics.user_metrics)
        for metric_name in metric_names
    ]
    return metric_evidence + [
        compare(
            metric,
            rule,
            new_metrics.user_metrics_by_slice[slice_name],
            other_metrics.user_metrics_by_slice[slice_name],
            subject=f"{metric} of {slice_name}",
        )
        for slice_name, rule in rule_by_slice.items()
    ]


def serving_evidence(
    config: RegistryConfig, new_metrics: ServedMetrics, exact_metrics: Mapping[str, UserMetrics]
) -> list[Evidence]:
    """Compare the packaged query tower with the trained query tower, and the index with an exact search.

    Args:
        exact_metrics: result of `serving_loss.exact_metrics`.
    """
    if not exact_metrics:
        return []
    guardrails = config.guardrails
    index_rule, metric_rule = (
        config.gate.for_guardrail(max_loss) for max_loss in (guardrails.max_index_loss, guardrails.max_serving_loss)
    )
    trained_metrics, packaged_metrics = exact_metrics[TRAINED], exact_metrics[PACKAGED]
    serving_comparisons = (
        ("with the packaged query tower", packaged_metrics, trained_metrics, "the trained one"),
        ("with the index", new_metrics.user_metrics, packaged_metrics, "an exact search"),
    )
    ((recall_name, recall_U),) = exact_metrics[INDEX].value_U_by_metric.items()
    comparison = index_rule.compare(
        recall_U, np.ones(len(recall_U)), baseline="an exact search", num_comparisons=len(serving_comparisons)
    )
    index_evidence = Evidence(
        subject=f"{recall_name} of the index", baseline="an exact search", is_guardrail=True, comparison=comparison
    )
    return [index_evidence] + [
        _compare(
            config.metric,
            metric_rule,
            measured_metrics,
            reference_metrics,
            baseline=baseline,
            subject=f"{config.metric} {subject}",
            num_guardrails=len(serving_comparisons),
        )
        for subject, measured_metrics, reference_metrics, baseline in serving_comparisons
    ]


def baseline_evidence(
    config: RegistryConfig, new_metrics: ServedMetrics, metrics_by_baseline: Mapping[str, UserMetrics]
) -> list[Evidence]:
    """Compare the new version, which must be better, with each baseline in `registry.baselines`."""
    rule = config.gate.for_baseline()
    return [
        _compare(config.metric, rule, new_metrics.user_metrics, metrics_by_baseline[name], baseline=name.replace("_", "-"))
        for name in config.baselines
        if name in metrics_by_baseline
    ]


def _compare(
    metric: str,
    rule: Rule,
    new_metrics: UserMetrics,
    other_metrics: UserMetrics,
    *,
    baseline: str,
    subject: str = "",
    num_guardrails: int = 0,
) -> Evidence:
    """Apply the rule to the users that `new_metrics` and `other_metrics` share.

    Args:
        num_guardrails: number of guardrails that are compared together; 0 for a main comparison.
    """
    new_value_U = new_metrics.common_with(other_metrics).value_U_by_metric[metric]
    other_value_U = other_metrics.common_with(new_metrics).value_U_by_metric[metric]
    comparison = rule.compare(new_value_U, other_value_U, baseline=baseline, num_comparisons=max(1, num_guardrails))
    return Evidence(subject=subject or metric, baseline=baseline, is_guardrail=bool(num_guardrails), comparison=comparison)


def _compare_coverage(
    new_metrics: ServedMetrics, other_metrics: ServedMetrics, *, baseline: str, max_relative_drop: float
) -> Evidence:
    rule = Margin(max_relative_drop=max_relative_drop)
    comparison = rule.compare(np.array([new_metrics.coverage]), np.array([other_metrics.coverage]), baseline=baseline)
    num_users = len(new_metrics.user_metrics.user_row_U)
    comparison = comparison.model_copy(update={"num_users": num_users, "num_better_users": 0, "num_worse_users": 0})
    return Evidence(subject=f"coverage@{K}", baseline=baseline, is_guardrail=True, comparison=comparison)


def _compare_costs(cost_name: str, new_cost: float, other_cost: float, *, baseline: str, max_increase: float) -> Evidence:
    """Accept the new cost if it is at most `1 + max_increase` times the other cost. A cost that was not measured is NaN."""
    max_ratio = 1 + max_increase
    outcome: Outcome = "accepted" if new_cost <= max_ratio * other_cost else "rejected"
    relation = f"at most {max_ratio:g}" if outcome == "accepted" else f"more than {max_ratio:g}"
    reason = f"{new_cost:.3g}, {relation} times the {other_cost:.3g} of {baseline}"
    if math.isnan(new_cost + other_cost):
        outcome, reason = "not_enough_data", f"not compared with {baseline}: too few users to measure it"
        new_cost = other_cost = 0.0
    comparison = Comparison(
        outcome=outcome,
        reason=reason,
        num_users=0,
        new_mean=new_cost,
        baseline_mean=other_cost,
        num_better_users=0,
        num_worse_users=0,
    )
    return Evidence(subject=cost_name, baseline=baseline, is_guardrail=True, comparison=comparison)
