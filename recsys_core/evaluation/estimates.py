"""Metrics of a ranking, averaged over users, with confidence intervals. They are computed in chunks of users.

Shapes: B queries, U users with a target, T (query, target) pairs, I items, K length of the top list, L items of all top lists
or of all histories, R pretrained vectors, D width of a pretrained vector.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation import diversity, metrics
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.metrics import Floats, TargetPositions
from recsys_core.evaluation.ranking.queries import Ranking
from recsys_core.manifests import SliceReport


class Estimate(NamedTuple):
    """A metric. half_width: half the width of its confidence interval; None if there is no interval.

    Only means over at least two users have an interval.
    """

    value: float
    half_width: float | None = None


Estimates = dict[str, Estimate]
"""Estimates by metric name."""


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
    z_score = NormalDist().inv_cdf(0.5 + confidence / 2)
    half_width = z_score * float(defined_value_U.std(ddof=1)) / math.sqrt(num_users)
    return Estimate(float(defined_value_U.mean()), half_width)


class Columns:
    """Columns of values in scratch files in `folder`. Values are appended for one chunk of users after the other.

    Memory holds one chunk of users, and one column while its mean is computed. The mean is computed over the whole column at
    once, so it is exactly the same for every chunk size.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_by_name: dict[str, tuple[Path, np.dtype[Any]]] = {}
        self._file_numbers = itertools.count()

    def append(self, name: str, values: NDArray[Any]) -> None:
        """Append values to a column. All values of a column have the same type."""
        path, dtype = self._file_by_name.setdefault(name, (self._folder / f"{next(self._file_numbers)}.values", values.dtype))
        assert dtype == values.dtype, f"the column {name} has the type {dtype}, not {values.dtype}"
        with path.open("ab") as file:
            values.tofile(file)

    def read(self, name: str) -> NDArray[Any]:
        """Memory-map a column. It is empty if nothing was appended to it."""
        path, dtype = self._file_by_name.get(name, (None, np.dtype(np.float64)))
        return np.memmap(path, dtype, mode="r") if path is not None and path.stat().st_size else np.empty(0, dtype)

    def take(self, name: str) -> NDArray[Any]:
        """Memory-map a column, and remove its file. The disk space is freed when the array is deleted."""
        values = self.read(name)
        if name in self._file_by_name:
            self._file_by_name.pop(name)[0].unlink()
        return values


class Accuracy:
    """Metrics such as recall@20 of all or some targets of a ranking, averaged over the users of all chunks.

    Attributes:
        num_users, num_targets: number of users and of targets in all chunks.
    """

    def __init__(
        self,
        columns: Columns,
        prefix: str,
        *,
        config: EvaluationConfig,
        metric_names: Sequence[str] = (),
        ks: Sequence[int] | None = None,
    ) -> None:
        """Start without users.

        Args:
            prefix: start of the column names, before the name of the metric.
            metric_names: metrics to compute, if the config has them; empty for all metrics of the config.
            ks: cut-offs; None for the cut-offs of the config.
        """
        self._columns, self._prefix, self._confidence = columns, prefix, config.confidence
        self._metric_by_name = {
            f"{name}@{k}": partial(metrics.METRIC_BY_NAME[name], k=k)
            for k in (config.ks if ks is None else ks)
            for name in config.metrics
            if name in metrics.METRIC_BY_NAME and name in (metric_names or config.metrics)
        }
        self.num_users, self.num_targets = 0, 0

    def add(self, targets: TargetPositions) -> None:
        """Add the users of a chunk."""
        if not targets.num_users:
            return
        self.num_users += targets.num_users
        self.num_targets += len(targets.position_T)
        for name, metric in self._metric_by_name.items():
            self._columns.append(f"{self._prefix}/{name}", metric(targets))

    def estimates(self) -> Estimates:
        """Return the metrics by <metric>@<k>."""
        return {
            name: mean_estimate(self._columns.take(f"{self._prefix}/{name}"), confidence=self._confidence)
            for name in self._metric_by_name
        }


