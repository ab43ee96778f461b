"""Ranking metrics from the exact positions of the targets. Each function returns one value per user, for paired comparisons.

NDCG (Järvelin and Kekäläinen, TOIS 2002) has binary gains and the discount 1 / log2(1 + n) at the n-th item. This discount,
precision, recall and average precision follow Manning, Raghavan and Schütze, Introduction to Information Retrieval (2008),
chapter 8.

In this example, the first user has 6 candidates and targets at the positions 0 and 2. The second user has 4 candidates, and the
target is the last of them.

>>> targets = TargetPositions.from_pairs(
...     user_T=np.array([0, 0, 1]), position_T=np.array([0, 2, 3]), num_candidates_B=np.array([6, 4])
... )
>>> recall(targets, k=2).tolist(), hit_rate(targets, k=3).tolist()
([0.5, 0.0], [1.0, 0.0])
>>> precision(targets, k=4).tolist()
[0.5, 0.25]
>>> ndcg(targets, k=4).round(4).tolist()  # (1/log2(2) + 1/log2(4)) / (1/log2(2) + 1/log2(3)), and 1/log2(5)
[0.9197, 0.4307]
>>> reciprocal_rank(targets).tolist()
[1.0, 0.25]
>>> reciprocal_rank(targets, k=3).tolist()
[1.0, 0.0]
>>> average_precision(targets, k=4).round(4).tolist()  # (1/1 + 2/3) / 2, and 1/4
[0.8333, 0.25]
>>> auc(targets).tolist()  # of 4 non-targets, 4 and 3 are below the targets of the first user: (4/4 + 3/4) / 2
[0.875, 0.0]

Shapes: B queries, U users with at least one target, T (user, target) pairs, K cut-off.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

Floats = NDArray[np.float64]
USER_METRICS_FILE = "user_metrics.parquet"


@dataclass(frozen=True)
class TargetPositions:
    """Position of each target in the ranking of its user.

    Attributes:
        position_T: int64, 0 for the best item, ascending within a user.
        user_T: int64, 0 to U - 1, ascending.
        original_user_U: int64, number of the user in the argument `user_T` of `from_pairs`, ascending.
        num_candidates_U: int64, number of ranked items.
        num_targets_U: int64, at least 1.
    """

    position_T: NDArray[np.int64]
    user_T: NDArray[np.int64]
    original_user_U: NDArray[np.int64]
    num_candidates_U: NDArray[np.int64]
    num_targets_U: NDArray[np.int64]

    @classmethod
    def from_pairs(cls, *, user_T: NDArray[Any], position_T: NDArray[Any], num_candidates_B: NDArray[Any]) -> Self:
        """Build from (user, target) pairs in any order. Users without a pair are dropped, and the other users are renumbered.

        >>> TargetPositions.from_pairs(
        ...     user_T=np.array([5, 2, 5]), position_T=np.array([3, 0, 1]), num_candidates_B=np.full(6, 4)
        ... ).position_T
        array([0, 1, 3])
        """
        order_T = np.lexsort((position_T, user_T))
        user_U, renumbered_user_T, num_targets_U = np.unique(user_T[order_T], return_inverse=True, return_counts=True)
        return cls(
            position_T=position_T[order_T].astype(np.int64),
            user_T=renumbered_user_T.astype(np.int64),
            original_user_U=user_U.astype(np.int64),
            num_candidates_U=num_candidates_B[user_U].astype(np.int64),
            num_targets_U=num_targets_U,
        )

    @property
    def num_users(self) -> int:
        """Number of users with a target."""
        return len(self.num_targets_U)

    @property
    def first_target_index_U(self) -> NDArray[np.int64]:
        """Index of each user's best-ranked target in position_T."""
        return np.concatenate([[0], np.cumsum(self.num_targets_U)[:-1]]).astype(np.int64)

    @property
    def num_targets_above_T(self) -> NDArray[np.int64]:
        """For each target, the number of targets of the same user that are ranked above it."""
        return np.arange(len(self.position_T)) - np.repeat(self.first_target_index_U, self.num_targets_U)

    def sum_per_user(self, value_T: NDArray[Any]) -> Floats:
        """Sum the values of each user's targets, [U]."""
        return np.bincount(self.user_T, weights=value_T, minlength=self.num_users).astype(np.float64)


