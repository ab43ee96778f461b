"""Lookup of table rows by user or item id.

Shapes: N ids, L candidate rows of all ids.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.dataset.jagged import IndexedArray, JaggedArray
from recsys_core.errors import InputError, shown
from recsys_core.units import INT64_MAX

Id = int | str
INT64_RANGE = range(-INT64_MAX - 1, INT64_MAX + 1)
EXACT_FLOAT64_INTEGERS = range(-(2**53) + 1, 2**53)
_HALF_HASH_BITS = np.uint64(32)
"""A bucket number is the upper half of a 64-bit hash, scaled to the number of buckets."""
_HASH_FACTORS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))
"""Factors from SplitMix64."""
_DECIMAL_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,99}")


class IdColumn(Protocol):
    """Column of ids: an Arrow array, or a column in a file."""

    @property
    def type(self) -> pa.DataType:
        """Type of the ids."""

    def __len__(self) -> int: ...

    def take(self, rows: pa.Array, /) -> pa.Array:
        """Return the ids of these rows."""


class Buckets(NamedTuple):
    """Table rows grouped by the hash of their id: bucket b has the rows row[offset[b]:offset[b + 1]].

    There are as many buckets as ids.
    """

    offset: IndexedArray
    row: IndexedArray


def hash_buckets(ids: pa.Array) -> Buckets:
    """Group the rows of an id column into buckets: offset int64 [number of ids + 1], row int32 [number of ids]."""
    bucket_N = _bucket_numbers(ids, num_buckets=len(ids))
    offset = np.concatenate([[0], np.cumsum(np.bincount(bucket_N, minlength=len(ids)))]).astype(np.int64)
    return Buckets(offset, np.argsort(bucket_N, kind="stable").astype(np.int32))


def _bucket_numbers(ids: pa.Array, *, num_buckets: int) -> NDArray[np.int64]:
    """Return the bucket number of each id. The same id gets the same number in every process."""
    values: NDArray[Any] = ids.to_numpy(zero_copy_only=False)
    if values.dtype == np.int64:
        hash_N = values.view(np.uint64)
        for factor in _HASH_FACTORS:
            hash_N = (hash_N ^ (hash_N >> _HALF_HASH_BITS)) * factor
    else:
        hash_N = pd.util.hash_array(values, categorize=False)
    return (((hash_N >> _HALF_HASH_BITS) * np.uint64(num_buckets)) >> _HALF_HASH_BITS).astype(np.int64)


class IdMap:
    """Map between ids (int64 or string) and table rows. The row of an id is its index in a column of ids.

    A lookup compares an id only with the few ids in the bucket of its hash. The buckets are either computed, which takes 12
    bytes of memory per id, or stored with the ids in a memory-mapped file.
    """

    def __init__(self, ids: Any, *, id_name: str, buckets: Buckets | None = None) -> None:
        """Map the ids of an IdColumn to their indices.

        Args:
            id_name: what error messages call an id, e.g. "user_id".
            buckets: None to compute them, which needs an Arrow array of ids.
        """
        self._id_name = id_name
        self._has_string_ids = not pa.types.is_integer(ids.type)
        if buckets is None:
            ids = ids.cast(pa.large_string() if self._has_string_ids else pa.int64())
            buckets = hash_buckets(ids)
        self._buckets, self._ids = buckets, cast(IdColumn, ids)

    @classmethod
    def read(cls, path: Path, *, id_name: str) -> "IdMap":
        """Read the column `id_name` of a parquet file."""
        return cls(pq.read_table(path, columns=[id_name], memory_map=True)[id_name].combine_chunks(), id_name=id_name)

    def __len__(self) -> int:
        return len(self._ids)

    def rows(self, ids: Sequence[Id] | NDArray[Any]) -> NDArray[np.int64]:
        """Return the row of each id, -1 for an unknown id. Raises InputError for an invalid id.

        >>> IdMap(pa.array(["b", "a"]), id_name="item_id").rows(["a", "z", "b"])
        array([ 1, -1,  0])
        """
        rows = np.full(len(ids), -1, np.int64)
        if len(ids) == 0 or len(self) == 0:
            return rows
        parsed_ids = self.parse(ids)
        bucket_N = _bucket_numbers(parsed_ids, num_buckets=len(self))
        start_N, end_N = self._buckets.offset[bucket_N], self._buckets.offset[bucket_N + 1]
        candidate_rows = JaggedArray.from_slices(self._buckets.row, start=start_N, end=end_N)
        candidate_ids, id_index_L = self._ids.take(pa.array(candidate_rows.values_L)), candidate_rows.list_index_L
        if self._has_string_ids:
            is_match_L = pc.equal(candidate_ids, parsed_ids.take(pa.array(id_index_L))).to_numpy(zero_copy_only=False)
        else:
            is_match_L = candidate_ids.to_numpy() == parsed_ids.to_numpy()[id_index_L]
        rows[id_index_L[is_match_L]] = candidate_rows.values_L[is_match_L]
        return rows

    def ids(self, rows: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """Return the ids of the rows: int64, or an object array of str."""
        ids: NDArray[Any] = self._ids.take(pa.array(rows)).to_numpy(zero_copy_only=False)
        return ids

    def parse(self, ids: Sequence[Any] | NDArray[Any]) -> pa.Array:
        """Convert ids to the type of the map. Raises InputError for the first invalid id.

        An integer id may also be a decimal string, or a whole float between -2**53 and 2**53, because pandas converts an
        integer column with a missing value to floats.
        """
        python_type, arrow_type = (str, pa.large_string()) if self._has_string_ids else (int, pa.int64())
        is_int64_array = isinstance(ids, np.ndarray) and ids.dtype == np.int64 and not self._has_string_ids
        if is_int64_array or set(map(type, ids)) == {python_type}:
            try:
                return pa.array(ids, arrow_type)
            except (OverflowError, UnicodeEncodeError):
                pass  # parse each id below, so that the error names the invalid id
        return pa.array(
            [self._parse_string(raw_id) if self._has_string_ids else self._parse_integer(raw_id) for raw_id in ids], arrow_type
        )

    def _parse_string(self, raw_id: Any) -> str:
        if not isinstance(raw_id, str):
            self._reject(raw_id, "is not a string, but the model was trained on string ids")
        try:
            raw_id.encode()
        except UnicodeEncodeError:
            self._reject(raw_id, "is not valid Unicode")
        return str(raw_id)

    def _parse_integer(self, raw_id: Any) -> int:
        is_whole_float = isinstance(raw_id, float | np.floating) and float(raw_id).is_integer()
        is_integer = isinstance(raw_id, int | np.integer) and not isinstance(raw_id, bool)
        if not (is_whole_float or is_integer or (isinstance(raw_id, str) and _DECIMAL_INTEGER.fullmatch(raw_id))):
            self._reject(raw_id, "is not an integer, but the model was trained on integer ids")
        integer_id = int(raw_id)
        if is_whole_float and integer_id not in EXACT_FLOAT64_INTEGERS:
            self._reject(raw_id, "is a float too large to be an exact integer; send an integer, or a decimal string")
        if integer_id not in INT64_RANGE:
            self._reject(raw_id, "is not a 64-bit integer")
        return integer_id

    def _reject(self, raw_id: Any, reason: str) -> NoReturn:
        raise InputError(f"{self._id_name} is missing" if is_missing(raw_id) else f"{self._id_name} {shown(raw_id)} {reason}")


def is_missing(request_value: Any) -> bool:
    """Return whether a request value is null: None, NaN, pandas.NA or NaT."""
    return request_value is None or (pd.api.types.is_scalar(request_value) and bool(pd.isna(request_value)))


def is_list(request_value: Any) -> bool:
    """Return whether a request value is a list: a list, a tuple, or an array with one dimension."""
    return isinstance(request_value, list | tuple) or (isinstance(request_value, np.ndarray) and request_value.ndim == 1)


def plain_values(values: Any) -> Any:
    """Return a pandas Series or a pyarrow array as a list, with None for a missing value; return other values unchanged.

    >>> plain_values(pd.Series([7.0, None])), plain_values(pa.array([[7, 9], None])), plain_values((7,))
    ([7.0, None], [[7, 9], None], (7,))
    """
    if isinstance(values, pd.Series):
        return values.astype(object).where(values.notna(), None).tolist()
    return values.to_pylist() if isinstance(values, pa.Array | pa.ChunkedArray) else values
