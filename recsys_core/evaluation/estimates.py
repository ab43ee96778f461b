"""Metrics of a ranking as means over the users with confidence intervals.

Shapes: B queries, U users with a target, T (query, target) pairs.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation import metrics
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.diversity import known_negative_share
from recsys_core.evaluation.metrics import Floats, TargetPositions
from recsys_core.evaluation.ranking.queries import Ranking
from recsys_core.evaluation.slices import Masks
from recsys_core.manifests import SliceReport


class Estimate(NamedTuple):
    """A metric. half_width: half the width of its confidence interval, None if it is no mean over the users."""

    value: float
    half_width: float | None = None


Estimates = dict[str, Estimate]


def mean_estimate(value_U: Floats, *, confidence: float) -> Estimate:
    """Return the mean over the users for whom the metric is not NaN, and its normal confidence interval.

    >>> mean = mean_estimate(np.array([0.0, 1.0, 0.0, 1.0]), confidence=0.95)
    >>> round(mean.value, 2), round(mean.half_width, 3)  # 1.96 * sqrt((4 * 0.25 / 3) / 4)
    (0.5, 0.566)
    """
    defined_value_U = value_U[~np.isnan(value_U)]
    num_users = len(defined_value_U)
    if num_users < 2:
        return Estimate(float(defined_value_U[0]) if num_users else math.nan)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    half_width = z * float(defined_value_U.std(ddof=1)) / math.sqrt(num_users)
    return Estimate(float(defined_value_U.mean()), half_width)


def accuracy(
    targets: TargetPositions, *, config: EvaluationConfig, names: Sequence[str] = (), ks: Sequence[int] | None = None
) -> Estimates:
    """Return the metrics at each cut-off, by <metric>@<k>.

    names: names of `evaluation.metrics`; empty means all in the config. ks: cut-offs; None means the cut-offs of the config.
    """
    return {
        f"{name}@{k}": mean_estimate(metrics.METRIC_BY_NAME[name](targets, k=k), confidence=config.confidence)
        for k in (config.ks if ks is None else ks)
        for name in config.metrics
        if name in metrics.METRIC_BY_NAME and name in (names or config.metrics)
    }


def full_ranking_metrics(
    ranking: Ranking, *, config: EvaluationConfig, known_negatives: JaggedArray | None = None
) -> Estimates:
    """Return all metrics of a ranking of the catalogue. Undefined metrics are left out.

    known_negatives: item rows that the user of each query has rejected before the split; None if the log has no such items.
    """
    targets = ranking.target_positions()
    estimates = {
        "users": Estimate(targets.num_users),
        "targets": Estimate(len(targets.position_T)),
        "seen_targets": Estimate(ranking.num_seen_targets),
    }
    estimates |= accuracy(targets, config=config)
    for k in config.ks:
        estimates[f"coverage@{k}"] = Estimate(metrics.coverage(ranking.top_BK, k=k, num_items=ranking.num_items))
    if known_negatives is not None:
        measure = partial(known_negative_share, ranking.top_BK, known_negatives=known_negatives, num_items=ranking.num_items)
        estimates |= {f"known_negatives@{k}": mean_estimate(measure(k=k), confidence=config.confidence) for k in config.ks}
    if "auc" in config.metrics:
        estimates["mrr"] = mean_estimate(metrics.reciprocal_rank(targets), confidence=config.confidence)
        estimates["auc"] = mean_estimate(metrics.auc(targets), confidence=config.confidence)
        estimates["gauc"] = Estimate(metrics.grouped_auc(targets))
    return {name: estimate for name, estimate in estimates.items() if not math.isnan(estimate.value)}


def cold_metrics(ranking: Ranking, *, config: EvaluationConfig) -> Estimates:
    """Return the metrics of cold items ranked among cold items; empty if no user has a cold target."""
    if not len(ranking.position_T):
        return {}
    targets = ranking.target_positions()
    cut_offs = [k for k in config.ks if k < ranking.num_items]  # with a larger cut-off, every item is among the first k
    counts = {"users": Estimate(targets.num_users), "items": Estimate(ranking.num_items)}
    return accuracy(targets, config=config, names=("recall", "ndcg", "hit_rate"), ks=cut_offs) | counts


def slice_reports(
    ranking: Ranking, mask_T_by_slice: Masks, *, config: EvaluationConfig, min_users: int
) -> tuple[SliceReport, ...]:
    """Return the metrics over subsets of the targets, from the positions of the targets in the full ranking."""
    reports = []
    for slice_name, mask_T in mask_T_by_slice.items():
        targets = ranking.target_positions(mask_T)
        has_enough_users = targets.num_users >= min_users
        estimates = accuracy(targets, config=config, names=("recall", "ndcg")) if has_enough_users else {}
        reports.append(
            SliceReport(
                name=slice_name,
                num_users=targets.num_users,
                num_targets=len(targets.position_T),
                min_users=min_users,
                metrics={name: estimate.value for name, estimate in estimates.items()},
                half_widths=half_widths(estimates),
            )
        )
    return tuple(reports)


def prefixed(prefix: str, estimates: Mapping[str, Estimate]) -> Estimates:
    """Return the metrics under <prefix>/<metric>."""
    return {f"{prefix}/{name}": estimate for name, estimate in estimates.items()}


def half_widths(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return the half widths of the intervals, for the metrics that have one."""
    return {name: estimate.half_width for name, estimate in estimates.items() if estimate.half_width is not None}
