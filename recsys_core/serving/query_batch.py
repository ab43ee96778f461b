"""Input of the query tower: the histories of users and their features, as rows of the served tables.

Shapes: B queries, T rows of all lists of one feature.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.data.features.store import FeatureForm, FeatureStore
from recsys_core.data.jagged import JaggedArray
from recsys_core.models.spec import ModelSpec


@dataclass(frozen=True)
class RowLists:
    """A list of table rows for each of B queries, and a weight for each row where the feature has weights."""

    row_T: Tensor
    """int64 [T]."""
    offset: Tensor
    """int64 [B + 1]: list b is row_T[offset[b]:offset[b + 1]]."""
    weight_T: Tensor | None = None
    """float32 [T]."""


@dataclass(frozen=True)
class QueryBatch:
    """B queries: item rows of each history, oldest first, and rows of each table in `served_tables`."""

    history: RowLists
    features: dict[str, RowLists]

    @property
    def size(self) -> int:
        """B."""
        return len(self.history.offset) - 1


@dataclass(frozen=True)
class Questions:
    """Makes the tower's input. features: those of users."""

    spec: ModelSpec
    features: FeatureStore

    def batch(self, user_row_B: NDArray[np.int64], history: JaggedArray) -> QueryBatch:
        """user_row_B: -1 for a user without a row. history: item rows per query, oldest first; the newest are used."""
        recent = history.last(self.spec.config.history.length)
        known_B = user_row_B >= 0
        features = {}
        for name in served_tables(self.spec):
            if name == "user":
                lists, weight_T = JaggedArray.from_single_values(user_row_B[known_B]), None
            else:
                lists, weight_T = self.features.features[name].at(user_row_B[known_B])
            length_B = np.zeros(len(user_row_B), np.int64)
            length_B[known_B] = lists.lengths
            features[name] = _row_lists(JaggedArray.from_lengths(length_B, lists.values_L), weight_T)
        return QueryBatch(history=_row_lists(recent, None), features=features)


def user_features(spec: ModelSpec) -> dict[str, FeatureForm]:
    """Form of each feature of users; those of events are not known when serving."""
    return {key: form for key, form in spec.forms.items() if key.startswith("user.")}


def served_tables(spec: ModelSpec) -> list[str]:
    """Tables that a query looks up besides the history: the users' own, and one for each feature of users."""
    return (["user"] if spec.config.user_id else []) + list(user_features(spec))


def _row_lists(lists: JaggedArray, weight_T: NDArray[np.float32] | None) -> RowLists:
    return RowLists(
        row_T=torch.from_numpy(lists.values_L),
        offset=torch.from_numpy(lists.offset),
        weight_T=None if weight_T is None else torch.from_numpy(weight_T),
    )
