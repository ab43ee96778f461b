"""Features of users as columns of a request, for versions whose package stores no users.

The values are decoded from the table rows and weights that the run has ingested, because the input files may have changed.

Shapes: U users, L values of all lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.manifests import FeaturesManifest
from recsys_core.serving.description import PackageDescription, QueryFeature, has_vocabulary, request_columns, vocabulary_name
from recsys_core.units import INT64_MAX

_MAX_NUMBER = float(np.finfo(np.float64).max)


def user_feature_columns(
    package: PackageDescription, features: FeaturesManifest | None, *, user_row_U: npt.NDArray[np.int64]
) -> dict[str, pa.Array]:
    """Return the feature values of users by request column. The result is empty if the package stores the users.

    A value that has row 0 in the ingest is null, or an unknown value if it is in a list. Columns of hashed values are left out.
    So are lists that share a column with another feature, and columns that the package and the run read differently.
    """
    if features is None or package.users == "stored":
        return {}
    decoder = _Decoder(features, user_row_U)
    names_by_key = {key: names for key, names in request_columns(package.features).items() if key.startswith("user.")}
    columns: dict[str, pa.Array] = {}
    for key, (name, weight_name) in names_by_key.items():
        reader_keys = [reader for reader, names in names_by_key.items() if {name, weight_name} & {*names} - {None}]
        if not all(decoder.has_same_values(reader, package.features[reader]) for reader in reader_keys):
            continue
        if package.features[key].kind in ("list", "weighted_list"):
            if reader_keys == [key] and decoder.has_vocabulary(key):
                list_names = [name] if weight_name is None else [name, weight_name]
                columns |= dict(zip(list_names, decoder.lists(key), strict=True))
        elif (values := decoder.single_values(reader_keys)) is not None:
            columns[name] = values
    return columns


@dataclass(frozen=True)
class _Decoder:
    """Decoder of the ingested features of users."""

    features: FeaturesManifest
    user_row_U: npt.NDArray[np.int64]

    @cached_property
    def _store(self) -> FeatureStore:
        return FeatureStore.open(self.features)

    def has_same_values(self, key: str, feature: QueryFeature) -> bool:
        """Return whether the run has ingested the feature `key` from the same columns, with values of the same type."""
        if key not in self.features.features:
            return False
        ingested_feature = QueryFeature.of(key, self.features)
        return all(
            getattr(ingested_feature, name) == getattr(feature, name)
            for name in ("kind", "column", "weight_column", "value_type")
        ) and (ingested_feature.mean is None) == (feature.mean is None)

    def has_vocabulary(self, key: str) -> bool:
        """Return whether the values of the feature `key` are neither numbers nor hashed."""
        return has_vocabulary(self.features.features[key])

    def lists(self, key: str) -> list[pa.Array]:
        """Return the lists of values, and the lists of weights if the feature has weights."""
        row_lists, weight_L = self._store.feature_by_key[key].rows_and_weights(self.user_row_U)
        vocabulary = self._vocabulary(key)
        # Row 0 counts in the mean of a list, so its values are replaced instead of removed.
        values = vocabulary.fill_null(_unknown_value(vocabulary)).take(pa.array(row_lists.values_L))
        arrays = [values] if weight_L is None else [values, pa.array(weight_L)]
        return [pa.ListArray.from_arrays(row_lists.offset, array) for array in arrays]

    def single_values(self, keys: Sequence[str]) -> pa.Array | None:
        """Return the values of a column that all features `keys` read; None if the values are hashed."""
        if vocabulary_keys := [key for key in keys if self.has_vocabulary(key)]:
            return pc.coalesce(*map(self._vocabulary_values, vocabulary_keys))
        is_numeric = all(self.features.features[key].kind == "numeric" for key in keys)
        return self._numbers(keys) if is_numeric else None

    @np.errstate(over="ignore")  # the result is clipped
    def _numbers(self, keys: Sequence[str]) -> pa.Array:
        """Return numbers that are in the buckets of all features `keys`, and near the standardised number if there is one."""
        lower_U, upper_U = np.full((2, len(self.user_row_U)), [[-_MAX_NUMBER], [_MAX_NUMBER]])
        standardised_number_U, is_missing_U = None, np.zeros(len(self.user_row_U), np.bool_)
        for key in keys:
            feature = self.features.features[key]
            row_lists, weight_U = self._store.feature_by_key[key].rows_and_weights(self.user_row_U)
            is_missing_U = row_lists.values_L == 0
            if weight_U is not None and feature.mean is not None and feature.std is not None:
                standardised_number_U = feature.mean + feature.std * weight_U.astype(np.float64)
            else:
                edges = np.array([-_MAX_NUMBER, *(feature.boundaries or ()), _MAX_NUMBER])
                lower_U = np.maximum(lower_U, edges[np.maximum(row_lists.values_L - 1, 0)])
                upper_U = np.minimum(upper_U, edges[row_lists.values_L])
        number_U = lower_U / 2 + upper_U / 2 if standardised_number_U is None else standardised_number_U
        number_U = np.clip(number_U, lower_U, np.nextafter(upper_U, -np.inf))  # a bucket does not contain its upper boundary
        return pa.array(number_U, mask=is_missing_U)

    def _vocabulary_values(self, key: str) -> pa.Array:
        row_lists, _ = self._store.feature_by_key[key].rows_and_weights(self.user_row_U)
        return self._vocabulary(key).take(pa.array(row_lists.values_L))

    def _vocabulary(self, key: str) -> pa.Array:
        return pq.read_table(self.features.path(vocabulary_name(key)), columns=["value"])["value"].combine_chunks()


def _unknown_value(vocabulary: pa.Array) -> pa.Scalar:
    """Return a value that is not in the vocabulary.

    >>> _unknown_value(pa.array([None, "unknown value 0"])).as_py()
    'unknown value 1'
    """
    is_text = pa.types.is_string(vocabulary.type)
    candidates = (pa.scalar(f"unknown value {n}" if is_text else n - INT64_MAX, vocabulary.type) for n in count())
    return next(value for value in candidates if pc.index(vocabulary, value).as_py() < 0)