class RankingMetrics:
    """All metrics of a catalogue ranking, which is added in chunks of users.

    Attributes:
        num_seen_targets: number of targets that were excluded because the user had seen them.
    """

    def __init__(self, columns: Columns, prefix: str, *, config: EvaluationConfig) -> None:
        self._columns, self._prefix, self._config = columns, prefix, config
        self._accuracy = Accuracy(columns, prefix, config=config)
        self._coverage: diversity.Coverage | None = None
        self._has_known_negatives = False
        self.num_seen_targets = 0

    @property
    def num_targets(self) -> int:
        """Number of ranked targets."""
        return self._accuracy.num_targets

    def add(self, ranking: Ranking, targets: TargetPositions, *, known_negatives: JaggedArray | None = None) -> None:
        """Add a chunk of users.

        Args:
            targets: the positions of all targets of the ranking.
            known_negatives: item rows that the user of each query rejected before the split; None if the log has no rejected
                items.
        """
        self.num_seen_targets += ranking.num_seen_targets
        self._coverage = self._coverage or diversity.Coverage(self._config.ks, num_items=ranking.num_items)
        self._coverage.add(ranking.top_BK)
        if known_negatives is not None:
            self._has_known_negatives = True
            for k in self._config.ks:
                share_B = diversity.known_negative_share(
                    ranking.top_BK, known_negatives=known_negatives, k=k, num_items=ranking.num_items
                )
                self._columns.append(f"{self._prefix}/known_negatives@{k}", share_B)
        self._accuracy.add(targets)
        if "auc" in self._config.metrics and targets.num_users:
            self._columns.append(f"{self._prefix}/mrr", metrics.reciprocal_rank(targets))
            self._columns.append(f"{self._prefix}/auc", metrics.auc(targets))
            self._columns.append(f"{self._prefix}/num_targets", targets.num_targets_U)

    def estimates(self) -> Estimates:
        """Return all metrics. Undefined metrics are left out."""
        estimates = {
            "users": Estimate(self._accuracy.num_users),
            "targets": Estimate(self.num_targets),
            "seen_targets": Estimate(self.num_seen_targets),
        }
        estimates |= self._accuracy.estimates()
        if self._coverage is not None:
            share_by_k = self._coverage.shares()
            estimates |= {f"coverage@{k}": Estimate(share_by_k[k]) for k in self._config.ks}
        if self._has_known_negatives:
            estimates |= {f"known_negatives@{k}": self._mean_of_column(f"known_negatives@{k}") for k in self._config.ks}
        if "auc" in self._config.metrics:
            auc_U, num_targets_U = (self._columns.take(f"{self._prefix}/{name}") for name in ("auc", "num_targets"))
            estimates["mrr"] = self._mean_of_column("mrr")
            estimates["auc"] = mean_estimate(auc_U, confidence=self._config.confidence)
            estimates["gauc"] = Estimate(metrics.weighted_mean(auc_U, weight_U=num_targets_U))
        return {name: estimate for name, estimate in estimates.items() if not math.isnan(estimate.value)}

    def _mean_of_column(self, name: str) -> Estimate:
        return mean_estimate(self._columns.take(f"{self._prefix}/{name}"), confidence=self._config.confidence)


class ColdMetrics:
    """The metrics of a cold-item ranking, which is added in chunks of users."""

    def __init__(self, columns: Columns, prefix: str, *, config: EvaluationConfig) -> None:
        self._columns, self._prefix, self._config = columns, prefix, config
        self._accuracy: Accuracy | None = None
        self._num_items = 0

    def add(self, ranking: Ranking) -> None:
        """Add a chunk of users."""
        if self._accuracy is None:
            self._num_items = ranking.num_items
            # With a cut-off of at least the number of cold items, every cold item is among the first k.
            ks, metric_names = [k for k in self._config.ks if k < ranking.num_items], ("recall", "ndcg", "hit_rate")
            self._accuracy = Accuracy(self._columns, self._prefix, config=self._config, metric_names=metric_names, ks=ks)
        self._accuracy.add(ranking.target_positions())

    def estimates(self) -> Estimates:
        """Return the metrics; empty if no user has a cold target."""
        if self._accuracy is None or not self._accuracy.num_users:
            return {}
        counts = {"users": Estimate(self._accuracy.num_users), "items": Estimate(self._num_items)}
        return self._accuracy.estimates() | counts


