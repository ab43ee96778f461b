"""The commented config that `nightjar init` writes, made from the models' own descriptions so that it cannot go stale."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flows import yaml_loader
from flows.config import PipelineConfig
from flows.config_file import nested_models
from recsys_core.data.embeddings.config import EmbeddingsConfig
from recsys_core.data.interactions.config import InteractionsConfig

HEADER = """\
# A night of nightjar: every setting, with its default where it has one. What you leave out takes the default.
# Paths are relative to the folder of this file. Check it with `nightjar validate`.
"""
_WIDTH = 128
_COMMENT_COLUMN = 42


def starter_config() -> PipelineConfig:
    """The smallest config that shows every group of settings: a log with timestamps, and pretrained vectors."""
    return PipelineConfig(
        interactions=InteractionsConfig(paths=("data/interactions/*.parquet",), timestamp_column="timestamp"),
        embeddings=(EmbeddingsConfig(paths=("data/item_embeddings.parquet",), vector_column="embedding"),),
    )


def to_commented_yaml(config: PipelineConfig) -> str:
    """`config` as YAML in which each setting stands beside its description and choices; loads back to an equal config."""
    return HEADER + "\n".join(_lines(config, depth=0)) + "\n"


def _lines(model: BaseModel, *, depth: int) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if depth == 0 and list(nested_models(field.annotation)):
            yield ""
        if isinstance(value, BaseModel):
            yield from _with_comment(f"{'  ' * depth}{name}:", _comment(field))
            yield from _lines(value, depth=depth + 1)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            yield from _with_comment(f"{'  ' * depth}{name}:", _comment(field))
            for entry in value:
                lines = _lines(entry, depth=depth + 1)
                # One entry needs no list around it, and can then be reached by --set.
                yield from lines if len(value) == 1 else _as_item(lines, depth=depth)
        else:
            yield from _with_comment(f"{'  ' * depth}{name}: {_scalar(value)}", _comment(field))


def _as_item(lines: Iterator[str], *, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for index, line in enumerate(lines):
        yield f"{indent}{'- ' if index == 0 else '  '}{line[len(indent) + 2 :]}"


def _comment(field: FieldInfo) -> str:
    choices = _choices(field)
    return (field.description or "") + (f" ({' | '.join(choices)})" if choices else "")


def _choices(field: FieldInfo) -> list[str]:
    members = list(nested_models(field.annotation))
    if len(members) > 1:
        return [f"{m.model_fields['kind'].default}: {', '.join(n for n in m.model_fields if n != 'kind')}" for m in members]
    if members:
        return []
    literals = [argument for argument in get_args(field.annotation) if isinstance(argument, str)]
    return literals if len(literals) > 1 else []


def _scalar(value: Any) -> str:
    dumped = json.loads(json.dumps(value, default=str))
    if isinstance(dumped, list) and len(dumped) == 1 and isinstance(dumped[0], str):
        dumped = dumped[0]
    return yaml_loader.dump(dumped, default_flow_style=True, width=10_000).removesuffix("\n...\n").rstrip("\n")


def _with_comment(setting: str, comment: str) -> Iterator[str]:
    if not comment:
        yield setting
        return
    column = max(_COMMENT_COLUMN, len(setting) + 2)
    first, *rest = textwrap.wrap(comment, _WIDTH - column - 2)
    yield f"{setting.ljust(column)}# {first}"
    for line in rest:
        yield f"{' ' * column}# {line}"
