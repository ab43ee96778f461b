"""Rankings of the items for the held-out users, by the model or by zero-shot: read from the export, or computed here.

The files of the export contain only the results that need the vectors: the top lists, and the positions of the targets. The
targets and candidates themselves are read from the log.

Shapes: B queries, I items, C cold items, D width, K length of the top list, T ranked (query, target) pairs, L targets of all
queries, R rows of a file.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import StageError
from recsys_core.evaluation.baselines import ZeroShot
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.held_out import HeldOutSplit, HeldOutUsers, queries_with_cold_targets, ranking_settings
from recsys_core.evaluation.ranking.queries import Queries, Ranking
from recsys_core.evaluation.ranking.served import add_unknown_queries, candidate_order, rank_among, rank_as_served
from recsys_core.manifests import ExportManifest

logger = logging.getLogger(__name__)

Ranker = Literal["model", "zero_shot"]


def ranking_file(split: str, content: str, *, ranker: Ranker = "model") -> str:
    """Return the name of a ranking file of the export. content: top, positions or cold_positions."""
    prefix = "" if ranker == "model" else f"{ranker}_"
    return f"{prefix}ranking_{split}_{content}.npy"


def has_ranking(export: ExportManifest, *, config: EvaluationConfig, ranker: Ranker = "model") -> bool:
    """Return whether the export has rankings of `ranker` that were made with the settings of `config`."""
    return export.ranking == ranking_settings(config) and ranking_file("test", "top", ranker=ranker) in export.files


class StoredRanking:
    """The stored ranking for the known users of a split. It is read in chunks. A ranking of the cold items has no top lists."""

    def __init__(self, export: ExportManifest, *, split: str, is_cold: bool, ranker: Ranker = "model") -> None:
        self._path = export.path(ranking_file(split, "cold_positions" if is_cold else "positions", ranker=ranker))
        self._position_T = np.load(self._path, mmap_mode="r")
        self._top_RK = None
        if not is_cold:
            self._top_RK = np.load(export.path(ranking_file(split, "top", ranker=ranker)), mmap_mode="r")
        self._num_read_queries, self._num_read_targets = 0, 0

    def read(self, known_queries: Queries, *, num_items: int) -> Ranking:
        """Return the ranking of the next queries. num_items: number of ranked items.

        Raises StageError if the files end before these queries.
        """
        pairs = known_queries.ranked_pairs(num_items=num_items)
        first_query, first_target = self._num_read_queries, self._num_read_targets
        self._num_read_queries += len(known_queries.targets)
        self._num_read_targets += len(pairs.targets.values_L)
        top_BK = np.empty((len(known_queries.targets), 0), np.int32)
        if self._top_RK is not None:
            top_BK = np.array(self._top_RK[first_query : self._num_read_queries])
        position_T = np.array(self._position_T[first_target : self._num_read_targets])
        if (len(position_T), len(top_BK)) != (len(pairs.targets.values_L), len(known_queries.targets)):
            raise self._mismatch_error(is_at_end=False)
        return pairs.ranking(position_T=position_T, top_BK=top_BK, num_items=num_items)

    def check_end(self) -> None:
        """Raise StageError if the files have more users or targets than were read."""
        num_stored_users = self._num_read_queries if self._top_RK is None else len(self._top_RK)
        if (len(self._position_T), num_stored_users) != (self._num_read_targets, self._num_read_queries):
            raise self._mismatch_error(is_at_end=True)

    def _mismatch_error(self, *, is_at_end: bool) -> StageError:
        bound_text = "" if is_at_end else "at least "  # later queries are not counted yet
        users_text = "" if self._top_RK is None else f"{len(self._top_RK):,} users and "
        return StageError(
            f"{self._path}: the ranking has {users_text}{len(self._position_T):,} targets, but the log has "
            f"{bound_text}{self._num_read_queries:,} known users with {self._num_read_targets:,} targets; repeat the export"
        )


def model_rankings(
    held_out_split: HeldOutSplit, *, config: EvaluationConfig, export: ExportManifest, on_ranked: Callable[[int], None]
) -> Iterator[tuple[HeldOutUsers, Ranking, Ranking]]:
    """Yield each chunk of users with the model's ranking of the catalogue and of the cold items.

    The rankings are read from the export. If the export has other settings of the evaluation, this process ranks the items.
    """
    if has_ranking(export, config=config):
        yield from _stored_rankings(held_out_split, export=export, k=ranking_settings(config).k)
        return
    if export.ranking is not None:
        logger.info(
            "the settings of the evaluation have changed since the export, so this process ranks the items again; to divide "
            "this work among the training ranks, remove the folder %s and resume the run", export.folder,
        )  # fmt: skip
    item_vector_ID = torch.from_numpy(np.load(export.path("item_vectors.npy")))
    for users in held_out_split:
        yield users, *rank_with_vectors(users, item_vector_ID=item_vector_ID, config=config, on_ranked=on_ranked)


def _stored_rankings(
    held_out_split: HeldOutSplit, *, export: ExportManifest, k: int, ranker: Ranker = "model"
) -> Iterator[tuple[HeldOutUsers, Ranking, Ranking]]:
    """Yield the rankings that the ranks have written, completed by popularity rankings for the unknown users."""
    order_I, cold_row_C = held_out_split.popularity_order_I, held_out_split.cold_row_C
    cold_order_C = candidate_order(order_I, cold_row_C)
    stored_ranking, stored_cold_ranking = (
        StoredRanking(export, split=held_out_split.name, is_cold=is_cold, ranker=ranker) for is_cold in (False, True)
    )
    for users in held_out_split:
        queries = users.queries if ranker == "model" else users.queries.as_known()
        known_ranking = stored_ranking.read(queries.known(), num_items=len(order_I))
        ranking = add_unknown_queries(known_ranking, queries, order_I=order_I, k=k)
        cold_queries = queries_with_cold_targets(queries, cold_row_C, num_items=len(order_I))
        known_cold_ranking = stored_cold_ranking.read(cold_queries.known(), num_items=len(cold_row_C))
        yield users, ranking, add_unknown_queries(known_cold_ranking, cold_queries, order_I=cold_order_C, k=0)
    stored_ranking.check_end()
    stored_cold_ranking.check_end()


def rank_with_vectors(
    users: HeldOutUsers, *, item_vector_ID: Tensor, config: EvaluationConfig, on_ranked: Callable[[int], None]
) -> tuple[Ranking, Ranking]:
    """Return the ranking of the catalogue by inner product, and the ranking of the cold items."""
    order_I, settings = users.popularity_order_I, ranking_settings(config)
    ranking = rank_as_served(
        users.queries,
        item_vector_ID=item_vector_ID,
        order_I=order_I,
        k=settings.k,
        top_only=settings.top_only,
        device="cuda" if torch.cuda.is_available() else "cpu",
        on_progress=on_ranked,
    )
    # No user has seen a cold item.
    queries = replace(users.queries, seen=JaggedArray.empty(len(users.history)))
    cold_ranking = rank_among(queries, item_vector_ID=item_vector_ID, order_I=order_I, candidate_rows=users.cold_row_C, k=0)
    return ranking, cold_ranking


def zero_shot_rankings(
    held_out_split: HeldOutSplit,
    vectors_RD: NDArray[np.float32],
    *,
    config: EvaluationConfig,
    export: ExportManifest,
    store: EventStore,
    on_ranked: Callable[[int], None],
) -> Iterator[tuple[HeldOutUsers, Ranking, Ranking]]:
    """Yield each chunk of users with the zero-shot ranking of the catalogue and of the cold items.

    This process ranks the items if the export does not contain these rankings; see ExportManifest.
    """
    if has_ranking(export, config=config, ranker="zero_shot"):
        yield from _stored_rankings(held_out_split, export=export, k=ranking_settings(config).k, ranker="zero_shot")
        return
    model = ZeroShot.of(store, vectors_RD)
    item_vector_ID = model.item_vectors(slice(0, store.num_items))
    for users in held_out_split:
        queries = replace(users.queries.as_known(), query_BD=model.query_vectors(users.history))
        rankings = rank_with_vectors(
            replace(users, queries=queries), item_vector_ID=item_vector_ID, config=config, on_ranked=on_ranked
        )
        yield users, *rankings
