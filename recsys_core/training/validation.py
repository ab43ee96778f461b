"""Metrics of the validation split while training, over the full catalogue.

Shapes: I items, E users, O output width.
"""

from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist

from recsys_core.data.events import EventStore
from recsys_core.errors import InputError
from recsys_core.evaluation import metrics
from recsys_core.evaluation.baselines import popularity_before
from recsys_core.evaluation.cold import cold_rows, rank_among
from recsys_core.evaluation.ranking import rank_served
from recsys_core.manifests import InteractionsManifest
from recsys_core.models.spec import ModelSpec
from recsys_core.seeds import VALIDATION_USERS_SEED
from recsys_core.training.config import ValidationConfig
from recsys_core.training.encoding import Encoder, RankWriter
from recsys_core.training.process_group import Process
from recsys_core.training.sharded_array import fill_array, remove_part, writing_part

_METRICS = {"recall": metrics.recall, "ndcg": metrics.ndcg, "hit_rate": metrics.hit_rate}


class Validator:
    """Every rank encodes its share of the items and ranks all of them for its share of the users, as they are served."""

    def __init__(
        self,
        config: ValidationConfig,
        *,
        spec: ModelSpec,
        interactions: InteractionsManifest,
        store: EventStore,
        process: Process,
        work: Path,
        alive: Path,
    ) -> None:
        self._config, self._store, self._process, self._work = config, store, process, work
        self._writer = RankWriter(process, alive=alive)
        self._cold = cold_rows(store, "validation") if config.candidates == "cold" else None
        users = store.users_with_targets("validation")
        if self._cold is not None and len(users):
            cold = np.zeros(len(store.item_count), np.bool_)
            cold[self._cold] = True
            targets = store.targets(users, "validation")
            users = users[targets.filter(cold[targets.values_L]).lengths > 0]
            if not len(users):
                raise InputError(
                    "training.validation.candidates is cold, but no validation event is of an item without a training event; "
                    "hold out items (interactions.split.validation_by: item), or set candidates to all"
                )
        if len(users) > config.max_users:
            users = np.sort(np.random.default_rng(VALIDATION_USERS_SEED).choice(users, config.max_users, replace=False))
        # Without a target that its user had not seen there is nothing to rank: the mean over such users alone is no number.
        unseen = store.targets(users, "validation").difference(store.before(users, "validation"), bound=len(store.item_count))
        self._users = users[unseen.lengths > 0]
        history_length = store.before(self._users, "validation").lengths
        self._known = spec.knows(history_length_B=history_length, user_row_B=self._users)
        self._popular_I = np.arange(spec.num_items, dtype=np.int32)
        if not self._known.all():  # the order has no use otherwise, and every rank reads all ids for it
            self._popular_I = popularity_before("validation", store=store, interactions=interactions)

    @property
    def can_measure(self) -> bool:
        """Whether the validation split holds an event of an item that its user had not seen."""
        return len(self._users) > 0

    @property
    def name(self) -> str:
        """Of the metric that decides, e.g. ndcg@10."""
        return f"{self._config.metric}@{self._config.k}"

    @torch.no_grad()
    def measure(self, encoder: Encoder) -> dict[str, float]:
        """Collective. recall, ndcg and hit_rate at k: means over the users, the same on every rank."""
        task, config = encoder.task, self._config
        task.eval()
        spec = task.head.spec
        path = self._work / "validation_items"
        with writing_part(path, process=self._process) as part:
            self._writer.write([part], count=spec.num_items, encode=lambda rows: encoder.items(rows)[1:], what="validation")
        item_IO = np.zeros((spec.num_items, spec.config.output_dim), np.float32)
        fill_array(path, item_IO, process=self._process, on_record=self._writer.sign)
        remove_part(path, process=self._process)
        all_IO = torch.from_numpy(item_IO)
        sums = torch.zeros(1 + len(_METRICS), dtype=torch.float64)
        for places, is_ours in self._writer.batches(len(self._users)):
            users = self._users[places]
            query_EO = encoder.queries(users, split="validation").cpu()
            if not is_ours:
                continue
            seen, targets = self._store.before(users, "validation"), self._store.targets(users, "validation")
            known, order = self._known[places], self._popular_I
            if self._cold is None:
                ranking = rank_served(
                    query_EO, is_known_B=known, item_ID=all_IO, order_I=order, seen=seen, targets=targets, k=0
                )
            else:
                ranking = rank_among(
                    query_EO, is_known_B=known, item_ID=all_IO, order_I=order, candidate_rows=self._cold, seen=seen,
                    targets=targets, k=0,
                )  # fmt: skip
            ranks = ranking.target_positions()
            sums[0] += ranks.num_users
            for place, metric in enumerate(_METRICS.values(), 1):
                sums[place] += metric(ranks, k=config.k).sum()
        sums = sums.to(self._process.device)
        dist.all_reduce(sums)
        task.train()
        return {f"{name}@{config.k}": float(sums[place] / sums[0]) for place, name in enumerate(_METRICS, 1)}
