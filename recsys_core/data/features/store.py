"""The features that FeaturesManifest describes, mapped, and what of them belongs to a batch.

Shapes: B queries, K = B + N candidates, T values of all lists together.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.events import Rows, mapped
from recsys_core.data.features.config import Side
from recsys_core.data.lists import Lists, ragged_ranges
from recsys_core.manifests import FeatureFacts, FeaturesManifest


@dataclass(frozen=True)
class Feature:
    """One feature: one row each where `offset` is None, else list n is row[offset[n]:offset[n + 1]]. A weight for each row."""

    row: NDArray[np.int32]
    offset: Rows | None
    weight: NDArray[np.float32] | None

    def at(self, index: Rows) -> tuple[Lists, NDArray[np.float32] | None]:
        """The lists of `index` and, where the feature is weighted, a weight for each of their rows."""
        if self.offset is None:
            lists = Lists(np.arange(len(index) + 1), self.row[index].astype(np.int64))
            return lists, None if self.weight is None else self.weight[index]
        start = self.offset[index]
        length = self.offset[index + 1] - start
        place = ragged_ranges(start, length)
        return Lists.of_lengths(length, self.row[place]), None if self.weight is None else self.weight[place]


@dataclass(frozen=True)
class FeatureStore:
    """All features, by key: user.<name>, item.<name>, context.<name>; `facts` is what the manifest says of them."""

    features: dict[str, Feature]
    facts: dict[str, FeatureFacts] = field(default_factory=dict)

    @classmethod
    def open(cls, manifest: FeaturesManifest) -> Self:
        """Maps the arrays of a committed stage."""
        features = {}
        for key, facts in manifest.features.items():
            is_list = facts.kind in ("list", "weighted_list")
            features[key] = Feature(
                row=mapped(manifest.path(f"{key}.row.npy")),
                offset=mapped(manifest.path(f"{key}.offset.npy")) if is_list else None,
                weight=mapped(manifest.path(f"{key}.weight.npy")) if facts.weighted else None,
            )
        return cls(features, dict(manifest.features))

    def of_side(self, side: Side) -> dict[str, FeatureFacts]:
        """The features of users, items or events, by key, in the order of the config: kind, rows of the table, and the like."""
        return {key: facts for key, facts in self.facts.items() if key.startswith(f"{side}.")}

    def of_batch(
        self, *, user: Rows, position: Rows, item: Rows
    ) -> tuple[dict[str, Lists], dict[str, Lists], NDArray[np.float32] | None]:
        """The features of B users at B positions of the log and of K items: those without weights, those with, the weights.

        The weights [T] are those of the weighted features one after the other; None where there are none.
        """
        index = {"user": user, "context": position, "item": item}
        plain: dict[str, Lists] = {}
        weighted: dict[str, Lists] = {}
        weights = []
        for key, feature in self.features.items():
            lists, weight_T = feature.at(index[key.partition(".")[0]])
            if weight_T is None:
                plain[key] = lists
            else:
                weighted[key] = lists
                weights.append(weight_T)
        return plain, weighted, np.concatenate(weights) if weights else None
