"""The items of a package: ids, titles, vectors, and the filters on their columns.

items.parquet has one row per item, in the order of the item rows. It is not compressed, so that it can be memory-mapped. The
vectors may be left out if they can be read from the index.

Shapes: I items, R items of a row group, L looked-up items, D width of the vectors.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.errors import InputError, StageError, shown, shown_names
from recsys_core.serving.ids import is_list
from recsys_core.serving.quantise import SPACE_ID_KEY

ROW_GROUP_ROWS = 2_048
"""A lookup of one vector reads a whole row group, so row groups are small."""
RESERVED_ITEM_COLUMNS = ("item_id", "title", "vector")
"""Columns of items.parquet that are not filter columns."""
_COMPARISONS = {"ge": pc.greater_equal, "gt": pc.greater, "le": pc.less_equal, "lt": pc.less, "since": pc.greater_equal}
_OPERATORS = ("in", *_COMPARISONS)

Filter = Mapping[str, Any]
"""Conditions by filter column; an item must satisfy all of them: {"genre": {"in": ["rock"]}, "price": {"ge": 5, "lt": 20}}."""


def join_columns(items: pa.Table, paths: Iterable[Path]) -> pa.Table:
    """Append columns of parquet files to `items`. The column `row` of a file has the item rows; missing items get null."""
    for path in paths:
        file_table = pq.read_table(path)
        file_row_I = np.full(items.num_rows, -1, np.int64)
        file_row_I[file_table["row"].to_numpy()] = np.arange(file_table.num_rows)
        file_row_or_null = pa.array(file_row_I, mask=file_row_I < 0)
        for name in file_table.column_names:
            if name != "row":
                items = items.append_column(name, file_table[name].take(file_row_or_null))
    return items


def write_items(
    path: Path,
    *,
    columns: pa.Table,
    item_vector_ID: NDArray[np.float32],
    space_id: str,
    precision: Literal["fp32", "fp16", "none"] = "fp32",
) -> None:
    """Write items.parquet: `columns` (item_id, title, filter columns) and the column `vector`, in blocks of rows.

    The metadata of the schema contains the space_id of the vectors.

    Args:
        precision: precision of the vectors; `none` leaves out the column.

    Raises:
        StageError: a value does not fit into half precision.
    """
    num_items, dim = item_vector_ID.shape
    schema, value_type = columns.schema, pa.float16() if precision == "fp16" else pa.float32()
    if precision != "none":
        schema = schema.append(pa.field("vector", pa.list_(value_type, dim)))
    schema = schema.with_metadata({SPACE_ID_KEY: space_id})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, num_items, ROW_GROUP_ROWS):
            block = columns.slice(start, ROW_GROUP_ROWS)
            if precision != "none":
                vector_RD = item_vector_ID[start : start + ROW_GROUP_ROWS]
                with np.errstate(over="ignore"):
                    values = vector_RD.reshape(-1).astype(value_type.to_pandas_dtype())
                if not np.isfinite(values).all():
                    raise StageError(
                        f"item vectors have values of {vector_RD.min():g} to {vector_RD.max():g}, which do not fit into half "
                        "precision; set package.item_vectors to fp32"
                    )
                block = block.append_column("vector", pa.FixedSizeListArray.from_arrays(pa.array(values), dim))
            writer.write_table(block.cast(schema), row_group_size=ROW_GROUP_ROWS)


class ItemTable:
    """Titles and filter columns of the items, which are memory-mapped, and their vectors, which are read on demand."""

    def __init__(self, path: Path, *, filter_columns: tuple[str, ...], has_titles: bool) -> None:
        self._path = path
        self._footer = pq.read_metadata(path, memory_map=True)
        schema_metadata = self._footer.schema.to_arrow_schema().metadata or {}
        self.space_id = schema_metadata.get(SPACE_ID_KEY.encode(), b"").decode()
        self._filter_table = pq.read_table(path, columns=list(filter_columns), memory_map=True).combine_chunks()
        self._titles = pq.read_table(path, columns=["title"], memory_map=True)["title"] if has_titles else None

    @property
    def filter_columns(self) -> list[str]:
        """Names of the columns by which items can be filtered."""
        return list(self._filter_table.column_names)

    def titles(self, item_row_L: NDArray[np.int64]) -> list[str | None]:
        """Return the title of each item; None for an item without a title."""
        if self._titles is None:
            return [None] * len(item_row_L)
        titles: list[str | None] = self._titles.take(pa.array(item_row_L)).to_pylist()
        return titles

    def batches(self, max_rows: int) -> Iterator[pa.Table]:
        """Read all columns of the items except the vectors, in blocks of at most `max_rows` rows."""
        with pq.ParquetFile(self._path, memory_map=True) as file:
            column_names = [name for name in file.schema_arrow.names if name != "vector"]
            for batch in file.iter_batches(max_rows, columns=column_names):
                yield pa.Table.from_batches([batch])

    @property
    def has_vectors(self) -> bool:
        """Whether the file has the vectors of the items."""
        return "vector" in self._footer.schema.to_arrow_schema().names

    def vectors(self, item_row_L: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read the vectors of items from the file, [L, D]."""
        file = pq.ParquetFile(self._path, metadata=self._footer, memory_map=True)
        row_group_L = item_row_L // ROW_GROUP_ROWS
        vector_LD = np.zeros((len(item_row_L), file.schema_arrow.field("vector").type.list_size), np.float32)
        for row_group in np.unique(row_group_L):
            values = file.read_row_group(int(row_group), columns=["vector"])["vector"].combine_chunks().flatten()
            vector_RD = values.to_numpy().reshape(-1, vector_LD.shape[1])
            is_in_group_L = row_group_L == row_group
            vector_LD[is_in_group_L] = vector_RD[item_row_L[is_in_group_L] % ROW_GROUP_ROWS]
        return vector_LD

    def most_frequent(self, column: str) -> Any:
        """Return the most frequent value of a filter column as JSON represents it; None if the column has no value."""
        values = self._filter_table[column].drop_null()
        if pa.types.is_floating(values.type):
            values = values.filter(pc.is_finite(values))  # JSON has no NaN and no infinity
        counts = pc.value_counts(values)
        if not len(counts):
            return None
        value = counts.field("values")[int(np.argmax(counts.field("counts").to_numpy()))].as_py()
        return value.isoformat() if isinstance(value, datetime) else value

    def matching(self, item_filter: Filter) -> NDArray[np.bool_]:
        """Return whether each item satisfies all conditions, [I].

        An item without a value in a column satisfies no condition on this column.

        Raises:
            InputError: a column or operator is unknown, or a value does not have the type of its column.
        """
        if not isinstance(item_filter, Mapping):
            raise InputError(f"filter: {shown(item_filter)} is not an object; write conditions by column")
        is_match_I = np.ones(self._filter_table.num_rows, np.bool_)
        for column, conditions in item_filter.items():
            if column not in self.filter_columns:
                raise InputError(
                    f"filter: unknown column {shown(column)}; the model has {shown_names(self.filter_columns)}, from "
                    "features.items.filter_columns"
                )
            values = self._filter_table[column]
            for operator, operand in _operand_by_operator(column, conditions).items():
                is_match_I &= pc.fill_null(_is_match(values, column, operator, operand), False).to_numpy()
        return is_match_I


