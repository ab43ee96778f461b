"""Rankings of the held-out users by vectors: read from the export, or computed in this process.

Shapes: I items, D width.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from recsys_core.dataset.events import EvaluationSplit
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import StageError
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.held_out import HeldOut, cold_queries, ranking_settings
from recsys_core.evaluation.ranking.queries import Queries, Ranking
from recsys_core.evaluation.ranking.served import add_unknown_queries, candidate_order, rank_among, rank_served
from recsys_core.manifests import ExportManifest

logger = logging.getLogger(__name__)


def model_ranker(
    config: EvaluationConfig, *, export: ExportManifest, on_ranked: Callable[[int], None]
) -> Callable[[EvaluationSplit, HeldOut], tuple[Ranking, Ranking]]:
    """Return the function that returns the model's ranking of the catalogue and of the cold items.

    It reads the rankings of the export, or ranks in this process if they were made with other settings.
    """
    settings = ranking_settings(config)
    if export.ranking == settings:
        return partial(_read_rankings, export=export, k=settings.k)
    if export.ranking is not None:
        logger.info(
            "the settings of the evaluation have changed since the export, so this process ranks the items again; to rank "
            "them on the ranks of the training, remove the folder %s before the run is resumed", export.folder,
        )  # fmt: skip
    item_vector_ID = torch.from_numpy(np.load(export.path("item_vectors.npy")))
    return lambda split, held_out: rank_with_vectors(
        held_out, item_vector_ID=item_vector_ID, config=config, on_ranked=on_ranked
    )


def _read_rankings(split: EvaluationSplit, held_out: HeldOut, *, export: ExportManifest, k: int) -> tuple[Ranking, Ranking]:
    """Return the rankings that the ranks have written, with the ranking by popularity of the unknown users."""
    queries, order_I, cold_row_C = held_out.queries, held_out.popularity_order_I, held_out.cold_row_C
    read = partial(read_ranking, export=export, split=split)
    ranking = add_unknown_queries(read(queries.known(), num_items=len(order_I), is_cold=False), queries, order_I=order_I, k=k)
    among_cold = cold_queries(queries, cold_row_C, num_items=len(order_I))
    cold_ranking = add_unknown_queries(
        read(among_cold.known(), num_items=len(cold_row_C), is_cold=True),
        among_cold,
        order_I=candidate_order(order_I, cold_row_C),
        k=0,
    )
    return ranking, cold_ranking


def rank_with_vectors(
    held_out: HeldOut, *, item_vector_ID: Tensor, config: EvaluationConfig, on_ranked: Callable[[int], None]
) -> tuple[Ranking, Ranking]:
    """Return the ranking of the catalogue by inner product, and the ranking of the cold items."""
    order_I, settings = held_out.popularity_order_I, ranking_settings(config)
    ranking = rank_served(
        held_out.queries,
        item_vector_ID=item_vector_ID,
        order_I=order_I,
        k=settings.k,
        top_only=settings.top_only,
        device="cuda" if torch.cuda.is_available() else "cpu",
        on_progress=on_ranked,
    )
    unseen = replace(held_out.queries, seen=JaggedArray.empty(len(held_out.history)))  # a cold item is in no history
    cold_ranking = rank_among(unseen, item_vector_ID=item_vector_ID, order_I=order_I, candidate_rows=held_out.cold_row_C, k=0)
    return ranking, cold_ranking


def ranking_file(split: str, content: str) -> str:
    """Return the name of a file that the ranks write during the export. content: top, positions or cold_positions.

    The files contain only what needs the vectors. Targets and candidates follow from the log.
    """
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
