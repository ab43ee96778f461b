"""Columns guessed from parquet files, for `nightjar init --log ... --test ... --items ... --vectors ...`.

A user or item column is recognised by its name, and a time column by its values and its name. A setting whose column is not
recognised gets a placeholder, and its note starts with FILL_IN.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from flows.settings.pipeline import PipelineConfig
from recsys_core.config import is_uri
from recsys_core.errors import InputError, shown, shown_names
from recsys_core.ingest.features.config import FeatureConfig, FeatureKind, FeaturesConfig, ItemTableConfig
from recsys_core.ingest.first_row_group import first_values, plausible_time_unit
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.parquet.columns import is_list, is_text, require_column, value_type
from recsys_core.parquet.sources import open_sources
from recsys_core.units import DAY_S

FILL_IN = "FILL IN"
USER_WORDS = ("user", "u", "customer", "client", "visitor", "member", "account", "buyer", "reviewer", "session")
ITEM_WORDS = ("item", "i", "product", "article", "movie", "film", "book", "track", "song", "video", "sku", "asin", "isbn")
LABEL_WORDS = ("rating", "label", "score", "stars", "overall")
TITLE_WORDS = ("title", "name")
"""Words in the names of user, item, label and title columns. A column with an earlier word is preferred."""
TIME_NAME_PATTERN = re.compile(r"(time|stamp|date|(^|_)(ts|at))$", re.IGNORECASE)
MAX_FEATURES = 20
ID_TYPE_RULE = "ids are integers or strings"


@dataclass(frozen=True)
class InitInputs:
    """The options of `nightjar init`: paths, globs or URIs of the inputs, and the columns that the user named."""

    log: str | None = None
    test: str | None = None
    items: str | None = None
    vectors: str | None = None
    user_column: str | None = None
    item_column: str | None = None
    time_column: str | None = None


def guess_config(config: PipelineConfig, inputs: InitInputs, *, config_folder: Path) -> tuple[PipelineConfig, dict[str, str]]:
    """Return `config` with the given inputs and their columns, and a note for each guessed setting, by its dotted name.

    Args:
        config_folder: folder of the config file. Relative paths in the config are relative to it.

    Raises:
        InputError: a file is missing or is not parquet, or a column that the user named is missing or unsuitable.
    """
    group_by_name: dict[str, Any] = {"embeddings": (), "features": None}
    note_by_setting: dict[str, str] = {}
    item_column = inputs.item_column
    try:
        if inputs.log is not None:
            group_by_name["interactions"] = _guess_interactions(
                _Table("interactions", inputs.log, config_folder, note_by_setting), inputs
            )
            item_column = group_by_name["interactions"].item_column
            if not group_by_name["interactions"].is_ordered:
                history_config = config.model.history.model_copy(update={"last_item_feature": False})
                group_by_name["model"] = config.model.model_copy(update={"history": history_config})
                note_by_setting["model.history.last_item_feature"] = "without times, no item of a history is the last"
        if inputs.vectors is not None:
            group_by_name["embeddings"] = (
                _guess_embeddings(_Table("embeddings", inputs.vectors, config_folder, note_by_setting), item_column),
            )
        if inputs.items is not None:
            item_table = _Table("features.items", inputs.items, config_folder, note_by_setting)
            group_by_name["features"] = FeaturesConfig(items=_guess_items(item_table, item_column))
    except ValidationError as error:
        raise InputError(f"nightjar init: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    return config.model_copy(update=group_by_name), note_by_setting


class _Table:
    """One input, with the names and types of its columns, and the first values of its first file."""

    def __init__(self, group_key: str, path: str, config_folder: Path, note_by_setting: dict[str, str]) -> None:
        self.group_key, self.config_folder, self.note_by_setting = group_key, config_folder, note_by_setting
        self.sources = open_sources((path,), setting=f"{group_key}.paths")
        schema = self.sources[0].schema
        self.type_by_column = {
            **self.sources[0].partition_types,
            **{name: value_type(schema.field(name).type) for name in schema.names},
        }
        absolute_path, absolute_folder = Path.cwd() / path, Path.cwd() / config_folder
        is_in_config_folder = absolute_path.is_relative_to(absolute_folder)
        self.path_in_config = (
            path if is_uri(path) else str(absolute_path.relative_to(absolute_folder) if is_in_config_folder else absolute_path)
        )

    def columns(self, is_allowed_type: Callable[[pa.DataType], bool]) -> list[str]:
        """Return the columns with a suitable type."""
        return [column for column, column_type in self.type_by_column.items() if is_allowed_type(column_type)]

    def values(self, column: str) -> pa.Array:
        """Return the first values of the column without nulls. Return an empty array for a partition key."""
        values = first_values(self.sources, column)
        column_type = self.type_by_column[column]
        return pa.array([], column_type) if values is None else values.cast(column_type).drop_null()

    def note_guess(self, setting: str, column: str) -> None:
        """Write a note for `setting`, whose guessed value is `column`."""
        self.note_by_setting[f"{self.group_key}.{setting}"] = (
            f"guessed: column {shown(column)} is {self.type_by_column[column]}"
        )

    def column_or_placeholder(
        self, setting: str, column: str | None, *, role: str, is_allowed_type: Callable[[pa.DataType], bool], type_rule: str
    ) -> str:
        """Write a note for `setting`, and return `column`, or a placeholder if `column` is None.

        Args:
            role: what the column has, e.g. "users".
            is_allowed_type: returns whether the column may have a type.
            type_rule: the allowed types as a clause, e.g. ID_TYPE_RULE.
        """
        if column is not None:
            self.note_guess(setting, column)
            return column
        usable_columns = self.columns(is_allowed_type)
        unusable_columns = [name for name in self.type_by_column if name not in usable_columns]
        note = f"{FILL_IN} the column of the {role}: "
        note += f"one of {shown_names(usable_columns)}" if usable_columns else "no column can be used"
        if unusable_columns:
            typed_names = [f"{name} ({self.type_by_column[name]})" for name in unusable_columns]
            note += f"; {type_rule}, unlike {shown_names(typed_names, max_names=10)}"
        self.note_by_setting[f"{self.group_key}.{setting}"] = note
        return f"<column of the {role}>"


def _guess_interactions(table: _Table, inputs: InitInputs) -> InteractionsConfig:
    column_by_setting = {
        "user_column": inputs.user_column,
        "item_column": inputs.item_column,
        "timestamp_column": inputs.time_column,
    }
    settings: dict[str, Any] = {setting: column for setting, column in column_by_setting.items() if column is not None}
    for setting, column in settings.items():
        require_column(table.sources[0], column, setting=f"interactions.{setting}")
    if "timestamp_column" not in settings:
        time_column = _time_column(table, settings.values())
        if time_column is None and inputs.test is not None:
            settings["timestamp_column"] = None
            table.note_by_setting["interactions.timestamp_column"] = "guessed: no column has times, so the log has no order"
        else:
            settings["timestamp_column"] = table.column_or_placeholder(
                "timestamp_column",
                time_column,
                role="times",
                is_allowed_type=lambda data_type: _is_time(data_type) or pa.types.is_integer(data_type),
                type_rule="times are timestamps, dates or integers",
            )
            if time_column is None:
                table.note_by_setting["interactions.timestamp_column"] += (
                    "; for a log without times, use --test, or write timestamp_column: null, order_column and "
                    "split: {kind: leave_last_out}"
                )
    if settings["timestamp_column"] in table.columns(pa.types.is_integer):
        unit, newest_time = _time_unit(table, settings["timestamp_column"])
        settings["timestamp_unit"] = unit or "s"
        table.note_by_setting["interactions.timestamp_unit"] = (
            f"guessed from {newest_time}, the newest time in the first rows of the log"
        )
    settings |= _guess_label(table, settings.values())

    for setting, words, role in (("user_column", USER_WORDS, "users"), ("item_column", ITEM_WORDS, "items")):
        if setting not in settings:
            id_columns = [column for column in table.columns(_is_id) if column not in settings.values()]
            settings[setting] = table.column_or_placeholder(
                setting, _named_column(id_columns, words), role=role, is_allowed_type=_is_id, type_rule=ID_TYPE_RULE
            )
    if inputs.test is not None:
        test_table = _Table("interactions.split", inputs.test, table.config_folder, table.note_by_setting)
        settings["split"] = FileSplit(test_paths=(test_table.path_in_config,), validation_share=0.1)
    return InteractionsConfig(paths=(table.path_in_config,), **settings)


def _guess_label(table: _Table, used_columns: Collection[str]) -> dict[str, Any]:
    """Return the settings of the label column if it has two different finite values; otherwise an empty dictionary."""
    label_columns = [column for column in table.columns(_is_label) if column not in used_columns]
    column = _named_column(label_columns, LABEL_WORDS)
    if column is None:
        return {}
    values = pc.cast(table.values(column), pa.float64(), safe=False)
    smallest, largest = pc.min_max(values.filter(pc.is_finite(values))).as_py().values()
    if smallest == largest:
        return {}
    table.note_guess("label_column", column)
    table.note_by_setting["interactions.label_threshold"] = (
        f"guessed: the middle of {smallest:g} to {largest:g}; events below it are left out; "
        "delete label_column and label_threshold to keep all events"
    )
    return {"label_column": column, "label_threshold": (smallest + largest) / 2}


def _guess_embeddings(table: _Table, item_column: str | None) -> EmbeddingsConfig:
    settings = {"id_column": _item_id_column(table, item_column)}
    vector_columns = table.columns(_is_vector)
    matches = [re.fullmatch(r"(.*\D)\d+", column) for column in table.columns(pa.types.is_floating)]
    prefixes = Counter(match[1] for match in matches if match is not None)
    if prefixes and not vector_columns:
        ((prefix, num_columns),) = prefixes.most_common(1)
        settings["dimension_prefix"] = prefix
        table.note_by_setting["embeddings.dimension_prefix"] = (
            f"guessed: the names of {num_columns} columns start with {shown(prefix)}"
        )
    else:
        vector_column = vector_columns[0] if len(vector_columns) == 1 else None
        settings["vector_column"] = table.column_or_placeholder(
            "vector_column", vector_column, role="vectors", is_allowed_type=_is_vector, type_rule="vectors are lists of floats"
        )
    return EmbeddingsConfig.model_validate({"paths": table.path_in_config, **settings})


def _guess_items(table: _Table, item_column: str | None) -> ItemTableConfig:
    id_column = _item_id_column(table, item_column)
    kind_by_column: dict[str, FeatureKind] = dict.fromkeys(table.columns(_is_id), "categorical")
    kind_by_column |= dict.fromkeys(table.columns(_is_fraction), "numeric")
    kind_by_column |= dict.fromkeys(
        table.columns(lambda data_type: is_list(data_type) and _is_id(data_type.value_type)), "list"
    )
    title_column = _named_column([column for column in table.columns(is_text) if column != id_column], TITLE_WORDS)
    if title_column is not None:
        table.note_guess("title_column", title_column)
    feature_columns = [column for column in table.type_by_column if column in kind_by_column.keys() - {id_column, title_column}]
    features = tuple(
        FeatureConfig(name=column, kind=kind_by_column[column], standardise=kind_by_column[column] == "numeric")
        for column in [column for column in feature_columns if re.fullmatch(r"[A-Za-z0-9_]{1,100}", column)][:MAX_FEATURES]
    )
    if not features and title_column is None:
        raise InputError(f"--items: no column of {table.sources[0].name} can be a feature or a title; leave --items out")
    if features:
        note = "guessed from the types: delete the columns that do not describe an item"
        used_columns = {feature.name for feature in features}
        unused_columns = [column for column in feature_columns if column not in used_columns]
        table.note_by_setting["features.items.features"] = note + (
            f"; left out: {shown_names(unused_columns, max_names=10)}" if unused_columns else ""
        )
    return ItemTableConfig(paths=(table.path_in_config,), id_column=id_column, title_column=title_column, features=features)


def _item_id_column(table: _Table, item_column: str | None) -> str:
    """Return the log's item column if the table has it; otherwise a column that is named after an item, or `id`."""
    id_columns = table.columns(_is_id)
    column = item_column if item_column in id_columns else _named_column(id_columns, (*ITEM_WORDS, ""))
    return table.column_or_placeholder("id_column", column, role="item ids", is_allowed_type=_is_id, type_rule=ID_TYPE_RULE)


