"""Validation during training: exact metrics on the validation split, which all ranks compute together.

Shapes: I items, U users to validate on, B queries of a batch, L targets of all users, D width of an output vector.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.jagged import Int64Array
from recsys_core.errors import InputError
from recsys_core.evaluation import metrics
from recsys_core.evaluation.baselines import cold_rows, popularity_order_before
from recsys_core.evaluation.metrics import TargetPositions
from recsys_core.evaluation.ranking.queries import Queries
from recsys_core.evaluation.ranking.served import rank_among, rank_as_served
from recsys_core.manifests import InteractionsManifest
from recsys_core.seeds import VALIDATION_USERS_SEED
from recsys_core.training.config import ValidationConfig
from recsys_core.training.export.encoding import Encoder, RankWriter

METRIC_BY_NAME = {"recall": metrics.recall, "ndcg": metrics.ndcg, "hit_rate": metrics.hit_rate}


class Validator:
    """Measures the model with the ranking of the served retriever, which ranks items by popularity for unknown users.

    Every rank encodes its share of the items, then ranks all items for its share of the users.

    Args:
        work_folder: folder that all ranks can read. Each rank writes its part of the item vectors to it.
        heartbeat_path: file to touch during the validation.
    """

    def __init__(
        self,
        config: ValidationConfig,
        *,
        encoder: Encoder,
        interactions: InteractionsManifest,
        work_folder: Path,
        heartbeat_path: Path,
    ) -> None:
        self.config = config
        self._encoder, self._store, self._work_folder = encoder, encoder.store, work_folder
        self._writer = RankWriter(encoder.process, heartbeat_path=heartbeat_path)
        self._cold_rows = cold_rows(self._store, "validation") if config.candidates == "cold" else None
        self._user_row_U = users_to_validate(config, store=self._store, cold_items=self._cold_rows)
        spec = encoder.spec
        history_length_U = self._store.items_before(self._user_row_U, "validation").lengths
        self._is_known_U = spec.is_known(history_length_B=history_length_U, user_row_B=self._user_row_U, has_context=True)
        self._popularity_order_I = np.arange(spec.num_items, dtype=np.int32)
        if not self._is_known_U.all():  # only unknown users get this order, and computing it reads all ids
            self._popularity_order_I = popularity_order_before("validation", store=self._store, interactions=interactions)

    @property
    def has_users(self) -> bool:
        """Whether any user has a validation event with an item that the user has not seen before."""
        return len(self._user_row_U) > 0

    @property
    def metric_name(self) -> str:
        """Name of the metric that selects the best epoch, e.g. ndcg@10."""
        return f"{self.config.metric}@{self.config.k}"

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Collective. Return recall, ndcg and hit_rate at k: means over the users, the same on every rank."""
        task, process = self._encoder.task, self._encoder.process
        task.eval()
        item_vector_ID = self._encode_items()
        totals = torch.zeros(1 + len(METRIC_BY_NAME), dtype=torch.float64)  # number of users, then the total of each metric
        for user_index_B, is_in_range in self._writer.batches(len(self._user_row_U)):
            query_BD = self._encoder.encode_queries(self._user_row_U[user_index_B], split="validation").cpu()
            if not is_in_range:
                continue
            positions = self._target_positions(user_index_B, query_BD=query_BD, item_vector_ID=item_vector_ID)
            totals[0] += positions.num_users
            for metric_index, metric in enumerate(METRIC_BY_NAME.values(), 1):
                totals[metric_index] += metric(positions, k=self.config.k).sum()
            self._writer.touch_heartbeat()
        totals = totals.to(process.device)
        dist.all_reduce(totals)
        task.train()
        num_users, *metric_totals = totals
        return {
            f"{name}@{self.config.k}": float(total / num_users)
            for name, total in zip(METRIC_BY_NAME, metric_totals, strict=True)
        }

    def _encode_items(self) -> Tensor:
        """Collective. Return the vectors of all items, on the CPU of every rank."""
        spec, vectors_path = self._encoder.spec, self._work_folder / "validation_items"
        with self._writer.part(vectors_path) as part:
            self._writer.write(
                [part],
                num_rows=spec.num_items,
                encode=lambda rows: self._encoder.encode_items(rows)[1:],
                array_name="validation",
            )
        item_vector_ID = np.zeros((spec.num_items, spec.config.trained_dim), np.float32)
        self._writer.fill(item_vector_ID, path=vectors_path)
        self._writer.remove_part(vectors_path)
        return torch.from_numpy(item_vector_ID)

    def _target_positions(self, user_index_B: Int64Array, *, query_BD: Tensor, item_vector_ID: Tensor) -> TargetPositions:
        """Return the positions of the targets in the rankings for the users `self._user_row_U[user_index_B]`."""
        user_row_B = self._user_row_U[user_index_B]
        seen_items, targets = self._store.items_before(user_row_B, "validation"), self._store.targets(user_row_B, "validation")
        queries = Queries(query_BD, is_known_B=self._is_known_U[user_index_B], seen=seen_items, targets=targets)
        rank_items = rank_as_served if self._cold_rows is None else partial(rank_among, candidate_rows=self._cold_rows)
        ranking = rank_items(queries, item_vector_ID=item_vector_ID, order_I=self._popularity_order_I, k=0)
        return ranking.target_positions()


def users_to_validate(config: ValidationConfig, *, store: EventStore, cold_items: NDArray[np.int64] | None) -> Int64Array:
    """Return the rows of the users to validate on: a fixed random sample, without the users who have seen all their targets.

    Raises InputError if config.candidates is cold and there is no validation event of a cold item.
    """
    user_row_U = store.users_with_targets("validation")
    if cold_items is not None and len(user_row_U):
        is_cold_I = np.zeros(store.num_items, np.bool_)
        is_cold_I[cold_items] = True
        targets = store.targets(user_row_U, "validation")
        user_row_U = user_row_U[targets.filter(is_cold_I[targets.values_L]).lengths > 0]
        if not len(user_row_U):
            raise InputError(
                "training.validation.candidates is cold, but every validation event has an item with training events; "
                "hold out items (interactions.split.validation_unit: item), or set training.validation.candidates to all"
            )
    if len(user_row_U) > config.max_users:
        user_row_U = np.sort(np.random.default_rng(VALIDATION_USERS_SEED).choice(user_row_U, config.max_users, replace=False))
    # A target that the user has seen is not ranked, so a user without unseen targets has no metric.
    unseen_targets = store.targets(user_row_U, "validation").difference(
        store.items_before(user_row_U, "validation"), bound=store.num_items
    )
    return user_row_U[unseen_targets.lengths > 0]
