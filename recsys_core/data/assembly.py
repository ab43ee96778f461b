"""From users, their histories and candidate items to a Batch: who is looked up, once each.

Shapes: B queries, K candidates, U distinct items, T items of all histories.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_core.data.batch import Batch, keyed_jagged
from recsys_core.data.batch_keys import POOLED, POOLED_WEIGHTED, UNPOOLED
from recsys_core.data.events import Rows
from recsys_core.data.features.store import Feature, FeatureStore
from recsys_core.data.jagged import JaggedArray


@dataclass(frozen=True)
class Assembler:
    """Makes batches.

    Args:
        user: where the users' own table finds them, a key of Batch.sparse; None: they have none.
        features: those of users, events and items, if any.
    """

    user: str | None
    features: FeatureStore | None = None

    def batch(
        self,
        *,
        user: Rows,
        position: Rows,
        history: JaggedArray,
        candidate: Rows,
        weight: NDArray[np.float32] | None = None,
    ) -> Batch:
        """B queries and K candidates.

        position: [B], where in the log each query's event is, for features of the event. candidate: [K], item rows, the B
        positives first; may be empty where queries alone are encoded.
        """
        code, item = pd.factorize(np.concatenate([candidate, history.values_L]))
        item = _at_least_one(item)  # no candidate and no history points at it
        sparse, item_weight = self._queries(user, position=position), {}
        lists = {"item": JaggedArray.from_single_values(item)}
        for key, feature in self._side("item"):
            lists[key], weight_T = feature.at(item)
            if weight_T is not None:
                item_weight[key] = torch.from_numpy(weight_T)
        if self.user == UNPOOLED:
            lists["user"] = JaggedArray.from_single_values(_at_least_one(user))
        sparse[UNPOOLED] = keyed_jagged(lists, samples=max(len(item), len(user)))
        return Batch(
            sparse=sparse,
            batch_size=len(user),
            item_row_V=torch.from_numpy(item),
            candidate_C=torch.from_numpy(code[: len(candidate)]),
            history_H=torch.from_numpy(code[len(candidate) :]),
            history_offset=torch.from_numpy(history.offset),
            item_weight=item_weight,
            weight=None if weight is None else torch.from_numpy(weight),
        )

    def items(self, item: Rows) -> Batch:
        """`item` alone, in that order; no query."""
        nobody = np.zeros(0, np.int64)
        return self.batch(user=nobody, position=nobody, history=JaggedArray.empty(0), candidate=item)

    def _queries(self, user: Rows, *, position: Rows) -> dict[str, KeyedJaggedTensor]:
        plain = {"user": JaggedArray.from_single_values(user)} if self.user == POOLED else {}
        weighted: dict[str, JaggedArray] = {}
        weights: list[NDArray[np.float32]] = []
        for side, index in (("user", user), ("context", position)):
            for key, feature in self._side(side):
                lists, weight_T = feature.at(index)
                if weight_T is None:
                    plain[key] = lists
                else:
                    weighted[key] = lists
                    weights.append(weight_T)
        sparse = {}
        if plain:
            sparse[POOLED] = keyed_jagged(plain, samples=len(user))
        if weighted:
            sparse[POOLED_WEIGHTED] = keyed_jagged(weighted, samples=len(user), weight_T=np.concatenate(weights))
        return sparse

    def _side(self, side: str) -> list[tuple[str, Feature]]:
        features = self.features.features if self.features is not None else {}
        return [(key, feature) for key, feature in features.items() if key.startswith(f"{side}.")]


def _at_least_one(row: Rows) -> Rows:
    """`row`, or one row where it is empty: FBGEMM on a GPU refuses a lookup without any (pytorch/FBGEMM#3750)."""
    return row if len(row) else np.zeros(1, np.int64)
