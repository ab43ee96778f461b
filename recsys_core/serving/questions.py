"""What is asked of the query tower: users by row, their histories, their features.

Shapes: B queries.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recsys_core.data.assembly import single
from recsys_core.data.batch import QUERY, QUERY_WEIGHTED, ROWS, Batch, keyed_jagged
from recsys_core.data.features.store import FeatureStore
from recsys_core.data.lists import Lists
from recsys_core.models.spec import ModelSpec


@dataclass(frozen=True)
class Questions:
    """Makes the tower's input. features: those of users; features of an event are not known when serving, and stay empty."""

    spec: ModelSpec
    features: FeatureStore

    def batch(self, user_row_B: NDArray[np.int64], history: Lists) -> Batch:
        """user_row_B: -1 for a user without a row. history: item rows per query, oldest first; the newest are used."""
        recent = history.last(self.spec.config.history.length)
        known_B = user_row_B >= 0
        plain: dict[str, Lists] = {}
        weighted: dict[str, Lists] = {}
        weights: list[NDArray[np.float32]] = []
        for name, table in self.spec.on_side("query").items():
            lists, weight_T = Lists.empty(int(known_B.sum())), np.zeros(0, np.float32)
            if name == "user":
                lists = single(user_row_B[known_B])
            elif name in self.features.features:
                lists, found = self.features.features[name].at(user_row_B[known_B])
                weight_T = weight_T if found is None else found
            length_B = np.zeros(len(user_row_B), np.int64)
            length_B[known_B] = lists.length_N
            (weighted if table.weighted else plain)[name] = Lists.of_lengths(length_B, lists.row_T)
            if table.weighted:
                weights.append(weight_T)
        sparse = {ROWS: keyed_jagged({"item": single(recent.row_T)}, samples=len(recent.row_T))}
        if plain:
            sparse[QUERY] = keyed_jagged(plain, samples=len(user_row_B))
        if weighted:
            sparse[QUERY_WEIGHTED] = keyed_jagged(weighted, samples=len(user_row_B), weight_T=np.concatenate(weights))
        return Batch(
            sparse=sparse,
            batch_size=len(user_row_B),
            item_row_U=torch.from_numpy(recent.row_T),
            candidate_K=torch.zeros(0, dtype=torch.int64),
            history_T=torch.arange(len(recent.row_T)),
            history_offset=torch.from_numpy(recent.offset),
            item_weight={},
        )
