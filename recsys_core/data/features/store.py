"""Memory-mapped feature arrays (see FeaturesManifest), and the lookup of the features of a batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.events import memory_map
from recsys_core.data.jagged import Int64Array, JaggedArray, ragged_ranges
from recsys_core.manifests import FeatureFacts, FeaturesManifest

FeatureForm = Literal["single", "list", "weighted_list", "number"]
"""Content of a feature for one user, item or event.

single: one row; list: any number of rows; weighted_list: rows with weights; number: one row, with the number as its weight.
"""


@dataclass(frozen=True)
class Feature:
    """One feature of all users, items or events.

    `row` contains rows of the feature's embedding table. Without `offset`, each user, item or event has one entry of `row`.
    With `offset`, the n-th user, item or event has the list row[offset[n]:offset[n + 1]]. `weight` is None or has one
    entry for each entry of `row`.
    """

    row: NDArray[np.int32]
    offset: Int64Array | None
    weight: NDArray[np.float32] | None

    def lists_of(self, index: Int64Array) -> tuple[JaggedArray, NDArray[np.float32] | None]:
        """Return the table rows of each user, item or event in `index`, and the weight of each of these rows, if any."""
        if self.offset is None:
            lists = JaggedArray(np.arange(len(index) + 1), self.row[index].astype(np.int64))
            return lists, None if self.weight is None else self.weight[index]
        start = self.offset[index]
        length = self.offset[index + 1] - start
        entry_L = ragged_ranges(start, length)
        return JaggedArray.from_lengths(length, self.row[entry_L]), None if self.weight is None else self.weight[entry_L]


@dataclass(frozen=True)
class FeatureStore:
    """All features by key: user.<name>, item.<name>, context.<name>."""

    features: dict[str, Feature]

    @classmethod
    def open(cls, manifest: FeaturesManifest) -> Self:
        """Map the arrays of a completed stage."""
        return cls.read(manifest.folder, {key: feature_form(facts) for key, facts in manifest.features.items()})

    @classmethod
    def read(cls, folder: Path, forms: Mapping[str, FeatureForm]) -> Self:
        """Map the arrays of the features in `forms`, from any folder with the file names of FeaturesManifest."""
        features = {}
        for key, form in forms.items():
            features[key] = Feature(
                row=memory_map(folder / f"{key}.row.npy"),
                offset=memory_map(folder / f"{key}.offset.npy") if form in ("list", "weighted_list") else None,
                weight=memory_map(folder / f"{key}.weight.npy") if form in ("weighted_list", "number") else None,
            )
        return cls(features)


def feature_form(facts: FeatureFacts) -> FeatureForm:
    """Return the form of a feature."""
    if facts.kind in ("list", "weighted_list"):
        return facts.kind
    return "number" if facts.is_weighted else "single"
