"""Checks that a column exists in all files of a table and has the same type in all of them."""

import difflib
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from recsys_core.errors import InputError, shown_names
from recsys_core.manifests import IdType
from recsys_core.parquet.sources import NULL_KEY_VALUE, Source


def require_column(source: Source, column: str, *, setting: str) -> pa.DataType:
    """Return the type of `column`, which is a column of the file or a hive key of its path.

    Raises:
        InputError: the column is missing or occurs twice, or a value in the file differs from the hive key in the path. For a
            missing column, the message lists the columns of the file and the most similar name.
    """
    num_columns_with_name = source.schema.names.count(column)
    if num_columns_with_name > 1:
        raise InputError(f"{source.name}: {num_columns_with_name} columns are named {column!r}; rename all but one")
    if column in source.partition_values:
        if source.partition_values[column] == NULL_KEY_VALUE:
            raise InputError(f"{source.name}: the key {column!r} of its path is null ({setting}); name another column")
        if num_columns_with_name == 0:
            return source.partition_types[column]
        _require_path_value(source, column, setting=setting)
    if num_columns_with_name == 0:
        similar_columns = difflib.get_close_matches(column, source.columns, n=1)
        hint = f"did you mean {similar_columns[0]!r}? " if similar_columns else ""
        raise InputError(f"{source.name}: no column {column!r} ({setting}); {hint}it has {shown_names(source.columns)}")
    return source.schema.field(column).type


def _require_path_value(source: Source, column: str, *, setting: str) -> None:
    """Raise InputError unless a column that is also a hive key has the key's value in every row."""
    data_type, key_value = source.schema.field(column).type, source.partition_values[column]
    try:
        expected_value = pa.scalar(key_value).cast(value_type(data_type))
        with source.open(page_checksum_verification=True) as parquet_file:
            batches = parquet_file.iter_batches(columns=[column])
            is_equal_in_all_rows = all(
                pc.all(pc.equal(batch.column(column), expected_value), skip_nulls=False).as_py() for batch in batches
            )
    except (pa.ArrowException, OSError):
        is_equal_in_all_rows = False
    if not is_equal_in_all_rows:
        raise InputError(
            f"{source.name}: column {column!r} ({setting}) is {key_value!r} in the path, but the file has a column of that "
            f"name ({data_type}) with another value in at least one row; rename one of them"
        )


def value_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type of a dictionary's values, or the type itself if it is not a dictionary."""
    return data_type.value_type if pa.types.is_dictionary(data_type) else data_type


def require_same_type_in_files(
    sources: Sequence[Source],
    column: str,
    *,
    setting: str,
    family: Callable[[pa.DataType], str] | None = None,
) -> pa.DataType:
    """Return the type of `column` in the first file.

    Args:
        family: returns the name of the family of a type. Files may have different types of the same family. By default,
            a family contains the integers of all widths, the floats of all widths, or the timestamps of all units.

    Raises:
        InputError: the column has a type of another family in another file, for example an integer and a string.
    """
    family = family or _type_family
    first_type = require_column(sources[0], column, setting=setting)
    for source in sources[1:]:
        data_type = require_column(source, column, setting=setting)
        if family(data_type) != family(first_type):
            raise InputError(
                f"{source.name}: column {column!r} is {data_type}, but {first_type} in {sources[0].name}; "
                "write one type in all files"
            )
    return first_type


def _type_family(data_type: pa.DataType) -> str:
    """Return the name of the family of a type, such as "integer" for int32 and int64."""
    data_type = value_type(data_type)
    if pa.types.is_integer(data_type):
        return "integer"
    if pa.types.is_floating(data_type):
        return "float"
    if pa.types.is_decimal(data_type):
        return "decimal"
    if pa.types.is_date(data_type):
        return "date"
    if pa.types.is_timestamp(data_type):
        return "timestamp" if data_type.tz is None else "timestamp with zone"
    if is_text(data_type):
        return "string"
    if is_list(data_type):
        return f"list of {_type_family(data_type.value_type)}"
    return str(data_type)


def is_whole_decimal(data_type: pa.DataType) -> bool:
    """Return whether `data_type` is a decimal type of 128 bits without digits after the point."""
    return bool(pa.types.is_decimal128(data_type) and data_type.scale == 0)


def is_text(data_type: pa.DataType) -> bool:
    """Return whether `data_type` is a string type."""
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type) or pa.types.is_string_view(data_type))


def is_list(data_type: pa.DataType) -> bool:
    """Return whether `data_type` is a list type, of fixed or variable length."""
    return bool(pa.types.is_list(data_type) or pa.types.is_large_list(data_type) or pa.types.is_fixed_size_list(data_type))


def id_type(sources: Sequence[Source], column: str, *, setting: str) -> IdType:
    """Return the type of the ids in `column`: "int64" or "string".

    Raises:
        InputError: a file has ids of another type, or the type differs between files.
    """
    for source in sources:
        data_type = require_column(source, column, setting=setting)
        if not (pa.types.is_integer(value_type(data_type)) or is_text(value_type(data_type))):
            raise InputError(f"{source.name}: column {column!r} is {data_type}, but ids are integers or strings; cast it")
    first_type = require_same_type_in_files(sources, column, setting=setting)
    return "int64" if pa.types.is_integer(value_type(first_type)) else "string"


def require_equal_types(data_type: str | None, *, subject: str, other_type: str | None, other_subject: str) -> None:
    """Raise InputError if two columns whose values are compared have different types.

    Args:
        data_type, other_type: types of the two columns.
        subject, other_subject: names of the two columns in the message.
    """
    if data_type != other_type:
        raise InputError(f"{subject} is {data_type}, but {other_subject} is {other_type}; write both as one type")


def require_unambiguous_case(source: Source, columns: Sequence[str]) -> None:
    """Raise InputError if the file has another column whose name differs from one of `columns` by case alone.

    DuckDB ignores the case of column names: in a file with the columns ID and id, it would always read the first column.
    """
    for column in columns:
        case_variants = [name for name in source.schema.names if name.lower() == column.lower()]
        if len(case_variants) > 1:
            raise InputError(f"{source.name}: columns {case_variants} differ by case alone; rename all but {column!r}")
