"""Input of the served query tower: histories and features of users, as rows of the embedding tables.

Shapes: B queries, L entries of all lists of one feature.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.feature_store import FeatureForm, FeatureStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.models.spec import ModelSpec


@dataclass(frozen=True)
class JaggedRows:
    """A list of table rows for each query, with one weight per row if the feature is weighted."""

    row_L: Tensor
    """int64."""
    offset: Tensor
    """int64 [B + 1]: list b is row_L[offset[b]:offset[b + 1]]."""
    weight_L: Tensor | None = None
    """float32."""


@dataclass(frozen=True)
class QueryBatch:
    """Input of a batch of queries: the item rows of each history, oldest first, and the rows of each served table."""

    history: JaggedRows
    features: dict[str, JaggedRows]

    @property
    def num_queries(self) -> int:
        """Number of queries."""
        return len(self.history.offset) - 1


@dataclass(frozen=True)
class QueryBatchBuilder:
    """Builder of the input of a model's query tower. features: the user features of the package."""

    spec: ModelSpec
    features: FeatureStore

    def build(self, user_row_B: NDArray[np.int64], history: JaggedArray) -> QueryBatch:
        """Build the batch of B queries.

        Args:
            user_row_B: -1 for a user who is not in the vocabulary. Such a user has no features.
            history: item rows, oldest first. Only the newest items are used, up to the history length of the model.
        """
        recent_history = history.last_values(self.spec.history_length)
        is_known_B = user_row_B >= 0
        features = {}
        for table_name in served_tables(self.spec):
            if table_name == "user":
                row_lists, weight_L = JaggedArray.from_single_values(user_row_B[is_known_B]), None
            else:
                row_lists, weight_L = self.features.feature_by_key[table_name].rows_and_weights(user_row_B[is_known_B])
            length_B = np.zeros(len(user_row_B), np.int64)
            length_B[is_known_B] = row_lists.lengths
            features[table_name] = _to_tensors(JaggedArray.from_lengths(length_B, row_lists.values_L), weight_L)
        return QueryBatch(history=_to_tensors(recent_history, None), features=features)


def user_features(spec: ModelSpec) -> dict[str, FeatureForm]:
    """Return user feature -> form. Other features are not available while serving."""
    return {feature_name: form for feature_name, form in spec.forms.items() if feature_name.startswith("user.")}


def served_tables(spec: ModelSpec) -> list[str]:
    """Return the tables that a query looks up in addition to its history: the user table and the tables of user features."""
    return (["user"] if spec.config.learn_user_embedding else []) + list(user_features(spec))


def _to_tensors(lists: JaggedArray, weight_L: NDArray[np.float32] | None) -> JaggedRows:
    return JaggedRows(
        row_L=torch.from_numpy(lists.values_L),
        offset=torch.from_numpy(lists.offset),
        weight_L=None if weight_L is None else torch.from_numpy(weight_L),
    )
