"""Columns guessed from parquet schemas, for `nightjar init --log ... --items ... --vectors ...`."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flows.config import PipelineConfig
from recsys_core.data.embeddings.config import EmbeddingsConfig
from recsys_core.data.features.config import FeatureConfig, FeaturesConfig, FeatureTableConfig
from recsys_core.data.interactions.config import InteractionsConfig
from recsys_core.errors import InputError

USER_NAMES = ("user_id", "userid", "user", "uid", "customer_id", "visitor_id", "session_id", "account_id")
ITEM_NAMES = ("item_id", "itemid", "item", "iid", "movie_id", "movieid", "product_id", "article_id", "asin", "sku", "id")
TIME_NAMES = ("timestamp", "time", "ts", "event_time", "datetime", "date", "created_at", "unix_timestamp")
LABEL_NAMES = ("rating", "label", "score", "stars", "overall")
VECTOR_NAMES = ("embedding", "vector", "embeddings", "vec", "emb")
MAX_FEATURES = 20
_TICKS_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_YEAR_1990_S = 631_152_000

Notes = dict[str, str]
"""Comments by dotted name of a setting."""


def guess_config(
    config: PipelineConfig, *, log: Path | None, items: Path | None, vectors: Path | None, folder: Path
) -> tuple[PipelineConfig, Notes]:
    """Return `config` with the given inputs and their guessed columns, and a note for each guess.

    Args:
        log: parquet file, folder or glob of the interaction log; None keeps the log of `config`.
        items: parquet file with features of the items; None for no features.
        vectors: parquet file with pretrained vectors of the items; None for no vectors.
        folder: folder of the config file, to which relative paths in the config refer.

    Raises:
        InputError: a file is missing or is not parquet, or a required column cannot be guessed.
    """
    notes: Notes = {}
    interactions = config.interactions if log is None else _guess_interactions(log, notes=notes, folder=folder)
    embeddings = () if vectors is None else (_guess_embeddings(vectors, notes=notes, folder=folder),)
    features = None if items is None else FeaturesConfig(items=_guess_items(items, notes=notes, folder=folder))
    return config.model_copy(update={"interactions": interactions, "embeddings": embeddings, "features": features}), notes


def _guess_interactions(path: Path, *, notes: Notes, folder: Path) -> InteractionsConfig:
    file = _first_file(path)
    schema = _schema(file)
    user = _require_column(schema, USER_NAMES, _is_id, role="user", option="--log", file=file)
    item = _require_column(
        schema, [name for name in ITEM_NAMES if name != user], _is_id, role="item", option="--log", file=file
    )
    timestamp = _require_column(schema, TIME_NAMES, _is_time, role="timestamp", option="--log", file=file)
    settings: dict[str, Any] = {"user_column": user, "item_column": item, "timestamp_column": timestamp}
    for setting, column in settings.items():
        _note(notes, f"interactions.{setting}", schema, column)
    if pa.types.is_integer(schema.field(timestamp).type):
        settings["timestamp_unit"], newest = _guess_unit(file, timestamp)
        notes["interactions.timestamp_unit"] = f"guessed: the newest time of the first row group is {newest}"
    label = _find_column(schema, LABEL_NAMES, _is_number)
    if label is not None:
        settings["label_column"] = label
        notes["interactions.label_column"] = (
            f"guessed: column {label!r} is {schema.field(label).type}; events below label_threshold are left out; delete both "
            "settings to keep all events"
        )
        low, high = _range_of(file, label)
        settings["label_threshold"] = (low + high) / 2
        notes["interactions.label_threshold"] = f"guessed: the middle of {low:g} to {high:g} in the first row group"
    return InteractionsConfig(paths=(_relative(path, folder),), **settings)


def _guess_embeddings(path: Path, *, notes: Notes, folder: Path) -> EmbeddingsConfig:
    file = _first_file(path)
    schema = _schema(file)
    id_column = _require_column(schema, ITEM_NAMES, _is_id, role="item id", option="--vectors", file=file)
    _note(notes, "embeddings.id_column", schema, id_column)
    vector = _find_column(schema, VECTOR_NAMES, _is_vector)
    if vector is not None:
        _note(notes, "embeddings.vector_column", schema, vector)
        return EmbeddingsConfig(paths=(_relative(path, folder),), id_column=id_column, vector_column=vector)
    prefixes = [match[1] for name in schema.names if (match := re.fullmatch(r"(.*\D)\d+", name))]
    if not prefixes:
        raise InputError(
            f"--vectors {file}: no list column and no numbered columns such as dim_0, dim_1; the columns are "
            f"{', '.join(schema.names)}"
        )
    prefix = max(set(prefixes), key=prefixes.count)
    notes["embeddings.dimension_prefix"] = f"guessed: {prefixes.count(prefix)} columns are named {prefix}<number>"
    return EmbeddingsConfig(paths=(_relative(path, folder),), id_column=id_column, dimension_prefix=prefix)


def _guess_items(path: Path, *, notes: Notes, folder: Path) -> FeatureTableConfig:
    file = _first_file(path)
    schema = _schema(file)
    id_column = _require_column(schema, ITEM_NAMES, _is_id, role="item id", option="--items", file=file)
    _note(notes, "features.items.id_column", schema, id_column)
    features = [feature for field in schema if field.name != id_column and (feature := _guess_feature(field)) is not None]
    if not features:
        raise InputError(f"--items {file}: no column can be a feature; the columns are {', '.join(schema.names)}")
    notes["features.items.features"] = "guessed from the types of the columns: delete the columns that do not describe an item"
    return FeatureTableConfig(paths=(_relative(path, folder),), id_column=id_column, features=tuple(features[:MAX_FEATURES]))


def _guess_feature(field: pa.Field) -> FeatureConfig | None:
    """Return a categorical, list or numeric feature for a column, or None if its type or name does not allow one."""
    if re.fullmatch(r"[A-Za-z0-9_]{1,100}", field.name) is None:
        return None
    if pa.types.is_floating(field.type):
        return FeatureConfig(name=field.name, kind="numeric", standardise=True)
    if _is_id(field.type):
        return FeatureConfig(name=field.name)
    if pa.types.is_list(field.type) and _is_id(field.type.value_type):
        return FeatureConfig(name=field.name, kind="list")
    return None


def _first_file(path: Path) -> Path:
    """Return the first parquet file of a file, a folder or a glob."""
    if path.is_dir():
        files = sorted(path.rglob("*.parquet"))
    else:
        files = [path] if path.is_file() else sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
    if not files:
        raise InputError(f"{path}: no such parquet file; give a file, a folder or a glob on this machine")
    return files[0]


def _schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{file}: not a readable parquet file ({str(error).splitlines()[0]})") from None


def _find_column(schema: pa.Schema, names: Sequence[str], has_type: Callable[[pa.DataType], bool]) -> str | None:
    """Return the first of the columns `names` whose type passes `has_type`; None if there is none. Case is ignored."""
    field_by_name = {field.name.lower(): field for field in schema}
    for name in names:
        if name in field_by_name and has_type(field_by_name[name].type):
            return str(field_by_name[name].name)
    return None


def _require_column(
    schema: pa.Schema, names: Sequence[str], has_type: Callable[[pa.DataType], bool], *, role: str, option: str, file: Path
) -> str:
    column = _find_column(schema, names, has_type)
    if column is None:
        raise InputError(
            f"{option} {file}: no column is recognised as the {role} ({', '.join(names[:4])}, ...); the columns are "
            f"{', '.join(schema.names)}; rename one, or run `nightjar init` without {option} and set the columns by hand"
        )
    return column


def _note(notes: Notes, setting: str, schema: pa.Schema, column: str) -> None:
    notes[setting] = f"guessed: column {column!r} is {schema.field(column).type}"


def _guess_unit(file: Path, column: str) -> tuple[str, int]:
    """Return the guessed unit of a time column, and the newest time in the first row group.

    In the guessed unit, the newest time is between 1990 and tomorrow. If no unit fits, the guess is seconds.
    """
    _, newest = _range_of(file, column)
    tomorrow_s = time.time() + 86_400
    for unit, ticks in _TICKS_PER_S.items():
        if _YEAR_1990_S <= newest / ticks <= tomorrow_s:
            return unit, int(newest)
    return "s", int(newest)


def _range_of(file: Path, column: str) -> tuple[float, float]:
    """Return the smallest and largest value of the column in the first row group; (0, 0) if it has no values."""
    with pq.ParquetFile(file) as parquet:
        values = parquet.read_row_group(0, columns=[column])[column] if parquet.num_row_groups else pa.chunked_array([[]])
    bounds = pc.min_max(values).as_py()
    return (0, 0) if bounds["min"] is None else (bounds["min"], bounds["max"])


def _relative(path: Path, folder: Path) -> str:
    """Return `path` relative to `folder`, the folder of the config file, or as an absolute path if it is not in `folder`."""
    absolute, base = Path.cwd() / path, Path.cwd() / folder
    return str(absolute.relative_to(base) if absolute.is_relative_to(base) else absolute)


def _is_id(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def _is_time(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(data_type) or pa.types.is_date(data_type) or pa.types.is_integer(data_type))


def _is_number(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or pa.types.is_floating(data_type))


def _is_vector(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(data_type) or pa.types.is_list(data_type) or pa.types.is_large_list(data_type))