def _named_column(columns: Sequence[str], words: Sequence[str]) -> str | None:
    """Return the column whose name is the earliest of `words`; None if there is no such column.

    Only the letters of a name count, of any alphabet. Case and a final id, key or code are ignored.
    """
    letters_by_column = {column: re.sub(r"[\W\d_]", "", column.lower()) for column in reversed(columns)}
    column_by_word = {re.sub(r"(id|key|code)$", "", letters): column for column, letters in letters_by_column.items()}
    return next((column_by_word[word] for word in words if word in column_by_word), None)


def _time_column(table: _Table, used_columns: Collection[str]) -> str | None:
    """Return the first column that has both plausible times and a time-like name.

    If no column has both, and exactly one column has either, return that column. Otherwise, return None.
    """
    timestamp_columns = table.columns(_is_time)
    score_by_column = {
        column: bool(TIME_NAME_PATTERN.search(column))
        + (column in timestamp_columns or _time_unit(table, column)[0] is not None)
        for column in [*timestamp_columns, *table.columns(pa.types.is_integer)]
        if column not in used_columns
    }
    best_score = max(score_by_column.values(), default=0)
    best_columns = [column for column, score in score_by_column.items() if score == best_score > 0]
    return best_columns[0] if best_score == 2 or len(best_columns) == 1 else None


def _time_unit(table: _Table, column: str) -> tuple[str | None, int]:
    """Return the time unit of the column, and the largest of its first values. Without a plausible unit, the unit is None."""
    newest_time = pc.max(table.values(column)).as_py() or 0
    return plausible_time_unit(newest_time, latest_s=time.time() + DAY_S), newest_time


def _is_id(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or is_text(data_type))


def _is_label(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(data_type) or pa.types.is_integer(data_type) or _is_fraction(data_type))


def _is_fraction(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_floating(data_type) or pa.types.is_decimal(data_type))


def _is_time(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(data_type) or pa.types.is_date(data_type))


def _is_vector(data_type: pa.DataType) -> bool:
    return bool(is_list(data_type) and pa.types.is_floating(data_type.value_type))