class ListMetrics:
    """Novelty, Gini coefficient, popularity lift and diversity of the first k items of top lists, which are added in chunks."""

    def __init__(
        self, columns: Columns, prefix: str, *, k: int, store: EventStore, vectors_RD: NDArray[np.float32] | None
    ) -> None:
        """Start without lists. vectors_RD: pretrained vectors of the items; None if there are no vectors."""
        self._columns, self._novelty_name, self._k = columns, f"{prefix}/novelty", k
        self._vectors_RD, self._vector_row_I = vectors_RD, store.vector_rows("item")
        self._train_count_I = store.train_count_I
        self._information_I = diversity.item_information(self._train_count_I)
        self._num_recommendations_I = np.zeros(store.num_items, np.int64)
        self._history_train_count, self._num_history_items = 0, 0
        self._distance_sum, self._num_lists = 0.0, 0

    def add(self, top_BK: NDArray[np.int32], *, history_item_L: NDArray[Any]) -> None:
        """Add top lists. history_item_L: item rows of the histories of the same users."""
        top_BK = top_BK[:, : self._k]
        item_L = top_BK[top_BK >= 0]
        self._columns.append(self._novelty_name, self._information_I[item_L])
        self._num_recommendations_I += np.bincount(item_L, minlength=len(self._num_recommendations_I))
        self._history_train_count += int(self._train_count_I[history_item_L].sum())
        self._num_history_items += len(history_item_L)
        if self._vectors_RD is not None and self._vector_row_I is not None:
            for distance_sum, num_lists in diversity.list_distances(
                top_BK, vectors_RD=self._vectors_RD, vector_row_I=self._vector_row_I
            ):
                self._distance_sum += distance_sum
                self._num_lists += num_lists

    def estimates(self) -> Estimates:
        """Return the metrics by <metric>@<k>. Undefined metrics are left out."""
        value_by_metric = {
            "novelty": float(self._columns.take(self._novelty_name).mean()),
            "gini": diversity.gini(self._num_recommendations_I),
        }
        if self._history_train_count:
            mean_popularity = int(self._num_recommendations_I @ self._train_count_I) / int(self._num_recommendations_I.sum())
            value_by_metric["popularity_lift"] = mean_popularity / (self._history_train_count / self._num_history_items) - 1
        if self._num_lists:
            value_by_metric["diversity"] = self._distance_sum / self._num_lists
        return {f"{name}@{self._k}": Estimate(value) for name, value in value_by_metric.items() if not math.isnan(value)}


def slice_report(name: str, accuracy: Accuracy, *, min_users: int) -> SliceReport:
    """Return the report of a slice, without metrics if the slice has fewer than `min_users` users."""
    estimates = accuracy.estimates() if accuracy.num_users >= min_users else {}
    return SliceReport(
        name=name,
        num_users=accuracy.num_users,
        num_targets=accuracy.num_targets,
        min_users=min_users,
        metrics={metric: estimate.value for metric, estimate in estimates.items()},
        half_widths=half_widths(estimates),
    )


def prefixed(prefix: str, estimates: Mapping[str, Estimate]) -> Estimates:
    """Return the metrics by <prefix>/<metric>."""
    return {f"{prefix}/{name}": estimate for name, estimate in estimates.items()}


def half_widths(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return the half widths of the intervals by metric, without the metrics that have no interval."""
    return {name: estimate.half_width for name, estimate in estimates.items() if estimate.half_width is not None}
