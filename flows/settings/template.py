"""The commented config files of `nightjar init` and `nightjar demo`, generated from the descriptions of the config models."""

import json
import textwrap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flows.settings import yaml_loader
from flows.settings.config_errors import nested_config_classes, union_tag, union_tags
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.split_config import TimeSplit
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.models.config import TwoTowerConfig
from recsys_core.training.config import TrainingConfig

HEADER = "# Config of nightjar. Relative paths are relative to the folder of this file. Check it with `nightjar validate`.\n"
HEADER_IMPORTANT = "# These are the important settings; `nightjar init --all` writes every setting.\n"
HEADER_ALL = "# These are all settings; a setting that you delete has its default.\n"
IMPORTANT_SETTINGS = (
    "workspace",
    "interactions.paths",
    "interactions.user_column",
    "interactions.item_column",
    "interactions.timestamp_column",
    "interactions.timestamp_unit",
    "interactions.label_column",
    "interactions.label_threshold",
    "interactions.split.kind",
    "interactions.split.test_days",
    "interactions.split.validation_days",
    "embeddings.source",
    "embeddings.paths",
    "embeddings.id_column",
    "embeddings.vector_column",
    "features",
    "model.embedding_dim",
    "model.history.length",
    "model.query.layers",
    "model.candidate.layers",
    "model.temperature",
    "loss.kind",
    "loss.num_negatives",
    "training.epochs",
    "training.batch_size",
    "training.dense_optimizer.learning_rate",
    "training.table_optimizer.learning_rate",
    "index.served.kind",
    "registry.model_name",
    "registry.gate.max_relative_drop",
    "schedule.cron",
    "schedule.timezone",
)
"""Settings that `nightjar init` writes, in addition to settings with a value that is not the default."""
_LINE_WIDTH = 128
_COMMENT_COLUMN = 42
_MIN_COMMENT_WIDTH = 30


def starter_config() -> PipelineConfig:
    """Return a minimal config: an interaction log with timestamps, pretrained vectors, and a temperature that fits the data."""
    return PipelineConfig(
        interactions=InteractionsConfig(paths=("data/interactions/*.parquet",), timestamp_column="timestamp"),
        embeddings=(EmbeddingsConfig(paths=("data/item_embeddings.parquet",), vector_column="embedding"),),
        model=TwoTowerConfig(temperature="auto"),
    )


def demo_config() -> PipelineConfig:
    """Return a config for the generated log: the last two days are the test split, the day before is the validation split."""
    starter = starter_config()
    split = TimeSplit(test_days=2, validation_days=1)
    return starter.model_copy(
        update={
            "name": "demo",
            "workspace": Path(),
            "interactions": starter.interactions.model_copy(update={"split": split}),
            "model": TwoTowerConfig(),  # the default temperature fits the demo, so no training has to compare temperatures
            "training": TrainingConfig(epochs=4, batch_size=512),
        }
    )


def write_demo(workspace: Path) -> Path:
    """Generate `<workspace>/data` and write `<workspace>/nightly.yaml`, unless they exist; return the path of the config."""
    from recsys_core.ingest.synthetic import generate  # imports NumPy and pyarrow

    config_path = workspace / "nightly.yaml"
    if not (workspace / "data" / "item_embeddings.parquet").is_file():
        generate(workspace / "data")
    if not config_path.is_file():
        config_path.write_text(to_commented_yaml(demo_config()), encoding="utf-8")
    return config_path


def require_new_file(config_path: Path) -> None:
    """Raise InputError if the config file exists already, or if its folder does not exist."""
    if config_path.exists():
        raise InputError(f"{config_path}: exists already; remove it, or name another file")
    if not config_path.parent.is_dir():
        raise InputError(f"{config_path}: the folder {config_path.parent} does not exist; create it first")


def to_commented_yaml(
    config: PipelineConfig, *, note_by_setting: Mapping[str, str] | None = None, every_setting: bool = True
) -> str:
    """Format `config` as YAML with the description and choices of each setting. The text loads back to an equal config.

    Args:
        note_by_setting: comments by dotted name, written above the setting.
        every_setting: write all settings. Otherwise, write IMPORTANT_SETTINGS and the settings that differ from their default.
    """
    header = HEADER + (HEADER_ALL if every_setting else HEADER_IMPORTANT)
    writer = _TemplateWriter(note_by_setting or {}, None if every_setting else IMPORTANT_SETTINGS)
    return header + "\n".join(writer.lines(config)) + "\n"