def num_hits(targets: TargetPositions, *, k: int) -> Floats:
    """Return the number of targets among the first k items, [U]."""
    return targets.sum_per_user(targets.position_T < k)


def recall(targets: TargetPositions, *, k: int) -> Floats:
    """Return the share of each user's targets that are among the first k items, [U]."""
    return num_hits(targets, k=k) / targets.num_targets_U


def precision(targets: TargetPositions, *, k: int) -> Floats:
    """Return the share of targets among the first k items, [U]. The denominator is k even if fewer items are ranked."""
    return num_hits(targets, k=k) / k


def hit_rate(targets: TargetPositions, *, k: int) -> Floats:
    """Return 1 for a user with a target among the first k items, otherwise 0, [U]."""
    return (num_hits(targets, k=k) > 0).astype(np.float64)


def ndcg(targets: TargetPositions, *, k: int) -> Floats:
    """Return the discounted gain of the first k items divided by the gain of the ideal order, [U]. Gains are 0 or 1.

    The ideal order has min(k, number of targets) targets at the top.
    """
    gain_T: Floats = np.where(targets.position_T < k, 1 / np.log2(targets.position_T + 2.0), 0.0)
    ideal_gain_K: Floats = np.cumsum(1 / np.log2(np.arange(k) + 2.0))
    ideal_gain_U: Floats = ideal_gain_K[np.minimum(targets.num_targets_U, k) - 1]
    return targets.sum_per_user(gain_T) / ideal_gain_U


def reciprocal_rank(targets: TargetPositions, *, k: int | None = None) -> Floats:
    """Return 1 / (1-based position of the best-ranked target), or 0 if it is not among the first k items, [U].

    The mean over users is the MRR, or MRR@k (Voorhees, TREC-8 1999).
    """
    best_position_U = targets.position_T[targets.first_target_index_U]
    reciprocal_U: Floats = 1 / (best_position_U + 1)
    return reciprocal_U if k is None else np.where(best_position_U < k, reciprocal_U, 0.0)


def average_precision(targets: TargetPositions, *, k: int) -> Floats:
    """Return the sum of the precisions at each target among the first k items, divided by min(k, number of targets), [U].

    The mean over users is the MAP@k.
    """
    precision_T = (targets.num_targets_above_T + 1) / (targets.position_T + 1)
    return targets.sum_per_user(np.where(targets.position_T < k, precision_T, 0.0)) / np.minimum(targets.num_targets_U, k)


def auc(targets: TargetPositions) -> Floats:
    """Return the share of the non-targets that are ranked below a target, averaged over the targets, [U].

    The AUC of a user without non-targets is NaN.
    """
    num_non_targets_U = (targets.num_candidates_U - targets.num_targets_U).astype(np.float64)
    num_non_targets_above_U = targets.sum_per_user(targets.position_T - targets.num_targets_above_T)
    with np.errstate(invalid="ignore"):
        return 1.0 - num_non_targets_above_U / targets.num_targets_U / num_non_targets_U


def weighted_mean(value_U: Floats, *, weight_U: NDArray[np.int64]) -> float:
    """Return the weighted mean of the values that are not NaN; NaN if all values are NaN.

    The mean of the AUC, weighted by the numbers of targets, is the grouped AUC (Zhu et al., KDD 2017).
    """
    is_defined_U = ~np.isnan(value_U)
    defined_weight_U = weight_U[is_defined_U]
    return float(np.average(value_U[is_defined_U], weights=defined_weight_U)) if len(defined_weight_U) else float("nan")


METRIC_BY_NAME: Mapping[str, Callable[..., Floats]] = {
    "recall": recall,
    "ndcg": ndcg,
    "precision": precision,
    "hit_rate": hit_rate,
    "map": average_precision,
    "mrr": reciprocal_rank,
}
"""The metrics at a cut-off K, by their names in `evaluation.metrics`. Their means over the users are reported."""


COMPARED_METRICS: Mapping[str, tuple[Callable[..., Floats], int]] = {
    "recall@20": (recall, 20),
    "hit_rate@10": (hit_rate, 10),
    "ndcg@20": (ndcg, 20),
}
"""The metrics by which served versions and baselines are compared user by user."""


