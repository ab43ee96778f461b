"""The users with targets in one split, with their queries, histories and targets.

Shapes: B queries, I items, C cold items, L targets of all queries, T ranked (query, target) pairs.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import Int64Array, JaggedArray
from recsys_core.evaluation.baselines import cold_rows, popularity_before
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.metrics import SERVED_METRICS
from recsys_core.evaluation.ranking.queries import Queries
from recsys_core.evaluation.ranking.served import among_candidates
from recsys_core.manifests import ExportManifest, InteractionsManifest, RankingSettings
from recsys_core.models.spec import ModelSpec
from recsys_core.seeds import EVALUATION_USERS_SEED


@dataclass(frozen=True)
class HeldOut:
    """The users with targets in one split, and the items.

    Attributes:
        user_row_B: rows of the users, ascending.
        history: item rows of each user's events before the split, oldest first.
        popularity_order_I: item rows by falling popularity before the split.
        cold_row_C: rows of the items without an event before the split.
        known_negatives: item rows that each user has rejected before the split; None if the ingest did not keep them.
    """

    queries: Queries
    user_row_B: NDArray[np.int64]
    history: JaggedArray
    popularity_order_I: NDArray[np.int32]
    cold_row_C: NDArray[np.int64]
    known_negatives: JaggedArray | None = None


def ranking_settings(config: EvaluationConfig) -> RankingSettings:
    """Return the settings on which the rankings of an evaluation depend.

    The top lists contain the cut-offs of the evaluation and of the served metrics. Only `auc` needs more.
    """
    return RankingSettings(
        k=max(*config.ks, *(k for _, k in SERVED_METRICS.values())),
        top_only="auc" not in config.metrics,
        exclude_seen=config.exclude_seen,
        max_users=config.max_users,
    )


def sampled_users(num_users: int, *, max_users: int | None) -> Int64Array:
    """Return the indices of the evaluated users: all, or a random sample of `max_users` with a fixed seed; ascending."""
    if max_users is None or max_users >= num_users:
        return np.arange(num_users)
    return np.sort(np.random.default_rng(EVALUATION_USERS_SEED).choice(num_users, max_users, replace=False))


def queries_of(
    user_row_B: Int64Array, query_BD: Tensor, *, split: EvaluationSplit, exclude_seen: bool, store: EventStore, spec: ModelSpec
) -> tuple[Queries, JaggedArray]:
    """Return the queries of these users, and their histories: the item rows of each user's events before the split."""
    history = store.items_before(user_row_B, split)
    queries = Queries(
        query_BD=query_BD,
        is_known_B=spec.is_known(history_length_B=history.lengths, user_row_B=user_row_B),
        seen=history if exclude_seen else JaggedArray.empty(len(history)),
        targets=store.targets(user_row_B, split),
    )
    return queries, history


def cold_queries(queries: Queries, cold_row_C: NDArray[np.int64], *, num_items: int) -> Queries:
    """Return the queries of a ranking of the cold items: those with a cold target. A cold item is in no history."""
    unseen = replace(queries, seen=JaggedArray.empty(len(queries.targets)))
    return among_candidates(unseen, cold_row_C, num_items=num_items)


def load_held_out(
    split: EvaluationSplit,
    *,
    config: EvaluationConfig,
    store: EventStore,
    export: ExportManifest,
    interactions: InteractionsManifest,
) -> HeldOut:
    """Load the evaluated users of a split. Their query vectors are loaded only if the export has no ranking for `config`."""
    user_row_B = np.load(export.path(f"query_users_{split}.npy"))
    sampled_indices = sampled_users(len(user_row_B), max_users=config.max_users)
    user_row_B = user_row_B[sampled_indices]
    query_BD = torch.empty((len(user_row_B), 0))
    if export.ranking != ranking_settings(config):
        query_vectors = np.load(export.path(f"query_vectors_{split}.npy"), mmap_mode="r")
        query_BD = torch.from_numpy(query_vectors[sampled_indices])
    spec = ModelSpec.model_validate_json(export.path("model.json").read_bytes())
    queries, history = queries_of(user_row_B, query_BD, split=split, exclude_seen=config.exclude_seen, store=store, spec=spec)
    known_negatives = None
    if store.known_negatives is not None:
        # An event wins over a label below the threshold, and a validation event may be later than the label.
        known_negatives = store.known_negatives.before(user_row_B, split).difference(history, bound=store.num_items)
    return HeldOut(
        queries=queries,
        user_row_B=user_row_B,
        history=history,
        popularity_order_I=popularity_before(split, store=store, interactions=interactions),
        cold_row_C=cold_rows(store, split),
        known_negatives=known_negatives,
    )
