"""The evaluated users of one split, with their queries, histories and targets.

Shapes: B queries, I items, C cold items, D width, R rows of an export file.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import Int64Array, JaggedArray, chunk_slices
from recsys_core.evaluation.baselines import cold_rows, popularity_order_before
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.metrics import COMPARED_METRICS
from recsys_core.evaluation.ranking.queries import Queries
from recsys_core.evaluation.ranking.served import restrict_to_candidates
from recsys_core.manifests import ExportManifest, InteractionsManifest, RankingSettings
from recsys_core.models.spec import ModelSpec
from recsys_core.seeds import EVALUATION_USERS_SEED

CHUNK_USERS = 1 << 16
"""Number of users whose histories and rankings are in memory at once."""


@dataclass(frozen=True)
class HeldOutUsers:
    """The users with targets in one split, and their items.

    Attributes:
        user_row_B: rows of the users, ascending.
        history: item rows of each user's events before the split, oldest first.
        popularity_order_I: item rows by falling popularity before the split.
        cold_row_C: rows of the items without an event before the split.
        known_negatives: item rows that each user rejected before the split; None if the ingest did not keep rejected items.
    """

    queries: Queries
    user_row_B: NDArray[np.int64]
    history: JaggedArray
    popularity_order_I: NDArray[np.int32]
    cold_row_C: NDArray[np.int64]
    known_negatives: JaggedArray | None = None


def ranking_settings(config: EvaluationConfig) -> RankingSettings:
    """Return the settings on which the rankings of an evaluation depend.

    The top lists suffice for the cut-offs of the config and of COMPARED_METRICS. Only `auc` needs the positions of all targets.
    """
    return RankingSettings(
        k=max(*config.ks, *(k for _, k in COMPARED_METRICS.values())),
        top_only="auc" not in config.metrics,
        exclude_seen=config.exclude_seen,
        max_users=config.max_users,
    )


def sampled_users(num_users: int, *, max_users: int | None) -> Int64Array:
    """Return the ascending indices of the evaluated users: all users, or a random sample of `max_users` with a fixed seed."""
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
        is_known_B=spec.is_known(history_length_B=history.lengths, user_row_B=user_row_B, has_context=True),
        seen=history if exclude_seen else JaggedArray.empty(len(history)),
        targets=store.targets(user_row_B, split),
    )
    return queries, history


def queries_with_cold_targets(queries: Queries, cold_row_C: NDArray[np.int64], *, num_items: int) -> Queries:
    """Return the queries with a cold target, for a ranking of the cold items alone. No user has seen a cold item."""
    queries_without_seen_items = replace(queries, seen=JaggedArray.empty(len(queries.targets)))
    return restrict_to_candidates(queries_without_seen_items, cold_row_C, num_items=num_items)


class HeldOutSplit:
    """The evaluated users of a split, in chunks.

    Attributes:
        name: name of the split.
        popularity_order_I, cold_row_C: see HeldOutUsers.
    """

    def __init__(
        self,
        split: EvaluationSplit,
        *,
        config: EvaluationConfig,
        store: EventStore,
        export: ExportManifest,
        interactions: InteractionsManifest,
    ) -> None:
        """Open the split. The query vectors are memory-mapped only if the export has no ranking for `config`."""
        self.name, self._store, self._exclude_seen = split, store, config.exclude_seen
        self._user_row_R = np.load(export.path(f"query_users_{split}.npy"), mmap_mode="r")
        self._index_B = sampled_users(len(self._user_row_R), max_users=config.max_users)
        self._query_vector_RD = None
        if export.ranking != ranking_settings(config):
            self._query_vector_RD = np.load(export.path(f"query_vectors_{split}.npy"), mmap_mode="r")
        self._spec = ModelSpec.model_validate_json(export.path("model.json").read_bytes())
        self.popularity_order_I = popularity_order_before(split, store=store, interactions=interactions)
        self.cold_row_C = cold_rows(store, split)

    def __iter__(self) -> Iterator[HeldOutUsers]:
        """Yield at most CHUNK_USERS users at a time."""
        return map(self.load, chunk_slices(len(self._index_B), length=CHUNK_USERS))

    def load(self, user_slice: slice = slice(None)) -> HeldOutUsers:
        """Load a slice of the evaluated users, by default all of them."""
        index_B = self._index_B[user_slice]
        user_row_B, query_BD = np.asarray(self._user_row_R[index_B]), torch.empty((len(index_B), 0))
        if self._query_vector_RD is not None:
            query_BD = torch.from_numpy(self._query_vector_RD[index_B])
        queries, history = queries_of(
            user_row_B, query_BD, split=self.name, exclude_seen=self._exclude_seen, store=self._store, spec=self._spec
        )
        known_negatives = None
        if self._store.known_negatives is not None:
            # An item with an event is not a known negative. The event store ensures this for training events, but not for
            # validation events.
            known_negatives = self._store.known_negatives.before(user_row_B, self.name).difference(
                history, bound=self._store.num_items
            )
        return HeldOutUsers(
            queries=queries,
            user_row_B=user_row_B,
            history=history,
            popularity_order_I=self.popularity_order_I,
            cold_row_C=self.cold_row_C,
            known_negatives=known_negatives,
        )