class _TemplateWriter(NamedTuple):
    """Writer of a config as commented YAML.

    Attributes:
        note_by_setting: comments by dotted name of a setting.
        written_names: dotted names of the settings that are written even if they have their default; None: all settings.
    """

    note_by_setting: Mapping[str, str]
    written_names: Collection[str] | None

    def lines(self, config: BaseModel, *, group_name: str = "", depth: int = 0, kind_name: str | None = None) -> Iterator[str]:
        """Yield the lines of `config`, the group of settings with the dotted name `group_name`.

        Args:
            kind_name: setting that selects the kind of the group, and is written even if it has its default; None if the group
                has the same kind without this setting.
        """
        indent = "  " * depth
        for setting_name, field in type(config).model_fields.items():
            value, dotted_name = getattr(config, setting_name), f"{group_name}.{setting_name}" if group_name else setting_name
            if setting_name != kind_name and not self._is_written(dotted_name, field, value):
                continue
            if depth == 0 and list(nested_config_classes(field.annotation)):
                yield ""
            if dotted_name in self.note_by_setting:
                yield f"{indent}# {self.note_by_setting[dotted_name]}"
            if isinstance(value, BaseModel):
                yield from _with_comment(f"{indent}{setting_name}:", _comment(field))
                default = field.get_default(call_default_factory=True)
                inner_kind_name = None if type(value) is type(default) else union_tag(type(value))
                yield from self.lines(value, group_name=dotted_name, depth=depth + 1, kind_name=inner_kind_name)
            elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
                yield from _with_comment(f"{indent}{setting_name}:", _comment(field))
                # A single group is written without a list, so that --set can name its settings without an index.
                is_single_group = len(value) == 1 and dotted_name == "embeddings"
                for inner_config in value:
                    inner_kind_name = union_tag(type(inner_config))
                    inner_lines = self.lines(inner_config, group_name=dotted_name, depth=depth + 1, kind_name=inner_kind_name)
                    yield from inner_lines if is_single_group else _as_yaml_list_element(inner_lines, depth=depth)
            elif isinstance(value, dict) and value and all(isinstance(group, BaseModel) for group in value.values()):
                yield from _with_comment(f"{indent}{setting_name}:", _comment(field))
                yield from self._named_groups(value, group_name=dotted_name, depth=depth + 1)
            else:
                is_single_path = setting_name.endswith("paths") and isinstance(value, tuple) and len(value) == 1
                value_yaml = _inline_yaml(
                    value[0] if is_single_path else value
                )  # only lists of paths can be written as a string
                yield from _with_comment(f"{indent}{setting_name}: {value_yaml}", _comment(field))

    def _named_groups(self, groups: Mapping[str, BaseModel], *, group_name: str, depth: int) -> Iterator[str]:
        """Yield a line for each named group, such as a table, with the settings of the group that differ from their default."""
        indent = "  " * depth
        for name, group in groups.items():
            note_prefix = f"{group_name}.{name}."
            for note in dict.fromkeys(note for key, note in self.note_by_setting.items() if key.startswith(note_prefix)):
                yield f"{indent}# {note}"
            settings = group.model_dump(mode="json", exclude_defaults=True)
            yield f"{indent}{_inline_yaml(name)}: {_inline_yaml(settings)}"

    def _is_written(self, dotted_name: str, field: FieldInfo, value: Any) -> bool:
        if self.written_names is None or field.is_required() or value != field.get_default(call_default_factory=True):
            return True
        return any(name == dotted_name or name.startswith(f"{dotted_name}.") for name in self.written_names)


def _as_yaml_list_element(lines: Iterator[str], *, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for index, line in enumerate(lines):
        yield f"{indent}{'- ' if index == 0 else '  '}{line[len(indent) + 2 :]}"


def _comment(field: FieldInfo) -> str:
    choices = _choices(field)
    description = (field.description or "").replace("`", "")  # backticks are only for docs/config.md
    return description + (f" ({' | '.join(choices)})" if choices else "")


def _choices(field: FieldInfo) -> list[str]:
    config_classes = list(nested_config_classes(field.annotation))
    if len(config_classes) > 1:
        shared_names = set.intersection(*(set(config_class.model_fields) for config_class in config_classes))
        return [_kind_and_settings(config_class, shared_names=shared_names) for config_class in config_classes]
    if config_classes:
        return []
    literal_choices = [argument for argument in get_args(field.annotation) if isinstance(argument, str)]
    return literal_choices if len(literal_choices) > 1 else []


def _kind_and_settings(config_class: type[BaseModel], *, shared_names: set[str]) -> str:
    """Return text such as "time: test_days, validation_days": the kind that a class describes, and its own settings."""
    tag_names = union_tags(config_class)
    tag_values = [str(config_class.model_fields[name].default) for name in tag_names]  # each class of a union has a tag
    kind = " with ".join(
        [tag_values[0], *(f"{name} {value}" for name, value in zip(tag_names[1:], tag_values[1:], strict=True))]
    )
    own_names = ", ".join(name for name in config_class.model_fields if name not in {*shared_names, *tag_names})
    return f"{kind}: {own_names}" if own_names else kind


def _inline_yaml(value: Any) -> str:
    plain_value = json.loads(json.dumps(value, default=str))
    return yaml_loader.dump(plain_value, is_inline=True).removesuffix("\n...\n").rstrip("\n")


def _with_comment(setting_line: str, comment: str) -> Iterator[str]:
    if not comment:
        yield setting_line
        return
    comment_column = max(_COMMENT_COLUMN, len(setting_line) + 2)
    if comment_column + _MIN_COMMENT_WIDTH > _LINE_WIDTH:
        yield setting_line
        setting_line, comment_column = "", _COMMENT_COLUMN  # the comment begins on the next line
    first_line, *other_lines = textwrap.wrap(comment, _LINE_WIDTH - comment_column - 2)
    yield f"{setting_line.ljust(comment_column)}# {first_line}"
    for line in other_lines:
        yield f"{' ' * comment_column}# {line}"
