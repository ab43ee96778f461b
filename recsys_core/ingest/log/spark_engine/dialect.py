"""Spark's counterparts of the types of parquet columns and of DuckDB's hash of texts.

Spark infers no schema, because the schemas come from the checked footers. With the same hash, both engines draw the same events
and order ties in the same way. The hash is a variant of MurmurHash64A over blocks of 8 bytes; see `Hash(string_t)` and
`CombineHash` in DuckDB's source. The Spark session disables ANSI arithmetic, so that a product keeps its lower 64 bits.
"""

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
_MULTIPLIER = 0xD6E8FEB86659FD93 - 2**64
_LENGTH_MULTIPLIER = 0xC6A4A7935BD1E995 - 2**64
_SEED = 0xE17A1465
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
"""Mask of the lower four bits of each byte."""


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
    spark_fields = []
    for field in schema:
        data_type = spark_type(field.type)
        assert data_type is not None, field
        spark_fields.append(t.StructField(field.name, data_type))
    return t.StructType(spark_fields)


def hash_sql(*texts_sql: str) -> str:
    """Return SQL for the hash of one or several texts: a signed 64-bit integer."""
    first_sql, *other_texts_sql = texts_sql
    combined_sql = _text_hash_sql(first_sql)
    for text_sql in other_texts_sql:
        mixed_sql = f"aggregate(array({combined_sql}), 0L, (_, h) -> (h ^ shiftrightunsigned(h, 32)) * ({_MULTIPLIER}L))"
        combined_sql = f"({mixed_sql} ^ {_text_hash_sql(text_sql)})"
    return combined_sql


def _draw_sql(*texts_sql: str) -> str:
    """Return SQL for the hash of the texts, read as an unsigned integer, modulo 1,000,000."""
    # With h = 2q + b, h modulo 2m is 2 (q modulo m) + b. Spark has no unsigned integers, and q has only 63 bits.
    return (
        f"aggregate(array({hash_sql(*texts_sql)}), 0L, "
        "(_, h) -> 2 * (shiftrightunsigned(h, 1) % 500000) + (h & 1), draw -> CAST(draw AS INT))"
    )


def _text_hash_sql(text_sql: str) -> str:
    # A block is a little-endian number of 8 bytes. Reversing its hexadecimal digits reverses the bytes, but also the two digits
    # of each byte, which `block_sql` swaps back.
    digits_sql = f"reverse(hex(substr(CAST({text_sql} AS BINARY), 8 * i + 1, 8)))"
    block_sql = (
        f"aggregate(array(CAST(conv({digits_sql}, 16, -10) AS BIGINT)), 0L, "
        f"(_, x) -> ((x & {_LOW_NIBBLES}L) << 4) | (shiftrightunsigned(x, 4) & {_LOW_NIBBLES}L))"
    )
    blocks_sql = f"transform(sequence(0, octet_length({text_sql}) DIV 8), i -> {block_sql})"
    seed_sql = f"({_SEED}L ^ (octet_length({text_sql}) * ({_LENGTH_MULTIPLIER}L)))"
    num_blocks_sql = f"(octet_length({text_sql}) + 7) DIV 8"
    mixed_blocks_sql = (
        f"aggregate(slice({blocks_sql}, 1, CAST({num_blocks_sql} AS INT)), {seed_sql}, (h, x) -> (h ^ x) * ({_MULTIPLIER}L))"
    )
    # At the end, the hash is mixed twice.
    return (
        f"aggregate(array(1, 2), {mixed_blocks_sql}, (h, _) -> (h ^ shiftrightunsigned(h, 32)) * ({_MULTIPLIER}L), "
        "h -> h ^ shiftrightunsigned(h, 32))"
    )


FUNCTIONS = {
    "ordering_hash": ("(text STRING) RETURNS BIGINT", f"shiftrightunsigned({hash_sql('text')}, 1)"),
    "pair_draw": ("(user STRING, item STRING) RETURNS INT", _draw_sql("user", "item", "'validation'")),
    "item_draw": ("(item STRING) RETURNS INT", _draw_sql("item", "'validation'")),
}
"""Signature and body of each SQL function that the queries call. A function is created when a query calls it."""
