"""Columns of input files: they exist, and have one type in all files of a table."""

import difflib
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from recsys_core.errors import InputError, shown_names
from recsys_core.manifests import IdType
from recsys_core.parquet.sources import NULL_KEY, Source


def require_column(source: Source, column: str, *, setting: str) -> pa.DataType:
    """Return the type of `column`, which is a column of the file or a hive key of its path.

    Raises:
        InputError: the column is missing (with the columns of the file and the most similar name), occurs twice, or the path
            and the file contradict each other.
    """
    count = source.schema.names.count(column)
    if count > 1:
        raise InputError(f"{source.name}: {count} columns are named {column!r}; rename all but one")
    if column in source.partition:
        if source.partition[column] == NULL_KEY:
            raise InputError(f"{source.name}: the key {column!r} of its path is null ({setting}); name another column")
        if count == 0:
            return source.partition_types[column]
        _check_against_path(source, column, setting=setting)
    if count == 0:
        similar = difflib.get_close_matches(column, source.columns, n=1)
        hint = f"did you mean {similar[0]!r}? " if similar else ""
        raise InputError(f"{source.name}: no column {column!r} ({setting}); {hint}it has {shown_names(source.columns)}")
    return source.schema.field(column).type


def _check_against_path(source: Source, column: str, *, setting: str) -> None:
    """Raise InputError unless a column that is also a hive key has the key's value in every row."""
    kind, key_value = source.schema.field(column).type, source.partition[column]
    try:
        value = pa.scalar(key_value).cast(value_type(kind))
        with source.open(page_checksum_verification=True) as file:
            batches = file.iter_batches(columns=[column])
            equal = all(pc.all(pc.equal(batch.column(column), value), skip_nulls=False).as_py() for batch in batches)
    except (pa.ArrowException, OSError):
        equal = False
    if not equal:
        raise InputError(
            f"{source.name}: column {column!r} ({setting}) is {key_value!r} in the path, but the file has a column of that "
            f"name ({kind}) with another value in at least one row; rename one of them"
        )


def value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a dictionary's values, or the type itself if it is not a dictionary."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def require_same_types(sources: Sequence[Source], columns: Sequence[str]) -> None:
    """Raise InputError if a column has another kind of type in one file than in the first; widths and units may differ."""
    first = sources[0]
    for column in columns:
        first_kind = require_column(first, column, setting="columns")
        for source in sources:
            kind = require_column(source, column, setting="columns")
            if _type_family(kind) != _type_family(first_kind):
                raise InputError(
                    f"{source.name}: column {column!r} is {kind}, but {first_kind} in {first.name}; write one type in all files"
                )


def _type_family(kind: pa.DataType) -> str:
    """Return one name for all types that may replace each other."""
    kind = value_type(kind)
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind):
        return "float"
    if pa.types.is_decimal(kind):
        return "decimal"
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamp with zone"
    if is_text(kind):
        return "string"
    if is_list(kind):
        return f"list of {_type_family(kind.value_type)}"
    return str(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether `kind` is a string type."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether `kind` is a list type, of fixed or variable length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def id_type(sources: Sequence[Source], column: str, *, setting: str) -> IdType:
    """Return whether the ids in `column` are integers or strings; InputError if they are neither or differ between files."""
    first = sources[0]
    kinds = {source: _id_kind(source, column, setting=setting) for source in sources}
    for source, kind in kinds.items():
        require_one_type(
            kind, of=f"{source.name}: column {column!r}", other=kinds[first], of_other=f"column {column!r} of {first.name}"
        )
    return kinds[first]


def require_one_type(kind: str | None, *, of: str, other: str | None, of_other: str) -> None:
    """Raise InputError if two columns whose values are compared with each other have different types."""
    if kind != other:
        raise InputError(f"{of} is {kind}, but {of_other} is {other}; write both as one type")


def require_unambiguous_case(source: Source, columns: Sequence[str]) -> None:
    """Raise InputError if another column differs from one of `columns` by case alone.

    DuckDB's column names are case-insensitive: of ID and id it would read the first one.
    """
    for column in columns:
        same = [name for name in source.schema.names if name.lower() == column.lower()]
        if len(same) > 1:
            raise InputError(f"{source.name}: columns {same} differ by case alone; rename all but {column!r}")


def _id_kind(source: Source, column: str, *, setting: str) -> IdType:
    kind = require_column(source, column, setting=setting)
    value = value_type(kind)
    if pa.types.is_integer(value):
        return "int64"
    if is_text(value):
        return "string"
    raise InputError(f"{source.name}: column {column!r} is {kind}, but ids are integers or strings; cast it")
