"""Spark's types of parquet columns. Spark infers no schema, because the schemas come from the checked footers."""

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import types as t

from recsys_core.errors import InputError
from recsys_core.parquet.columns import is_list, is_text, value_type
from recsys_core.parquet.sources import Source

_SPARK_TYPE_BY_ARROW_TYPE = {
    pa.bool_(): t.BooleanType(), pa.float32(): t.FloatType(), pa.float64(): t.DoubleType(), pa.date32(): t.DateType(),
    pa.int8(): t.ByteType(), pa.int16(): t.ShortType(), pa.int32(): t.IntegerType(), pa.int64(): t.LongType(),
    # Spark has no unsigned integers, and reads them as the next larger type.
    pa.uint8(): t.ShortType(), pa.uint16(): t.IntegerType(), pa.uint32(): t.LongType(), pa.uint64(): t.DecimalType(20, 0),
    pa.binary(): t.BinaryType(), pa.large_binary(): t.BinaryType(),
}  # fmt: skip


def spark_type(data_type: pa.DataType) -> t.DataType | None:
    """Return the type with which Spark reads a parquet column; None if Spark cannot read it.

    Nanoseconds are read as integers (spark.sql.legacy.parquet.nanosAsLong).
    """
    data_type = value_type(data_type)
    if is_text(data_type):
        return t.StringType()
    if pa.types.is_timestamp(data_type):
        if data_type.unit == "ns":
            return t.LongType()
        return t.TimestampNTZType() if data_type.tz is None else t.TimestampType()
    if pa.types.is_decimal128(data_type):
        return t.DecimalType(data_type.precision, data_type.scale)
    if is_list(data_type):
        element_type = spark_type(data_type.value_type)
        return element_type and t.ArrayType(element_type)
    return _SPARK_TYPE_BY_ARROW_TYPE.get(data_type)


def column_types(source: Source, columns: Sequence[str]) -> tuple[t.DataType, ...]:
    """Return Spark's type of each of the `columns` of a file. Raise InputError for a column that Spark cannot read."""
    schema = source.footer.metadata.schema
    leaf_columns = [schema.column(index) for index in range(len(schema))]
    int96_columns = {column.path for column in leaf_columns if column.physical_type == "INT96"}
    spark_types = []
    for name in columns:
        # Arrow reads the obsolete INT96 as nanoseconds, and Spark as a time in microseconds.
        data_type = t.TimestampType() if name in int96_columns else spark_type(source.schema.field(name).type)
        if data_type is None:
            raise InputError(
                f"{source.name}: column {name!r} is {source.schema.field(name).type}, which Spark cannot read; cast it, or set "
                "interactions.engine.kind to duckdb"
            )
        spark_types.append(data_type)
    return tuple(spark_types)


def spark_schema(schema: pa.Schema) -> t.StructType:
    """Return Spark's schema of a parquet file that nightjar wrote."""
    fields = []
    for field in schema:
        data_type = spark_type(field.type)
        assert data_type is not None, field
        fields.append(t.StructField(field.name, data_type))
    return t.StructType(fields)
