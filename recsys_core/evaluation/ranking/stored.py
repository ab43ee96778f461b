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


def read_ranking(known_queries: Queries, export: ExportManifest, *, split: str, num_items: int, is_cold: bool) -> Ranking:
    """Read the ranking of these queries. A ranking of the cold items has no top lists.

    num_items: number of ranked items.

    Raises StageError if the files do not fit the queries.
    """
    pairs, num_queries = known_queries.ranked_pairs(num_items=num_items), len(known_queries.targets)
    positions_path = export.path(ranking_file(split, "cold_positions" if is_cold else "positions"))
    position_T = np.load(positions_path)
    top_BK = np.empty((num_queries, 0), np.int32) if is_cold else np.load(export.path(ranking_file(split, "top")))
    num_targets = len(pairs.targets.values_L)
    if (len(position_T), len(top_BK)) != (num_targets, num_queries):
        raise StageError(
            f"{positions_path}: the ranking has {len(top_BK):,} users and {len(position_T):,} targets, but the log has "
            f"{num_queries:,} known users with {num_targets:,} targets; repeat the export"
        )
    return pairs.ranking(position_T=position_T, top_BK=top_BK, num_items=num_items)
