"""Between the user's ids and our rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.errors import InputError

Id = int | str


class IdMap:
    """The column `id` of a parquet file, whose position is the row; int64 or string.

    Looked up by binary search over 64-bit keys (the integers themselves, or hashes of the strings): 16 bytes per id beside
    the ids, where a dictionary takes ten times that.
    """

    def __init__(self, ids: pa.Array, *, name: str) -> None:
        """`name` says in errors whose ids these are, e.g. "user_id"."""
        self._name = name
        self._is_text = not pa.types.is_integer(ids.type)
        self._ids = ids.cast(pa.large_string() if self._is_text else pa.int64())
        key_I = self._keys(self._ids)
        self._row_by_key = np.argsort(key_I, kind="stable")
        self._sorted_key = key_I[self._row_by_key]
        self._longest_run = 1 if len(ids) == 0 else int(np.unique(self._sorted_key, return_counts=True)[1].max())

    @classmethod
    def read(cls, path: Path, *, name: str) -> "IdMap":
        """From a parquet file with a column `id`."""
        column = pq.read_table(path, columns=["id"])["id"]
        return cls(
            column.cast(pa.int64() if pa.types.is_integer(column.type) else pa.large_string()).combine_chunks(), name=name
        )

    def __len__(self) -> int:
        return len(self._ids)

    def rows(self, ids: Sequence[Id] | NDArray[Any]) -> NDArray[np.int64]:
        """Row of each id, -1 for ids not in the map. Raises InputError for values that cannot be such an id.

        >>> IdMap(pa.array(["b", "a"]), name="item_id").rows(["a", "z", "b"])
        array([ 1, -1,  0])
        """
        row = np.full(len(ids), -1, np.int64)
        if len(ids) == 0 or len(self) == 0:
            return row
        wanted = self._parse(ids)
        first = np.searchsorted(self._sorted_key, self._keys(wanted))
        for step in range(self._longest_run):  # longer than one only where hashes of strings collide
            candidate = self._row_by_key[np.minimum(first + step, len(self) - 1)]
            is_same = pc.equal(self._ids.take(pa.array(candidate)), wanted).to_numpy(zero_copy_only=False)
            row[is_same] = candidate[is_same]
        return row

    def ids(self, rows: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """The ids of rows: int64, or an object array of str."""
        ids: NDArray[Any] = self._ids.take(pa.array(rows)).to_numpy(zero_copy_only=False)
        return ids

    def _keys(self, ids: pa.Array) -> NDArray[Any]:
        values: NDArray[Any] = ids.to_numpy(zero_copy_only=False)
        # NumPy's own StringDType will not do: searchsorted on it fails or misses for strings of 16 bytes and more (NumPy 2.4).
        return pd.util.hash_array(values, categorize=False) if self._is_text else values

    def _parse(self, ids: Sequence[Id] | NDArray[Any]) -> pa.Array:
        if self._is_text:
            strange = [value for value in ids if not isinstance(value, str)]
            if strange:
                raise InputError(f"{self._name} {strange[0]!r} is no string, but the model was trained on string ids")
            return pa.array(ids, pa.large_string())
        try:
            values = np.asarray(ids) if isinstance(ids, np.ndarray) else np.array(list(ids), dtype=object)
            numbers = values.astype(np.int64)
            if values.dtype.kind not in "iu" and [str(value) for value in values] != [str(number) for number in numbers]:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"{self._name}: {list(ids[:3])} are no whole numbers, but the model was trained on integer ids"
            ) from None
        return pa.array(numbers)
