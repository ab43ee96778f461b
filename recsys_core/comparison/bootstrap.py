"""Paired bootstrap over users: the sampling distribution of means of the same users.

Shapes: U users, M measures of each user, G groups of users with the same measures, R resamples.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np

from recsys_core.evaluation.metrics import Floats
from recsys_core.seeds import BOOTSTRAP_SEED

NUM_BLOCKS = 64
"""Number of blocks of resamples. Each block has its own random stream, so the result does not depend on the threads."""
MIN_USERS_PER_GROUP = 16
"""If the groups have at least this many users on average, drawing counts of groups is faster than drawing users."""


def resample_means(value_UM: Floats, *, num_resamples: int) -> Floats:
    """Return the means of the measures in resamples of the users, [R, M].

    A resample draws U users with replacement (Efron and Tibshirani, An Introduction to the Bootstrap, 1993). All measures of a
    user are drawn together, so differences and ratios of the columns are paired.

    Args:
        value_UM: measures of each user, such as the recall of the champion and of the new version.

    >>> means_RM = resample_means(np.array([[0.0, 1.0], [1.0, 0.0]]), num_resamples=1_000)
    >>> bool(np.all(means_RM.sum(axis=1) == 1.0))
    True
    """
    num_users = len(value_UM)
    # Users with the same values form a group. If there are few groups, drawing their counts is faster than drawing users.
    value_GM, size_G = np.unique(value_UM, axis=0, return_counts=True)
    has_few_groups = len(size_G) * MIN_USERS_PER_GROUP <= num_users
    value_by_measure = np.ascontiguousarray(value_GM.T if has_few_groups else value_UM.T)
    mean_RM = np.empty((num_resamples, value_UM.shape[1]))

    def fill_block(block_index: int) -> None:
        generator = np.random.default_rng([BOOTSTRAP_SEED, block_index])
        for resample_index in range(block_index, num_resamples, NUM_BLOCKS):
            if has_few_groups:
                num_draws = generator.multinomial(num_users, size_G / num_users)
            else:
                num_draws = np.bincount(generator.integers(num_users, size=num_users), minlength=num_users)
            mean_RM[resample_index] = value_by_measure @ num_draws.astype(np.float64) / num_users

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill_block, range(NUM_BLOCKS)))
    return mean_RM


@dataclass(frozen=True)
class PairedMeans:
    """Means of a metric of a new version and of a baseline, in the same resamples of the users."""

    new_mean_R: Floats
    baseline_mean_R: Floats

    @classmethod
    def resample(cls, new_value_U: Floats, baseline_value_U: Floats, *, num_resamples: int) -> Self:
        """Draw resamples of the users, and compute both means of each resample."""
        return cls(*resample_means(np.stack([new_value_U, baseline_value_U], axis=1), num_resamples=num_resamples).T)

    def difference_quantile(self, level: float, *, margin: float = 0.0) -> float:
        """Return a quantile of the difference between the new mean and the smallest mean that the relative margin allows."""
        return float(np.quantile(self.new_mean_R - (1 - margin) * self.baseline_mean_R, level))

    def relative_bounds(self, confidence: float) -> tuple[float, float | None]:
        """Return one-sided bounds of the relative difference of the means.

        The upper bound is None if it is infinite, because the baseline has no hit in too many resamples.
        """
        difference_R = self.new_mean_R / np.maximum(self.baseline_mean_R, np.finfo(np.float64).tiny) - 1
        low, high = np.quantile(difference_R, [1 - confidence, confidence]).tolist()
        num_unbounded_resamples = int(((self.baseline_mean_R == 0) & (self.new_mean_R > 0)).sum())
        return low, high if num_unbounded_resamples <= (1 - confidence) * (len(difference_R) - 1) else None