def _operand_by_operator(column: str, conditions: Any) -> Mapping[str, Any]:
    """Return the operand of each operator. A list means {"in": list}, and a single value means {"in": [value]}."""
    if not isinstance(conditions, Mapping):
        return {"in": conditions if is_list(conditions) else [conditions]}
    for operator in conditions:
        if operator not in _OPERATORS:
            raise InputError(
                f"filter: column {column!r} has the unknown operator {shown(operator)}; use {', '.join(_OPERATORS)}"
            )
    return conditions


def _is_match(values: pa.ChunkedArray, column: str, operator: str, operand: Any) -> pa.ChunkedArray:
    if operator == "in":
        if not is_list(operand):
            raise InputError(f"filter: column {column!r}: `in` has {shown(operand)}; pass a list of values")
        value_set = [_parse_operand(value, values.type, column) for value in operand]
        if pa.types.is_integer(values.type):
            value_set = [int(value) for value in value_set if value == int(value)]
        elif pa.types.is_floating(values.type):
            value_set = [float(value) for value in value_set]
        return pc.is_in(values, value_set=pa.array(value_set, values.type))
    if not (_is_number(values.type) or pa.types.is_timestamp(values.type)):
        raise InputError(f"filter: column {column!r} has no order ({values.type}); filter it with `in`")
    if operator == "since" and not pa.types.is_timestamp(values.type):
        raise InputError(f"filter: column {column!r} has no times ({values.type}); use ge instead of since")
    limit = _parse_operand(operand, values.type, column)
    if pa.types.is_integer(values.type):
        # A column of integers is compared with an integer, because Arrow does not convert all integers to floats.
        limit = math.ceil(limit) if operator in ("ge", "lt") else math.floor(limit)
    elif pa.types.is_floating(values.type):
        limit = float(limit)
    return _COMPARISONS[operator](values, pa.scalar(limit))


def _parse_operand(value: Any, column_type: pa.DataType, column: str) -> Any:
    """Return a value that can be compared with the column; raise InputError if it has another type."""
    value = value.item() if isinstance(value, np.generic) else value
    if _is_number(column_type):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and abs(value) < 2**63:  # not true for NaN and infinity
            return value
        expected_text = "a number between -2^63 and 2^63"
    elif pa.types.is_boolean(column_type):
        if isinstance(value, bool):
            return value
        expected_text = "true or false"
    elif pa.types.is_timestamp(column_type):
        if (time := _parse_time(value)) is not None:
            return time
        expected_text = "a time such as 2026-11-25T06:00:00Z"
    else:
        if isinstance(value, str) and _can_be_encoded(value):
            return value
        expected_text = "a string"
    raise InputError(f"filter: {shown(value)} is no value of column {column!r}; pass {expected_text}")


def _parse_time(value: Any) -> datetime | None:
    """Return a time in UTC without a time zone, like the times in a column; None if the value is no time."""
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else value
        if isinstance(time, date) and not isinstance(time, datetime):
            time = datetime(time.year, time.month, time.day)
        return time.astimezone(UTC).replace(tzinfo=None) if time.tzinfo is not None else time
    except (ValueError, AttributeError, OverflowError):
        return None


def _is_number(column_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(column_type) or pa.types.is_floating(column_type))


def _can_be_encoded(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8. Half a surrogate pair, which JSON can contain, cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
