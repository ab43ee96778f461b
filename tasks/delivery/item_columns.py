"""Columns of items.parquet, converted to the types that the libraries of the vector stores need.

Shapes: R items, D width of the vectors.
"""

from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

ColumnKind = Literal["vector", "boolean", "integer", "float", "time", "text"]


def column_kind(data_type: pa.DataType) -> ColumnKind:
    """Return the kind of a column of items.parquet."""
    if pa.types.is_fixed_size_list(data_type):
        return "vector"
    if pa.types.is_boolean(data_type):
        return "boolean"
    if pa.types.is_integer(data_type):
        return "integer"
    if pa.types.is_floating(data_type):
        return "float"
    return "time" if pa.types.is_timestamp(data_type) else "text"


def vectors_of(items: pa.Table) -> NDArray[np.float32]:
    """Return the column `vector`, [R, D]."""
    vectors = items["vector"].combine_chunks()
    vector_RD: NDArray[np.float32] = vectors.flatten().to_numpy().reshape(len(vectors), vectors.type.list_size)
    return vector_RD


def with_finite_numbers(items: pa.Table) -> pa.Table:
    """Replace NaN by null, and infinity by the largest number of the type: JSON and Milvus accept only finite numbers."""
    for index, field in enumerate(items.schema):
        if pa.types.is_floating(field.type):
            values, max_number = items[field.name], pa.scalar(np.finfo(field.type.to_pandas_dtype()).max, field.type)
            finite_values = pc.if_else(pc.is_inf(values), pc.multiply(pc.sign(values), max_number), values)
            items = items.set_column(index, field, pc.if_else(pc.is_nan(values), pa.scalar(None, field.type), finite_values))
    return items


def rows_of(items: pa.Table) -> list[dict[str, Any]]:
    """Return one dictionary per item with all columns except the vector, without null values."""
    rows = with_finite_numbers(items.drop_columns(["vector"])).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def with_text_times(items: pa.Table) -> pa.Table:
    """Convert times, which are in UTC without a time zone, to text in RFC 3339."""
    for index, field in enumerate(items.schema):
        if column_kind(field.type) == "time":
            items = items.set_column(index, field.name, pc.strftime(items[field.name], format="%Y-%m-%dT%H:%M:%SZ"))
    return items


def with_integer_times(items: pa.Table) -> pa.Table:
    """Convert times to microseconds since 1970."""
    for index, field in enumerate(items.schema):
        if column_kind(field.type) == "time":
            times = items[field.name].cast(pa.timestamp("us")).cast(pa.int64())
            items = items.set_column(index, field.name, times)
    return items
