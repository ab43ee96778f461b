"""Keys that stand in the names of folders, as Hive and Spark write them: dt=2026-11-19/."""

import re
from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa

from recsys_core.errors import InputError, printable

NULL = "__HIVE_DEFAULT_PARTITION__"


def partition_of(path: str) -> dict[str, str]:
    """The hive keys in the folders of `path`; InputError where one of them stands there twice.

    >>> partition_of("log/dt=2026-11-19/country=S%C3%A3o%20Tom%C3%A9/part=0.parquet")
    {'dt': '2026-11-19', 'country': 'São Tomé'}
    """
    keys: dict[str, str] = {}
    for folder in path.split("/")[:-1]:
        key, equals, value = folder.partition("=")
        if not (key and equals):
            continue
        if unquote(key) in keys:
            raise InputError(f"{printable(path)}: the folders name {unquote(key)!r} twice; move the files")
        keys[unquote(key)] = unquote(value)
    return keys


def partition_type(values: Sequence[str]) -> pa.DataType:
    """The type that all `values` of a hive key have: int64, date32 or string.

    >>> partition_type(["1", "02"]), partition_type(["2026-11-19"]), partition_type(["1", "x"])
    (DataType(int64), DataType(date32[day]), DataType(string))
    """
    for kind, form in ((pa.int64(), r"-?[0-9]+"), (pa.date32(), r"[0-9]{4}-[0-9]{2}-[0-9]{2}")):
        if all(re.fullmatch(form, value) for value in values):
            try:
                pa.array(values, pa.string()).cast(kind)
            except pa.ArrowInvalid:  # beyond int64, or a 31st of February
                continue
            return kind
    return pa.string()
