"""Assembly of a Batch from users, histories and candidates, with the distinct items and the feature values to look up.

Shapes: B queries, C candidates, V distinct items, H history entries of all queries, L ragged entries.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_core.dataset.batch import Batch, keyed_jagged
from recsys_core.dataset.batch_keys import POOLED, POOLED_WEIGHTED, UNPOOLED
from recsys_core.dataset.feature_store import Feature, FeatureStore
from recsys_core.dataset.jagged import Int64Array, JaggedArray


@dataclass(frozen=True)
class Assembler:
    """Builds batches.

    Args:
        user_batch_key: the key of Batch.sparse for the table of user ids; None: the model has no such table.
        features: features of users, events and items; None: the model uses none.
    """

    user_batch_key: str | None
    features: FeatureStore | None = None

    def batch(
        self,
        *,
        user_row_B: Int64Array,
        event_index_B: Int64Array,
        history: JaggedArray,
        candidate_row_C: Int64Array,
        loss_weight_B: NDArray[np.float32] | None = None,
    ) -> Batch:
        """Build a batch of B queries and C candidates.

        Args:
            user_row_B: rows of the users.
            event_index_B: index of each query's event in the log; it selects the values of the context features.
            history: B lists of item rows.
            candidate_row_C: item rows, the B positives first; empty if only queries are encoded.
            loss_weight_B: factor of each query's loss; None: all factors are 1.
        """
        position_in_V, item_row_V = pd.factorize(np.concatenate([candidate_row_C, history.values_L]))
        item_row_V = _at_least_one_row(item_row_V)  # one unused item if there are no candidates and no histories
        sparse, item_feature_weight = self._query_features(user_row_B, event_index_B), {}
        unpooled = {"item": JaggedArray.from_single_values(item_row_V)}
        for key, feature in self._keyed_features("item"):
            unpooled[key], weight_L = feature.rows_and_weights(item_row_V)
            if weight_L is not None:
                item_feature_weight[key] = torch.from_numpy(weight_L)
        if self.user_batch_key == UNPOOLED:
            unpooled["user"] = JaggedArray.from_single_values(_at_least_one_row(user_row_B))
        sparse[UNPOOLED] = keyed_jagged(unpooled, num_samples=max(len(item_row_V), len(user_row_B)))
        return Batch(
            sparse=sparse,
            batch_size=len(user_row_B),
            item_row_V=torch.from_numpy(item_row_V),
            candidate_index_C=torch.from_numpy(position_in_V[: len(candidate_row_C)]),
            history_index_H=torch.from_numpy(position_in_V[len(candidate_row_C) :]),
            history_offset=torch.from_numpy(history.offset),
            item_feature_weight=item_feature_weight,
            loss_weight=None if loss_weight_B is None else torch.from_numpy(loss_weight_B),
        )

    def item_batch(self, item_row: Int64Array) -> Batch:
        """Build a batch of candidates without queries. The rows in `item_row` must be distinct; the batch keeps their order."""
        empty = np.zeros(0, np.int64)
        return self.batch(user_row_B=empty, event_index_B=empty, history=JaggedArray.empty(0), candidate_row_C=item_row)

    def _query_features(self, user_row_B: Int64Array, event_index_B: Int64Array) -> dict[str, KeyedJaggedTensor]:
        pooled = {"user": JaggedArray.from_single_values(user_row_B)} if self.user_batch_key == POOLED else {}
        pooled_weighted: dict[str, JaggedArray] = {}
        weight_arrays: list[NDArray[np.float32]] = []
        for side, index_B in (("user", user_row_B), ("context", event_index_B)):
            for key, feature in self._keyed_features(side):
                table_rows, weight_L = feature.rows_and_weights(index_B)
                if weight_L is None:
                    pooled[key] = table_rows
                else:
                    pooled_weighted[key] = table_rows
                    weight_arrays.append(weight_L)
        sparse = {}
        if pooled:
            sparse[POOLED] = keyed_jagged(pooled, num_samples=len(user_row_B))
        if pooled_weighted:
            weight_L = np.concatenate(weight_arrays)
            sparse[POOLED_WEIGHTED] = keyed_jagged(pooled_weighted, num_samples=len(user_row_B), weight_L=weight_L)
        return sparse

    def _keyed_features(self, side: str) -> list[tuple[str, Feature]]:
        feature_by_key = self.features.feature_by_key if self.features is not None else {}
        return [(key, feature) for key, feature in feature_by_key.items() if key.startswith(f"{side}.")]


def _at_least_one_row(rows: Int64Array) -> Int64Array:
    """Return `rows`, or [0] if `rows` is empty. FBGEMM on a GPU rejects an empty lookup (pytorch/FBGEMM#3750)."""
    return rows if len(rows) else np.zeros(1, np.int64)
