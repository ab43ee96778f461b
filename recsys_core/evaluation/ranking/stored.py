"""Files of the rankings that the ranks write during the export, and that the evaluation reads.

The files contain only what needs the vectors: the top lists, and the positions of the targets. Targets and candidates follow
from the log.
"""

import numpy as np

from recsys_core.errors import StageError
from recsys_core.evaluation.ranking.queries import Queries, Ranking
from recsys_core.manifests import ExportManifest


def ranking_file(split: str, content: str) -> str:
    """Return the name of a file; content: top, positions or cold_positions."""
    return f"ranking_{split}_{content}.npy"


class StoredRanking:
    """The ranking of the known users of a split, which is read in chunks. A ranking of the cold items has no top lists."""

    def __init__(self, export: ExportManifest, *, split: str, is_cold: bool) -> None:
        self._path = export.path(ranking_file(split, "cold_positions" if is_cold else "positions"))
        self._position_T = np.load(self._path, mmap_mode="r")
        self._top_RK = None if is_cold else np.load(export.path(ranking_file(split, "top")), mmap_mode="r")
        self._num_queries, self._num_targets = 0, 0

    def read(self, known_queries: Queries, *, num_items: int) -> Ranking:
        """Return the ranking of the next queries. num_items: number of ranked items.

        Raises StageError if the files do not fit the queries.
        """
        pairs = known_queries.ranked_pairs(num_items=num_items)
        first_query, first_target = self._num_queries, self._num_targets
        self._num_queries += len(known_queries.targets)
        self._num_targets += len(pairs.targets.values_L)
        top_BK = np.empty((len(known_queries.targets), 0), np.int32)
        if self._top_RK is not None:
            top_BK = np.array(self._top_RK[first_query : self._num_queries])
        position_T = np.array(self._position_T[first_target : self._num_targets])
        if (len(position_T), len(top_BK)) != (len(pairs.targets.values_L), len(known_queries.targets)):
            raise self._mismatch()
        return pairs.ranking(position_T=position_T, top_BK=top_BK, num_items=num_items)

    def check_end(self) -> None:
        """Raise StageError if the files have more queries or targets than were read."""
        num_stored = self._num_queries if self._top_RK is None else len(self._top_RK)
        if (len(self._position_T), num_stored) != (self._num_targets, self._num_queries):
            raise self._mismatch()

    def _mismatch(self) -> StageError:
        num_stored = self._num_queries if self._top_RK is None else len(self._top_RK)
        return StageError(
            f"{self._path}: the ranking has {num_stored:,} users and {len(self._position_T):,} targets, but the log has "
            f"{self._num_queries:,} known users with {self._num_targets:,} targets; repeat the export"
        )
