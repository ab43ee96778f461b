"""Ranking metrics from exact ranks. Every function gives one value per user, so that users can be compared in pairs.

Definitions follow Järvelin and Kekäläinen (TOIS 2002) for NDCG with binary gains, and Manning, Raghavan and Schütze,
Introduction to Information Retrieval (2008), chapter 8, for the others.

Shapes: P (user, target) pairs, U users with at least one target, E users asked, K cut-off.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TargetRanks:
    """Where each target came among its user's ranked candidates.

    rank_P: int64 [P], 0-based, ascending within a user; user_P: int64 [P], 0..U-1, ascending; candidates_U: int64 [U], items
    ranked for the user; targets_U: int64 [U], at least 1.
    """

    rank_P: NDArray[np.int64]
    user_P: NDArray[np.int64]
    candidates_U: NDArray[np.int64]
    targets_U: NDArray[np.int64]

    @classmethod
    def of_pairs(cls, *, user_P: NDArray[Any], rank_P: NDArray[Any], candidates_E: NDArray[Any]) -> Self:
        """From pairs in any order. Users without a pair drop out; the others are numbered anew, ascending.

        >>> TargetRanks.of_pairs(user_P=np.array([5, 2, 5]), rank_P=np.array([3, 0, 1]), candidates_E=np.full(6, 4)).rank_P
        array([0, 1, 3])
        """
        order = np.lexsort((rank_P, user_P))
        user, number_P, targets_U = np.unique(user_P[order], return_inverse=True, return_counts=True)
        return cls(rank_P[order].astype(np.int64), number_P.astype(np.int64), candidates_E[user].astype(np.int64), targets_U)

    @property
    def users(self) -> int:
        """U."""
        return len(self.targets_U)

    @property
    def first_U(self) -> NDArray[np.int64]:
        """Position of each user's best-ranked target among the pairs."""
        return np.concatenate([[0], np.cumsum(self.targets_U)[:-1]]).astype(np.int64)

    @property
    def ordinal_P(self) -> NDArray[np.int64]:
        """How many targets of the same user are ranked above."""
        return np.arange(len(self.rank_P)) - np.repeat(self.first_U, self.targets_U)

    def per_user(self, value_P: NDArray[Any]) -> Floats:
        """Sums over each user's targets."""
        return np.bincount(self.user_P, weights=value_P, minlength=self.users).astype(np.float64)


def hits(ranks: TargetRanks, *, k: int) -> Floats:
    """Targets among the first k, [U]."""
    return ranks.per_user(ranks.rank_P < k)


def recall(ranks: TargetRanks, *, k: int) -> Floats:
    """Share of a user's targets among the first k, [U].

    >>> two_users = TargetRanks.of_pairs(user_P=np.array([0, 0, 1]), rank_P=np.array([0, 2, 3]), candidates_E=np.array([6, 4]))
    >>> recall(two_users, k=2).tolist()
    [0.5, 0.0]
    """
    return hits(ranks, k=k) / ranks.targets_U


def precision(ranks: TargetRanks, *, k: int) -> Floats:
    """Share of targets among the first k, [U]; the denominator is k, however short the list.

    >>> two_users = TargetRanks.of_pairs(user_P=np.array([0, 0, 1]), rank_P=np.array([0, 2, 3]), candidates_E=np.array([6, 4]))
    >>> precision(two_users, k=4).tolist()
    [0.5, 0.25]
    """
    return hits(ranks, k=k) / k


def hit_rate(ranks: TargetRanks, *, k: int) -> Floats:
    """1 for a user with any target among the first k, else 0, [U].

    >>> two_users = TargetRanks.of_pairs(user_P=np.array([0, 0, 1]), rank_P=np.array([0, 2, 3]), candidates_E=np.array([6, 4]))
    >>> hit_rate(two_users, k=3).tolist()
    [1.0, 0.0]
    """
    return (hits(ranks, k=k) > 0).astype(np.float64)


def ndcg(ranks: TargetRanks, *, k: int) -> Floats:
    """Discounted gain of the first k over that of the best possible order, [U]; gains are 0 or 1.

    The ideal list has min(k, targets) targets on top. Below, the first user's gain is 1/log2(2) + 1/log2(4) = 1.5, the ideal
    1/log2(2) + 1/log2(3) = 1.6309.

    >>> two_users = TargetRanks.of_pairs(user_P=np.array([0, 0, 1]), rank_P=np.array([0, 2, 2]), candidates_E=np.array([6, 4]))
    >>> ndcg(two_users, k=3).round(4).tolist()
    [0.9197, 0.5]
    """
    gain_P: Floats = np.where(ranks.rank_P < k, 1 / np.log2(ranks.rank_P + 2.0), 0.0)
    ideal_K: Floats = np.cumsum(1 / np.log2(np.arange(k) + 2.0))
    ideal_U: Floats = ideal_K[np.minimum(ranks.targets_U, k) - 1]
    return ranks.per_user(gain_P) / ideal_U


def reciprocal_rank(ranks: TargetRanks) -> Floats:
    """1 / (1-based rank of the best target), [U]; its mean is the MRR.

    >>> two_users = TargetRanks.of_pairs(user_P=np.array([0, 0, 1]), rank_P=np.array([1, 2, 3]), candidates_E=np.array([6, 4]))
    >>> reciprocal_rank(two_users).tolist()
    [0.5, 0.25]
    """
    inverse_U: Floats = 1 / (ranks.rank_P[ranks.first_U] + 1)
    return inverse_U


def average_precision(ranks: TargetRanks, *, k: int) -> Floats:
    """Precision at each target among the first k, summed and divided by min(k, targets), [U]; its mean is the MAP@k.

    Below, the first user's targets stand on places 1 and 3: (1/1 + 2/3) / 2.

    >>> two_users = TargetRanks.of_pairs(user_P=np.array([0, 0, 1]), rank_P=np.array([0, 2, 3]), candidates_E=np.array([6, 4]))
    >>> average_precision(two_users, k=4).round(4).tolist()
    [0.8333, 0.25]
    """
    precision_P = (ranks.ordinal_P + 1) / (ranks.rank_P + 1)
    return ranks.per_user(np.where(ranks.rank_P < k, precision_P, 0.0)) / np.minimum(ranks.targets_U, k)


def auc(ranks: TargetRanks) -> Floats:
    """Share of a user's other candidates that rank below a target, averaged over the targets, [U]; NaN without others.

    Below, the first user has 6 candidates, 4 of them no target: none stands above the target on place 1, one above the target
    on place 3, so (4/4 + 3/4) / 2. The second user's target is last of four.

    >>> two_users = TargetRanks.of_pairs(user_P=np.array([0, 0, 1]), rank_P=np.array([0, 2, 3]), candidates_E=np.array([6, 4]))
    >>> auc(two_users).tolist()
    [0.875, 0.0]
    """
    others_U = (ranks.candidates_U - ranks.targets_U).astype(np.float64)
    above_U = ranks.per_user(ranks.rank_P - ranks.ordinal_P)
    with np.errstate(invalid="ignore"):
        return 1.0 - above_U / ranks.targets_U / others_U


def coverage(top_EK: NDArray[np.int32], *, k: int, items: int) -> float:
    """Share of the catalogue that is among anybody's first k; -1 in `top_EK` means no item.

    >>> coverage(np.array([[3, 1, 2], [3, 0, -1]], np.int32), k=2, items=4)
    0.75
    """
    is_covered_I = np.zeros(items + 1, np.bool_)
    is_covered_I[top_EK[:, :k]] = True
    return float(np.count_nonzero(is_covered_I[:items]) / items)
