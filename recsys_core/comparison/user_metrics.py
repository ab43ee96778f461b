"""Metrics of each user, from which a comparison and its averages are computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.evaluation.metrics import Floats


@dataclass(frozen=True)
class UserMetrics:
    """One value per metric and user. Two rankers that are compared have the same users in the same order.

    Attributes:
        value_U_by_metric: float64 [users] by name of the metric, such as recall@20.

    >>> import numpy as np
    >>> metrics = UserMetrics({"recall@20": np.array([0.0, 0.5, 1.0])})
    >>> metrics.means("served")
    {'served/recall@20': 0.5}
    """

    value_U_by_metric: Mapping[str, Floats]

    def means(self, ranker: str) -> dict[str, float]:
        """Return <ranker>/<metric> by name: the mean over the users."""
        return {f"{ranker}/{metric}": float(value_U.mean()) for metric, value_U in self.value_U_by_metric.items()}

    def write(self, path: Path) -> None:
        """Write a parquet file with one row per user and one column per metric."""
        pq.write_table(pa.table(dict(self.value_U_by_metric)), path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` has written."""
        table = pq.read_table(path)
        return cls({metric: table[metric].to_numpy() for metric in table.column_names})
