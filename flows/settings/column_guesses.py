"""Columns guessed from parquet schemas, for `nightjar init --log ... --items ... --vectors ...`."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError
from recsys_core.ingest.features.config import FeatureConfig, FeaturesConfig, FeatureTableConfig
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.vectors.config import EmbeddingsConfig

USER_COLUMN_NAMES = ("user_id", "userid", "user", "uid", "customer_id", "visitor_id", "session_id", "account_id")
ITEM_COLUMN_NAMES = ("item_id", "itemid", "item", "iid", "movie_id", "movieid", "product_id", "article_id", "asin", "sku", "id")
TIME_COLUMN_NAMES = ("timestamp", "time", "ts", "event_time", "datetime", "date", "created_at", "unix_timestamp")
LABEL_COLUMN_NAMES = ("rating", "label", "score", "stars", "overall")
VECTOR_COLUMN_NAMES = ("embedding", "vector", "embeddings", "vec", "emb")
MAX_FEATURES = 20
_TICKS_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_YEAR_1990_S = 631_152_000

Notes = dict[str, str]
"""Comments by dotted name of a setting."""


def guess_config(
    config: PipelineConfig, *, log_path: Path | None, items_path: Path | None, vectors_path: Path | None, config_folder: Path
) -> tuple[PipelineConfig, Notes]:
    """Return `config` with the given inputs and their guessed columns, and a note for each guess.

    Args:
        log_path: parquet file, folder or glob of the interaction log; None keeps the log of `config`.
        items_path: parquet file with features of the items; None for no features.
        vectors_path: parquet file with pretrained vectors of the items; None for no vectors.
        config_folder: folder of the config file. Relative paths in the config are relative to it.

    Raises:
        InputError: a file is missing or is not parquet, or a required column cannot be guessed.
    """
    notes: Notes = {}
    interactions = (
        config.interactions if log_path is None else _guess_interactions(log_path, notes=notes, config_folder=config_folder)
    )
    embeddings = () if vectors_path is None else (_guess_embeddings(vectors_path, notes=notes, config_folder=config_folder),)
    features = (
        None if items_path is None else FeaturesConfig(items=_guess_items(items_path, notes=notes, config_folder=config_folder))
    )
    return config.model_copy(update={"interactions": interactions, "embeddings": embeddings, "features": features}), notes


def _guess_interactions(input_path: Path, *, notes: Notes, config_folder: Path) -> InteractionsConfig:
    parquet_path = _first_file(input_path)
    schema = _read_schema(parquet_path)
    user_column = _require_column(schema, USER_COLUMN_NAMES, _is_id, role="user", option="--log", parquet_path=parquet_path)
    item_column = _require_column(
        schema,
        [name for name in ITEM_COLUMN_NAMES if name != user_column],
        _is_id,
        role="item",
        option="--log",
        parquet_path=parquet_path,
    )
    timestamp_column = _require_column(
        schema, TIME_COLUMN_NAMES, _is_time, role="timestamp", option="--log", parquet_path=parquet_path
    )
    settings: dict[str, Any] = {"user_column": user_column, "item_column": item_column, "timestamp_column": timestamp_column}
    for setting, column_name in settings.items():
        _note(notes, f"interactions.{setting}", schema, column_name)
    if pa.types.is_integer(schema.field(timestamp_column).type):
        settings["timestamp_unit"], newest_time = _guess_time_unit(parquet_path, timestamp_column)
        notes["interactions.timestamp_unit"] = f"guessed: the newest time of the first row group is {newest_time}"
    label_column = _find_column(schema, LABEL_COLUMN_NAMES, _is_number)
    if label_column is not None:
        settings["label_column"] = label_column
        notes["interactions.label_column"] = (
            f"guessed: column {label_column!r} is {schema.field(label_column).type}; events below "
            "label_threshold are left out; delete both settings to keep all events"
        )
        min_label, max_label = _value_range(parquet_path, label_column)
        settings["label_threshold"] = (min_label + max_label) / 2
        notes["interactions.label_threshold"] = f"guessed: the middle of {min_label:g} to {max_label:g} in the first row group"
    return InteractionsConfig(paths=(_path_in_config(input_path, config_folder),), **settings)


def _guess_embeddings(input_path: Path, *, notes: Notes, config_folder: Path) -> EmbeddingsConfig:
    parquet_path = _first_file(input_path)
    schema = _read_schema(parquet_path)
    id_column = _require_column(
        schema, ITEM_COLUMN_NAMES, _is_id, role="item id", option="--vectors", parquet_path=parquet_path
    )
    _note(notes, "embeddings.id_column", schema, id_column)
    vector_column = _find_column(schema, VECTOR_COLUMN_NAMES, _is_vector)
    if vector_column is not None:
        _note(notes, "embeddings.vector_column", schema, vector_column)
        return EmbeddingsConfig(
            paths=(_path_in_config(input_path, config_folder),), id_column=id_column, vector_column=vector_column
        )
    prefixes = [match[1] for name in schema.names if (match := re.fullmatch(r"(.*\D)\d+", name))]
    if not prefixes:
        raise InputError(
            f"--vectors {parquet_path}: no list column and no numbered columns such as dim_0, dim_1; the columns are "
            f"{', '.join(schema.names)}"
        )
    prefix = max(set(prefixes), key=prefixes.count)
    notes["embeddings.dimension_prefix"] = f"guessed: {prefixes.count(prefix)} columns are named {prefix}<number>"
    return EmbeddingsConfig(paths=(_path_in_config(input_path, config_folder),), id_column=id_column, dimension_prefix=prefix)


def _guess_items(input_path: Path, *, notes: Notes, config_folder: Path) -> FeatureTableConfig:
    parquet_path = _first_file(input_path)
    schema = _read_schema(parquet_path)
    id_column = _require_column(schema, ITEM_COLUMN_NAMES, _is_id, role="item id", option="--items", parquet_path=parquet_path)
    _note(notes, "features.items.id_column", schema, id_column)
    features = [feature for field in schema if field.name != id_column and (feature := _guess_feature(field)) is not None]
    if not features:
        raise InputError(f"--items {parquet_path}: no column can be a feature; the columns are {', '.join(schema.names)}")
    notes["features.items.features"] = "guessed from the types of the columns: delete the columns that do not describe an item"
    return FeatureTableConfig(
        paths=(_path_in_config(input_path, config_folder),), id_column=id_column, features=tuple(features[:MAX_FEATURES])
    )


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


def _read_schema(parquet_path: Path) -> pa.Schema:
    try:
        return pq.read_schema(parquet_path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{parquet_path}: not a readable parquet file ({str(error).splitlines()[0]})") from None


def _find_column(schema: pa.Schema, candidate_names: Sequence[str], has_type: Callable[[pa.DataType], bool]) -> str | None:
    """Return the first of `candidate_names` that is a column with a suitable type, or None. Case is ignored."""
    field_by_name = {field.name.lower(): field for field in schema}
    for candidate_name in candidate_names:
        if candidate_name in field_by_name and has_type(field_by_name[candidate_name].type):
            return str(field_by_name[candidate_name].name)
    return None


def _require_column(
    schema: pa.Schema,
    candidate_names: Sequence[str],
    has_type: Callable[[pa.DataType], bool],
    *,
    role: str,
    option: str,
    parquet_path: Path,
) -> str:
    column_name = _find_column(schema, candidate_names, has_type)
    if column_name is None:
        raise InputError(
            f"{option} {parquet_path}: no column is recognised as the {role} ({', '.join(candidate_names[:4])}, ...); the "
            f"columns are {', '.join(schema.names)}; rename one, or run `nightjar init` without {option} and "
            "set the columns by hand"
        )
    return column_name


def _note(notes: Notes, setting: str, schema: pa.Schema, column_name: str) -> None:
    notes[setting] = f"guessed: column {column_name!r} is {schema.field(column_name).type}"


def _guess_time_unit(parquet_path: Path, column_name: str) -> tuple[str, int]:
    """Return the guessed unit of a time column, and the newest time in the first row group.

    In the guessed unit, the newest time is between 1990 and tomorrow. If no unit fits, the guess is seconds.
    """
    _, newest_time = _value_range(parquet_path, column_name)
    tomorrow_s = time.time() + 86_400
    for unit, ticks_per_s in _TICKS_PER_S.items():
        if _YEAR_1990_S <= newest_time / ticks_per_s <= tomorrow_s:
            return unit, int(newest_time)
    return "s", int(newest_time)


def _value_range(parquet_path: Path, column_name: str) -> tuple[float, float]:
    """Return the smallest and largest value of the column in the first row group; (0, 0) if it has no values."""
    with pq.ParquetFile(parquet_path) as parquet_file:
        column_values = (
            parquet_file.read_row_group(0, columns=[column_name])[column_name]
            if parquet_file.num_row_groups
            else pa.chunked_array([[]])
        )
    bounds = pc.min_max(column_values).as_py()
    return (0, 0) if bounds["min"] is None else (bounds["min"], bounds["max"])


def _path_in_config(path: Path, config_folder: Path) -> str:
    """Return `path` relative to the folder of the config file. A path outside of this folder becomes absolute."""
    absolute_path, absolute_folder = Path.cwd() / path, Path.cwd() / config_folder
    return str(absolute_path.relative_to(absolute_folder) if absolute_path.is_relative_to(absolute_folder) else absolute_path)


def _is_id(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def _is_time(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(data_type) or pa.types.is_date(data_type) or pa.types.is_integer(data_type))


def _is_number(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or pa.types.is_floating(data_type))


def _is_vector(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(data_type) or pa.types.is_list(data_type) or pa.types.is_large_list(data_type))
