"""users.arrow: ids, histories and features of the users of a package, which are looked up by id without loading the file.

The file is an Arrow IPC file with one record batch, and one row per user in the order of the user rows. Columns:

- user_id: int64 or large_string.
- bucket_rows: lists of int32. List b has the rows of the users whose ids are in hash bucket b; see recsys_core.serving.ids.
- history: lists of int32, the item rows of all events of the user, oldest first.
- user.<feature>: row in the feature's embedding table, int32, or lists of int32 if a user can have several values.
- user.<feature>.weight: weights of these rows, float32 or lists of float32, if the feature has weights.

Lists have 64-bit offsets, except for bucket_rows. Nothing is compressed, so that the file can be mapped.

Shapes: B looked-up users, I items, L bytes of the looked-up ids.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys_core.dataset.feature_store import ARRAY_NAMES_BY_FORM, Feature, FeatureForm, FeatureStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import StageError
from recsys_core.models.spec import ModelSpec
from recsys_core.serving.ids import Buckets, IdMap, hash_buckets
from recsys_core.serving.quantise import user_features
from recsys_core.serving.users.mapped_file import MappedArray, MappedFile

MAX_METADATA_BYTES = 1 << 18
"""The descriptions of the columns are in this many bytes at each end of users.arrow, which is enough for 500 features."""


def write_users(
    path: Path, *, user_ids: pa.Array, user_offset: NDArray[np.int64], event_item: NDArray[np.int32], features: FeatureStore
) -> None:
    """Write users.arrow. The arrays may be memory maps.

    Args:
        user_ids: ids in the order of the user rows.
        user_offset, event_item: item rows of the events of each user, in CSR form.
        features: the user features that the model reads.
    """
    user_ids = user_ids.cast(pa.int64() if pa.types.is_integer(user_ids.type) else pa.large_string())
    buckets = hash_buckets(user_ids)
    bucket_rows = pa.ListArray.from_arrays(pa.array(buckets.offset, pa.int32()), pa.array(buckets.row))
    columns = {"user_id": user_ids, "bucket_rows": bucket_rows}
    columns["history"] = _column(event_item, user_offset)
    for key, feature in features.feature_by_key.items():
        columns[key] = _column(feature.table_rows, feature.offset)
        if feature.weights is not None:
            columns[f"{key}.weight"] = _column(feature.weights, feature.offset)
    batch = pa.record_batch(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def replace_history_items(source_path: Path, target_path: Path, new_row_I: NDArray[np.int32]) -> None:
    """Copy users.arrow and replace the item rows in the histories. The caller has verified the whole source file.

    new_row_I: new row of each item; -1 for an item whose events are removed.
    """
    with pa.memory_map(str(source_path)) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
        history = batch["history"]
        event_item = new_row_I[history.values.to_numpy()]
        new_offset_by_old = np.concatenate([[0], np.cumsum(event_item >= 0)])
        history_column = _column(event_item[event_item >= 0], new_offset_by_old[history.offsets.to_numpy()])
        batch = batch.set_column(batch.schema.get_field_index("history"), "history", history_column)
        with pa.OSFile(str(target_path), "wb") as target_file, pa.ipc.new_file(target_file, batch.schema) as writer:
            writer.write_batch(batch)


def _column(values: Any, offset: Any) -> pa.Array:
    """Return a column of lists, or of single values if there is no offset."""
    return pa.array(values) if offset is None else pa.LargeListArray.from_arrays(pa.array(offset), pa.array(values))


class UserTable:
    """The users of a package.

    Attributes:
        ids: map between ids and user rows.
        features: stored features by key.
    """

    def __init__(self, ids: IdMap, history_offset: Any, event_item: Any, features: FeatureStore) -> None:
        self.ids, self.features = ids, features
        self._history_offset, self._event_item = history_offset, event_item

    @classmethod
    def empty(cls) -> Self:
        """Return the table of a package that stores no users."""
        empty_array = np.zeros(0, np.int64)
        return cls(IdMap(pa.array([], pa.int64()), id_name="user_id"), empty_array, empty_array, FeatureStore({}))

    @classmethod
    def open(cls, path: Path, checksums: bytes, *, spec: ModelSpec) -> Self:
        """Memory-map users.arrow. checksums: content of users.sha256. Raises StageError if the file does not match the model.

        Only the blocks with the descriptions of the columns are read. Every other block is read and verified when one of its
        users is first looked up.
        """
        columns = _Columns(path, checksums)
        columns.require(_column_types(user_features(spec)), num_rows=spec.num_users)
        return cls(
            IdMap(
                _MappedIds(columns),
                id_name="user_id",
                buckets=Buckets(columns.offset("bucket_rows"), columns.values("bucket_rows", bound=spec.num_users)),
            ),
            columns.offset("history"),
            columns.values("history", bound=spec.num_items),
            FeatureStore({key: _feature(columns, key, form, spec) for key, form in user_features(spec).items()}),
        )

    def histories(self, user_row_B: NDArray[np.int64]) -> JaggedArray:
        """Return the item rows of the stored history of each user, oldest first; no items for row -1."""
        is_known_B = user_row_B >= 0
        start_B, end_B = (np.zeros(len(user_row_B), np.int64) for _ in range(2))
        start_B[is_known_B] = self._history_offset[user_row_B[is_known_B]]
        end_B[is_known_B] = self._history_offset[user_row_B[is_known_B] + 1]
        return JaggedArray.from_slices(self._event_item, start=start_B, end=end_B)


def _feature(columns: "_Columns", key: str, form: FeatureForm, spec: ModelSpec) -> Feature:
    """Return a feature whose arrays stay in the file. Only indexing is possible, although their type is NDArray."""
    array_names = ARRAY_NAMES_BY_FORM[form]
    return Feature(
        table_rows=cast(NDArray[np.int32], columns.values(key, bound=spec.tables[key].num_rows)),
        offset=cast(NDArray[np.int64], columns.offset(key)) if "offset" in array_names else None,
        weights=cast(NDArray[np.float32], columns.values(f"{key}.weight")) if "weight" in array_names else None,
    )


def _column_types(forms: Mapping[str, FeatureForm]) -> dict[str, pa.DataType]:
    """Return the type of each column except user_id."""
    type_by_column: dict[str, pa.DataType] = {"bucket_rows": pa.list_(pa.int32()), "history": pa.large_list(pa.int32())}
    for key, form in forms.items():
        for array_name, value_type in (("row", pa.int32()), ("weight", pa.float32())):
            if array_name in ARRAY_NAMES_BY_FORM[form]:
                column_name = key if array_name == "row" else f"{key}.{array_name}"
                type_by_column[column_name] = pa.large_list(value_type) if "offset" in ARRAY_NAMES_BY_FORM[form] else value_type
    return type_by_column


class _Columns:
    """The columns of users.arrow as memory-mapped arrays."""

    def __init__(self, path: Path, checksums: bytes) -> None:
        self.path, self._file = path, MappedFile(path, checksums)
        # Arrow parses the schema at the start and the footer at the end of the file. It does not read the columns.
        for start in (0, len(self._file) - MAX_METADATA_BYTES):
            self._file.verify_range(start, start + MAX_METADATA_BYTES)
        self._batch = pa.ipc.open_file(self._file.arrow_buffer).get_batch(0)

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def require(self, type_by_column: Mapping[str, pa.DataType], *, num_rows: int) -> None:
        """Raise StageError unless the file has the column user_id, these other columns, and this number of rows."""
        actual_type_by_column = {field.name: field.type for field in self._batch.schema}
        id_type = actual_type_by_column.pop("user_id", None)
        if id_type not in (pa.int64(), pa.large_string()) or actual_type_by_column != type_by_column or len(self) != num_rows:
            raise StageError(
                f"{self.path}: the file has {len(self)} rows of user_id {id_type}, {_describe_columns(actual_type_by_column)}, "
                f"but the model needs {num_rows} rows of user_id int64 or large_string, {_describe_columns(type_by_column)}; "
                "package the model again"
            )

    def type(self, name: str) -> pa.DataType:
        """Return the type of a column."""
        return self._batch.schema.field(name).type

    def offset(self, name: str) -> MappedArray:
        """Return the offsets of a column of lists or strings, [number of rows + 1]."""
        offset_buffer, dtype = self._batch[name].buffers()[1], np.int32 if pa.types.is_list(self.type(name)) else np.int64
        return self._array(offset_buffer, dtype, length=len(self) + 1, bound=len(self.values(name)) + 1)

    def values(self, name: str, *, bound: int | None = None) -> MappedArray:
        """Return the concatenated values of a column: the elements of all lists, or the bytes of all strings."""
        column = self._batch[name]
        buffer = column.buffers()[-1]
        if pa.types.is_large_string(column.type):
            return self._array(buffer, np.uint8, length=0 if buffer is None else buffer.size)
        values = column if pa.types.is_primitive(column.type) else column.values
        return self._array(buffer, values.type.to_pandas_dtype(), length=len(values), bound=bound)

    def _array(self, buffer: pa.Buffer | None, dtype: Any, *, length: int, bound: int | None = None) -> MappedArray:
        start_byte = 0 if buffer is None or not length else buffer.address - self._file.arrow_buffer.address
        return MappedArray(self._file, dtype, start_byte=start_byte, length=length, bound=bound)


class _MappedIds:
    """The column user_id as an `IdColumn`."""

    def __init__(self, columns: _Columns) -> None:
        self.type, self._num_ids = columns.type("user_id"), len(columns)
        self._values = columns.values("user_id")
        self._offset = columns.offset("user_id") if pa.types.is_large_string(self.type) else None

    def __len__(self) -> int:
        return self._num_ids

    def take(self, rows: pa.Array) -> pa.Array:
        """Return the ids of these rows."""
        row_B = rows.to_numpy().astype(np.int64, copy=False)
        if self._offset is None:
            return pa.array(self._values[row_B])
        id_bytes = JaggedArray.from_slices(self._values, start=self._offset[row_B], end=self._offset[row_B + 1])
        buffers = [None, pa.py_buffer(id_bytes.offset), pa.py_buffer(id_bytes.values_L.astype(np.uint8))]
        return pa.Array.from_buffers(self.type, len(row_B), buffers)


def _describe_columns(type_by_column: Mapping[str, pa.DataType]) -> str:
    return ", ".join(f"{name} {data_type}" for name, data_type in sorted(type_by_column.items()))
