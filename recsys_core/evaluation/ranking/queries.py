"""Queries, and the ranking of the items for these queries.

Shapes: B queries, I items, D width, K length of the top list, T (query, target) pairs, L targets of all queries.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.jagged import JaggedArray, is_in_sorted
from recsys_core.evaluation.metrics import TargetPositions
from recsys_core.seeds import TIE_ORDER_SEED


@dataclass(frozen=True)
class Queries:
    """Queries for which items are ranked.

    Attributes:
        query_BD: query vectors.
        is_known_B: whether the items are ranked by the query vector. Otherwise they are ranked by popularity.
        seen: item rows that are not ranked.
        targets: item rows of the targets. Seen targets are not ranked.
    """

    query_BD: Tensor
    is_known_B: NDArray[np.bool_]
    seen: JaggedArray
    targets: JaggedArray

    def take(self, query_indices: NDArray[np.int64]) -> "Queries":
        """Return the queries at these indices, in this order."""
        return Queries(
            query_BD=self.query_BD[torch.from_numpy(query_indices)],
            is_known_B=self.is_known_B[query_indices],
            seen=self.seen.take(query_indices),
            targets=self.targets.take(query_indices),
        )

    def known(self) -> "Queries":
        """Return the queries of the known users."""
        return self.take(np.flatnonzero(self.is_known_B))

    def as_known(self) -> "Queries":
        """Return these queries with all users marked as known, so that their items are ranked by the query vectors."""
        return replace(self, is_known_B=np.ones(len(self.targets), np.bool_))

    def ranked_pairs(self, *, num_items: int) -> "RankedPairs":
        """Return the targets that are ranked, and the seen items, which are not ranked."""
        seen, distinct_targets = self.seen.distinct(bound=num_items), self.targets.distinct(bound=num_items)
        seen_keys, target_keys = seen.pair_keys(bound=num_items), distinct_targets.pair_keys(bound=num_items)
        is_seen_T = is_in_sorted(target_keys, seen_keys)
        return RankedPairs(distinct_targets.filter(~is_seen_T), seen, int(np.count_nonzero(is_seen_T)))


class RankedPairs(NamedTuple):
    """The distinct unseen targets of each query, its distinct seen items, and the number of distinct targets that were seen."""

    targets: JaggedArray
    seen: JaggedArray
    num_seen_targets: int

    def ranking(self, *, position_T: NDArray[np.int64], top_BK: NDArray[np.int32], num_items: int) -> "Ranking":
        """Return the ranking with these positions of the targets and these top lists."""
        return Ranking(
            query_T=self.targets.list_index_L,
            item_T=self.targets.values_L,
            position_T=position_T,
            num_candidates_B=num_items - self.seen.lengths,
            top_BK=top_BK,
            num_seen_targets=self.num_seen_targets,
            num_items=num_items,
        )


@dataclass(frozen=True)
class Ranking:
    """Top items of each query, and the position of each ranked target.

    Attributes:
        query_T: int64, query of each target, ascending.
        item_T: int64, item row of each target.
        position_T: int64, position of each target; 0 is the best item. If only the top lists were determined, a target outside
            the list of its query has the position `num_items`.
        num_candidates_B: int64, number of ranked items.
        top_BK: int32, rows of the best items; -1 after the last candidate.
        num_seen_targets: number of targets that were excluded because the user had seen them.
        num_items: size of the catalogue.
    """

    query_T: NDArray[np.int64]
    item_T: NDArray[np.int64]
    position_T: NDArray[np.int64]
    num_candidates_B: NDArray[np.int64]
    top_BK: NDArray[np.int32]
    num_seen_targets: int
    num_items: int

    def target_positions(self) -> TargetPositions:
        """Return the positions of the targets."""
        return TargetPositions.from_pairs(
            user_T=self.query_T, position_T=self.position_T, num_candidates_B=self.num_candidates_B
        )


def tie_order(num_items: int) -> NDArray[np.int64]:
    """Return the order of item rows with equal scores: a fixed random permutation.

    Ordering by ascending row would favour popular items, because rows are numbered by falling popularity. A model with equal
    scores for all items would then rank them by popularity.
    """
    return np.random.default_rng(TIE_ORDER_SEED).permutation(num_items)
