"""Features in a request: conversion of the values of user and context features to rows of embedding tables.

A value gets the same row as in the ingest (`recsys_core/ingest/features`). Row 0 is for all values without a row of their own.

Shapes: B rows of a request, L values of all lists.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.dataset.feature_store import standardised
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import InputError, shown, shown_names
from recsys_core.serving.description import QUERY_COLUMNS, QueryFeature, request_columns, vocabulary_name
from recsys_core.serving.ids import Id, IdMap, is_list
from recsys_core.units import FLOAT32_MAX


@dataclass(frozen=True)
class GivenFeature:
    """The values of one feature in a request.

    Attributes:
        is_given_B: whether a row of the request has the feature.
        rows: rows of the embedding table for each request row; an empty list for a request row without the feature.
        weight_L: weight of each value of `rows`; None if all are 1.
    """

    is_given_B: NDArray[np.bool_]
    rows: JaggedArray
    weight_L: NDArray[np.float32] | None

    def take(self, row_indices: NDArray[Any]) -> "GivenFeature":
        """Return the feature of these rows of the request."""
        value_index = JaggedArray(self.rows.offset, np.arange(len(self.rows.values_L))).take(row_indices)
        rows = JaggedArray(value_index.offset, self.rows.values_L[value_index.values_L])
        weight_L = None if self.weight_L is None else self.weight_L[value_index.values_L]
        return GivenFeature(self.is_given_B[row_indices], rows, weight_L)


class FeatureEncoder:
    """Encoder of the values of one feature."""

    def __init__(self, feature: QueryFeature, *, key: str, folder: Path) -> None:
        """folder: folder of the package, with the vocabulary."""
        self.feature = feature
        self._vocabulary = IdMap(pa.array([], pa.string() if feature.value_type == "string" else pa.int64()), id_name="value")
        if feature.has_vocabulary:
            values = pq.read_table(folder / vocabulary_name(key))["value"].combine_chunks()
            self._vocabulary = IdMap(values.slice(1), id_name="value")  # row 0 of the file is null

    def encode(self, values: Sequence[Any], weights: Sequence[Any] | None) -> GivenFeature:
        """Encode a value for each row of a request. The value and the weight are None if the row does not have the feature.

        Raises:
            InputError: a value has the wrong type, or is not finite.
        """
        is_given_B = np.array([value is not None for value in values], np.bool_)
        given_values = [value for value in values if value is not None]
        if self.feature.kind == "numeric":
            rows, weight_L = self._encode_numbers(given_values)
            return GivenFeature(is_given_B, JaggedArray.from_lengths(is_given_B, rows), weight_L)
        if self.feature.kind == "categorical":
            return GivenFeature(is_given_B, JaggedArray.from_lengths(is_given_B, self._table_rows(given_values)), None)
        used_lists = [_checked_list(value)[: self.feature.max_values] for value in given_values]
        length_B = np.zeros(len(values), np.int64)
        length_B[is_given_B] = [len(value_list) for value_list in used_lists]
        table_row_L = self._table_rows([value for value_list in used_lists for value in value_list])
        weight_L = None
        if self.feature.weight_column is not None:
            weight_L = self._checked_weights(given_values, [] if weights is None else weights, is_given_B)
        return GivenFeature(is_given_B, JaggedArray.from_lengths(length_B, table_row_L), weight_L)

    def values_of(self, rows: NDArray[np.int64]) -> list[Any]:
        """Return the values that have these rows in the embedding table. The rows are at least 1."""
        values: list[Any] = self._vocabulary.ids(rows - 1).tolist()
        return values

    def _encode_numbers(self, values: list[Any]) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
        number_L = np.array([_checked_number(value) for value in values], np.float64)
        if self.feature.mean is not None and self.feature.std is not None:
            return np.ones(len(values), np.int64), standardised(number_L, mean=self.feature.mean, std=self.feature.std)
        boundaries = np.array(self.feature.boundaries or (), np.float64)
        return 1 + np.searchsorted(boundaries, number_L, side="right"), None

    def _table_rows(self, values: list[Any]) -> NDArray[np.int64]:
        if self.feature.value_type == "string":
            values = [str(value).lower() if isinstance(value, bool) else value for value in values]  # as the ingest casts them
        hash_rows = self.feature.hash_rows
        if hash_rows is None:
            return 1 + self._vocabulary.rows(values)
        parsed_values = self._vocabulary.parse(values)  # the vocabulary of a hashed feature is empty, but has the type
        return np.array([_hash_row(value, hash_rows=hash_rows) for value in parsed_values.to_pylist()], np.int64)

    def _checked_weights(
        self, value_lists: list[Any], weights: Sequence[Any], is_given_B: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """Return the weights of the used values. Raises InputError unless each value has a weight from 0 to FLOAT32_MAX."""
        column = self.feature.weight_column
        weight_lists = [weight_list for weight_list, is_given in zip(weights, is_given_B, strict=False) if is_given]
        num_weights = [None if weight_list is None else len(_checked_list(weight_list)) for weight_list in weight_lists]
        if num_weights != [len(value_list) for value_list in value_lists]:
            raise InputError(f"{column!r} does not have one weight for each value of {self.feature.column!r}")
        flat_weights = [
            _checked_number(weight) for weight_list in weight_lists for weight in weight_list[: self.feature.max_values]
        ]
        if any(not 0 <= weight <= FLOAT32_MAX for weight in flat_weights):
            raise InputError(f"{column!r} has a weight that is negative or too large")
        return np.array(flat_weights, np.float32)


class RequestFeatures:
    """The features that a request may contain, by the names of their columns; see `request_columns`."""

    def __init__(self, features: Mapping[str, QueryFeature], *, folder: Path) -> None:
        """features: features by key, user.<name> or context.<name>. folder: folder of the package."""
        self._encoders = {key: FeatureEncoder(feature, key=key, folder=folder) for key, feature in features.items()}
        self._column_names_by_key = request_columns(features)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that a request may have in addition to user_id and history."""
        return list(dict.fromkeys(name for names in self._column_names_by_key.values() for name in names if name is not None))

    def values_of(self, key: str, rows: NDArray[np.int64]) -> tuple[str, list[Any]]:
        """Return the request column of a feature with a vocabulary, and its values with these rows in the embedding table."""
        return self._column_names_by_key[key][0], self._encoders[key].values_of(rows)

    def require_known(self, columns: Mapping[str, Any]) -> None:
        """Raise InputError for a feature column that the model does not have."""
        if unknown_columns := [name for name in columns if name not in self.columns]:
            known_columns = [*QUERY_COLUMNS, *self.columns]
            raise InputError(f"unknown column {shown_names(unknown_columns)}; the model has {shown_names(known_columns)}")

    def encode(self, columns: Mapping[str, Sequence[Any]], *, num_rows: int) -> dict[str, GivenFeature]:
        """Encode the feature columns of a request, each with one value per row; None for a row without the feature.

        Raises:
            InputError: a column is unknown or does not have `num_rows` values, or a value is invalid.
        """
        self.require_known(columns)
        for name, values in columns.items():
            if len(values) != num_rows:
                raise InputError(f"column {name!r} has {len(values)} values for {num_rows} rows; pass one per row")
        given_features = {}
        for key, (name, weight_name) in self._column_names_by_key.items():
            if name in columns or weight_name in columns:
                assert name is not None
                values = columns[name] if name in columns else [None] * num_rows
                weights = columns.get(weight_name) if weight_name is not None else None
                try:
                    given_features[key] = self._encoders[key].encode(values, weights)
                except InputError as error:
                    raise InputError(f"{name}: {error}") from None
        return given_features

    def invalid_rows(self, columns: Mapping[str, Sequence[Any]], *, num_rows: int) -> Iterator[tuple[int, str]]:
        """Yield the index of each request row with an invalid value, and the error."""
        try:
            self.encode(columns, num_rows=num_rows)
        except InputError:
            for row in range(num_rows):
                try:
                    self.encode({name: [values[row]] for name, values in columns.items()}, num_rows=1)
                except InputError as error:
                    yield row, str(error)


def _checked_list(value: Any) -> list[Any]:
    if not is_list(value):
        raise InputError(f"{shown(value)} is not a list")
    return list(value)


def _checked_number(value: Any) -> float:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{shown(value)} is not a finite number")
    return number


def _hash_row(value: Id, *, hash_rows: int) -> int:
    """Return 1 + the lower half of the MD5 of a value modulo `hash_rows`, like DuckDB's md5_number_lower in the ingest."""
    digest = hashlib.md5(str(value).encode(), usedforsecurity=False).digest()
    return 1 + int.from_bytes(digest[8:], "little") % hash_rows