@dataclass(frozen=True)
class UserMetrics:
    """One value per metric and user.

    Attributes:
        user_row_U: int64, rows of the users, ascending.
        value_U_by_metric: values of the users by name of the metric, such as recall@20.

    >>> UserMetrics(np.arange(3), {"recall@20": np.array([0.0, 0.5, 1.0])}).means("served")
    {'served/recall@20': 0.5}
    """

    user_row_U: NDArray[np.int64]
    value_U_by_metric: Mapping[str, Floats]

    @classmethod
    def of(cls, targets: TargetPositions, *, user_row_B: NDArray[Any]) -> Self:
        """Compute COMPARED_METRICS. user_row_B: rows of all users, ascending, indexed by `targets.original_user_U`."""
        value_U_by_metric = {name: metric(targets, k=k) for name, (metric, k) in COMPARED_METRICS.items()}
        return cls(user_row_B[targets.original_user_U].astype(np.int64), value_U_by_metric)

    def means(self, ranker: str) -> dict[str, float]:
        """Return the mean of each metric over the users, by <ranker>/<metric>."""
        return {f"{ranker}/{metric}": float(value_U.mean()) for metric, value_U in self.value_U_by_metric.items()}

    def common_with(self, other: "UserMetrics") -> Self:
        """Return the metrics of the users that are also in `other`.

        >>> first = UserMetrics(np.array([2, 5, 7]), {"mrr": np.array([0.1, 0.2, 0.3])})
        >>> first.common_with(UserMetrics(np.array([5, 9]), {})).value_U_by_metric["mrr"].tolist()
        [0.2]
        """
        is_common_U = np.isin(self.user_row_U, other.user_row_U, assume_unique=True)
        value_U_by_metric = {metric: value_U[is_common_U] for metric, value_U in self.value_U_by_metric.items()}
        return type(self)(self.user_row_U[is_common_U], value_U_by_metric)


def write_user_metrics(metrics_by_ranker: Mapping[str, UserMetrics], path: Path) -> None:
    """Write the metrics of rankers with the same users: the column user_row, and one column <ranker>/<metric> per metric."""
    columns: dict[str, NDArray[Any]] = {}
    for ranker, metrics in metrics_by_ranker.items():
        columns["user_row"] = metrics.user_row_U
        columns |= {f"{ranker}/{metric}": value_U for metric, value_U in metrics.value_U_by_metric.items()}
    pq.write_table(pa.table(columns), path)


def read_user_metrics(path: Path, *, user_rows: NDArray[np.int64] | None = None) -> dict[str, UserMetrics]:
    """Read the metrics by ranker from a file of `write_user_metrics`.

    user_rows: rows of the users to read; None for all users. Memory grows with the number of these users.
    """
    table = pq.read_table(path, filters=None if user_rows is None else pc.field("user_row").isin(user_rows))
    user_row_U = table["user_row"].to_numpy()
    value_U_by_ranker_and_metric: dict[str, dict[str, Floats]] = {}
    for column in table.column_names[1:]:
        ranker, _, metric = column.rpartition("/")
        value_U_by_ranker_and_metric.setdefault(ranker, {})[metric] = table[column].to_numpy()
    return {
        ranker: UserMetrics(user_row_U, value_U_by_metric) for ranker, value_U_by_metric in value_U_by_ranker_and_metric.items()
    }


POSITIONS_FILE = "positions.parquet"


def write_positions(
    position_T_by_ranker: Mapping[str, NDArray[np.int64]],
    *,
    user_row_T: NDArray[np.int64],
    num_candidates_T: NDArray[np.int64],
    path: Path,
) -> None:
    """Write the positions of the targets in several rankings. Every metric of a user can be computed from these positions.

    The columns are user_row, num_candidates, and one column of positions (0 is the best item) for each ranker.
    """
    pq.write_table(pa.table({"user_row": user_row_T, "num_candidates": num_candidates_T, **position_T_by_ranker}), path)


def read_positions(path: Path) -> dict[str, TargetPositions]:
    """Read a file of `write_positions`: the positions by ranker. Users are numbered by their rows."""
    table = pq.read_table(path)
    user_row_T, num_candidates_T = table["user_row"].to_numpy(), table["num_candidates"].to_numpy()
    num_candidates_B = np.zeros(int(user_row_T.max(initial=-1)) + 1, np.int64)
    num_candidates_B[user_row_T] = num_candidates_T
    return {
        ranker: TargetPositions.from_pairs(
            user_T=user_row_T, position_T=table[ranker].to_numpy(), num_candidates_B=num_candidates_B
        )
        for ranker in table.column_names[2:]
    }
