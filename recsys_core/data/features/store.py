"""The features that FeaturesManifest describes, mapped, and what of them belongs to a batch.

Shapes: T values of all lists together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.events import mapped
from recsys_core.data.jagged import Int64Array, JaggedArray, ragged_ranges
from recsys_core.manifests import FeatureFacts, FeaturesManifest

FeatureForm = Literal["single", "list", "weighted_list", "number"]
"""One row; any number of rows; the same with weights; one row with a weight, the number itself."""


@dataclass(frozen=True)
class Feature:
    """One feature: one row each where `offset` is None, else list n is row[offset[n]:offset[n + 1]]. A weight for each row."""

    row: NDArray[np.int32]
    offset: Int64Array | None
    weight: NDArray[np.float32] | None

    def at(self, index: Int64Array) -> tuple[JaggedArray, NDArray[np.float32] | None]:
        """The lists of `index` and, where the feature is weighted, a weight for each of their rows."""
        if self.offset is None:
            lists = JaggedArray(np.arange(len(index) + 1), self.row[index].astype(np.int64))
            return lists, None if self.weight is None else self.weight[index]
        start = self.offset[index]
        length = self.offset[index + 1] - start
        place = ragged_ranges(start, length)
        return JaggedArray.from_lengths(length, self.row[place]), None if self.weight is None else self.weight[place]


@dataclass(frozen=True)
class FeatureStore:
    """All features, by key: user.<name>, item.<name>, context.<name>."""

    features: dict[str, Feature]

    @classmethod
    def open(cls, manifest: FeaturesManifest) -> Self:
        """Maps the arrays of a committed stage."""
        return cls.read(manifest.folder, {key: feature_form(facts) for key, facts in manifest.features.items()})

    @classmethod
    def read(cls, folder: Path, forms: Mapping[str, FeatureForm]) -> Self:
        """Maps the arrays of `forms` in any folder that has them under the names of FeaturesManifest."""
        features = {}
        for key, form in forms.items():
            features[key] = Feature(
                row=mapped(folder / f"{key}.row.npy"),
                offset=mapped(folder / f"{key}.offset.npy") if form in ("list", "weighted_list") else None,
                weight=mapped(folder / f"{key}.weight.npy") if form in ("weighted_list", "number") else None,
            )
        return cls(features)


def feature_form(facts: FeatureFacts) -> FeatureForm:
    """How many values a feature has, and whether with weights."""
    if facts.kind in ("list", "weighted_list"):
        return facts.kind
    return "number" if facts.weighted else "single"
