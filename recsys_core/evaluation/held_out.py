"""The users with targets in one split, with their queries, histories and targets.

Shapes: B queries, I items, C cold items, L targets of all queries, T ranked (query, target) pairs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import Int64Array, JaggedArray, ragged_ranges
from recsys_core.evaluation.baselines import cold_rows, popularity_before
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.ranking.queries import Queries, Ranking
from recsys_core.manifests import ExportManifest, InteractionsManifest
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
    """

    queries: Queries
    user_row_B: NDArray[np.int64]
    history: JaggedArray
    popularity_order_I: NDArray[np.int32]
    cold_row_C: NDArray[np.int64]

    def target_event_index(self, ranking: Ranking, *, store: EventStore) -> Int64Array:
        """Return the index in the event store of the user's first test event with each ranked target, [T].

        For the test split only.
        """
        targets = self.queries.targets
        event_index_L = ragged_ranges(store.first_event_index(self.user_row_B, "test"), targets.lengths)
        distinct_keys, first_L = np.unique(targets.pair_keys(bound=store.num_items), return_index=True)
        event_index_T: Int64Array = event_index_L[
            first_L[np.searchsorted(distinct_keys, ranking.query_T * store.num_items + ranking.item_T)]
        ]
        return event_index_T


def load_held_out(
    split: EvaluationSplit,
    *,
    config: EvaluationConfig,
    store: EventStore,
    export: ExportManifest,
    interactions: InteractionsManifest,
) -> HeldOut:
    """Load the exported queries of a split; if there are more than max_users, a random sample of them with a fixed seed."""
    user_row_B = np.load(export.path(f"query_users_{split}.npy"))
    query_vectors = np.load(export.path(f"query_vectors_{split}.npy"), mmap_mode="r")
    sampled_indices = np.arange(len(user_row_B))
    if config.max_users is not None and config.max_users < len(user_row_B):
        sampled_indices = np.sort(
            np.random.default_rng(EVALUATION_USERS_SEED).choice(len(user_row_B), config.max_users, replace=False)
        )
    user_row_B = user_row_B[sampled_indices]
    history = store.items_before(user_row_B, split)
    spec = ModelSpec.model_validate_json(export.path("model.json").read_bytes())
    return HeldOut(
        queries=Queries(
            query_BD=torch.from_numpy(query_vectors[sampled_indices]),
            is_known_B=spec.is_known(history_length_B=history.lengths, user_row_B=user_row_B),
            seen=history if config.exclude_seen else JaggedArray.empty(len(history)),
            targets=store.targets(user_row_B, split),
        ),
        user_row_B=user_row_B,
        history=history,
        popularity_order_I=popularity_before(split, store=store, interactions=interactions),
        cold_row_C=cold_rows(store, split),
    )
