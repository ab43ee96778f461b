"""Memory-mapped feature arrays (see FeaturesManifest), and the lookup of the features of a batch.

Shapes: L values of all returned lists, N numbers.

This module does not import torch, because processes without torch read model specs, which use this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import Int64Array, JaggedArray, ragged_ranges
from recsys_core.dataset.layout import memory_map
from recsys_core.manifests import FeaturesManifest, IngestedFeature

UNPOOLED, POOLED, POOLED_WEIGHTED = "unpooled", "pooled", "pooled_weighted"
"""Kinds of lookup, the keys of `Batch.sparse`.

UNPOOLED: one embedding per value; used for item rows, item features and user rows. POOLED: one vector per query, which pools
the embeddings of its values. POOLED_WEIGHTED: like POOLED, with a weight for each value.
"""

FeatureForm = Literal["single", "list", "weighted_list", "number"]
"""Content of a feature for one user, item or event.

single: one row; list: any number of rows; weighted_list: rows with weights; number: one row, with the number as its weight.
"""

ARRAY_NAMES_BY_FORM: dict[FeatureForm, tuple[str, ...]] = {
    "single": ("row",),
    "list": ("row", "offset"),
    "weighted_list": ("row", "offset", "weight"),
    "number": ("row", "weight"),
}
"""Names of the arrays of a feature. The array `row` is in <key>.row.npy; see FeaturesManifest."""

MAX_DEVIATIONS = 10.0
"""Standardised values are clipped to this many standard deviations, so that an outlier cannot dominate a training step."""


@dataclass(frozen=True)
class Feature:
    """One feature of all users, items or events.

    `table_rows` contains rows of the feature's embedding table. Without `offset`, it has one entry per user, item or event.
    With `offset`, the n-th user, item or event has the list table_rows[offset[n]:offset[n + 1]]. `weights` is None or has one
    entry for each entry of `table_rows`.
    """

    table_rows: NDArray[np.int32]
    offset: Int64Array | None
    weights: NDArray[np.float32] | None

    def rows_and_weights(self, owner_index: Int64Array) -> tuple[JaggedArray, NDArray[np.float32] | None]:
        """Return the table rows of each user, item or event in `owner_index`, and the weight of each table row, or None."""
        if self.offset is None:
            row_lists = JaggedArray(np.arange(len(owner_index) + 1), self.table_rows[owner_index].astype(np.int64))
            return row_lists, None if self.weights is None else self.weights[owner_index]
        start = self.offset[owner_index]
        length = self.offset[owner_index + 1] - start
        index_L = ragged_ranges(start, length)
        row_lists = JaggedArray.from_lengths(length, self.table_rows[index_L])
        return row_lists, None if self.weights is None else self.weights[index_L]


@dataclass(frozen=True)
class FeatureStore:
    """All features by key: user.<name>, item.<name>, context.<name>."""

    feature_by_key: dict[str, Feature]

    @classmethod
    def open(cls, manifest: FeaturesManifest) -> Self:
        """Map the arrays of a completed stage."""
        return cls.read(manifest.folder, {key: feature_form(feature) for key, feature in manifest.features.items()})

    @classmethod
    def read(cls, folder: Path, form_by_key: Mapping[str, FeatureForm]) -> Self:
        """Map the arrays of the features in `form_by_key`, from any folder with the file names of FeaturesManifest."""
        feature_by_key = {}
        for key, form in form_by_key.items():
            array_by_name = {name: memory_map(folder / f"{key}.{name}.npy") for name in ARRAY_NAMES_BY_FORM[form]}
            feature_by_key[key] = Feature(array_by_name["row"], array_by_name.get("offset"), array_by_name.get("weight"))
        return cls(feature_by_key)


def feature_form(feature: IngestedFeature) -> FeatureForm:
    """Return the form in which a feature is stored."""
    if feature.kind in ("list", "weighted_list"):
        return feature.kind
    return "number" if feature.is_weighted else "single"


def standardised(value_N: NDArray[np.float64], *, mean: float, std: float) -> NDArray[np.float32]:
    """Return (value - mean) / std, clipped to -10 to 10. NaN becomes 0. If `std` is 0, all values become 0.

    >>> standardised(np.array([5.0, 1.0, 1000.0, -np.inf, np.nan]), mean=3.0, std=2.0).tolist()
    [1.0, -1.0, 10.0, -10.0, 0.0]
    >>> standardised(np.array([5.0, np.inf]), mean=5.0, std=0.0).tolist()
    [0.0, 0.0]
    """
    if std < np.finfo(np.float64).tiny:
        return np.zeros(len(value_N), np.float32)
    with np.errstate(over="ignore"):
        # `value_N` and `mean` are halved, because the difference of two large numbers may overflow.
        z_score_N = (value_N / 2 - mean / 2) / (std / 2)
    return np.nan_to_num(np.clip(z_score_N, -MAX_DEVIATIONS, MAX_DEVIATIONS), nan=0.0).astype(np.float32)
