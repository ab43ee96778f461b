"""Generator of docs/config.md, the reference of all settings, from the config schema: `make docs`."""

import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flows.config import PipelineConfig
from flows.config_errors import nested_models

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
HEADER = """\
# Config reference

All settings of the config file. This page is generated from the schema by `make docs`; do not edit it.

`nightjar init` writes a config with the most important settings. `null` means that a setting is not set; the
descriptions call such a setting empty. Replace `<name>` with the name of a table, setting or feature. Every setting can
also be set on the command line: `--set training.epochs=3`.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(reference(), encoding="utf-8")


def reference() -> str:
    """Return the page: one table of settings per group, one section per top-level group."""
    sections = [HEADER]
    for name, field in PipelineConfig.model_fields.items():
        if is_group(field):
            sections.append(f"## {name}\n\n{sentence(field)}\n")
            for path, model in groups(name, field):
                sections.append(table(path, model, with_title=path != name))
    top_level_settings = [(name, field) for name, field in PipelineConfig.model_fields.items() if not is_group(field)]
    sections.insert(1, "## Top level\n\n" + settings_table(top_level_settings))
    return "\n".join(sections)


def groups(path: str, field: FieldInfo) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every group of settings at and below `field` with its dotted path."""
    path += ".<name>" if get_origin(field.annotation) is dict else ""
    models = list(nested_models(field.annotation))
    for model in models:
        kind = model.model_fields.get("kind")
        title = f"{path} (kind: {kind.default})" if len(models) > 1 and kind is not None else path
        yield title, model
        for name, inner_field in model.model_fields.items():
            yield from groups(f"{path}.{name}", inner_field)


def is_group(field: FieldInfo) -> bool:
    """Return whether a field holds a group of settings."""
    return any(nested_models(field.annotation))


def table(path: str, model: type[BaseModel], *, with_title: bool) -> str:
    """Return the table of the settings of one group."""
    settings = [(name, field) for name, field in model.model_fields.items() if not is_group(field)]
    if not settings:
        return ""
    return (f"### {path}\n\n" if with_title else "") + settings_table(settings)


def settings_table(settings: list[tuple[str, FieldInfo]]) -> str:
    """Return a Markdown table of settings."""
    lines = ["| setting | default | description |", "|---|---|---|"]
    for name, field in settings:
        if name == "kind" and not field.description:  # the title of the table names it
            continue
        lines.append(f"| `{name}` | {default_cell(field)} | {description_cell(field)} |")
    return "\n".join(lines) + "\n"


def default_cell(field: FieldInfo) -> str:
    """Return the default as YAML, or "required"."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    return f"`{json.dumps(value, default=str)}`".replace('"', "").replace("|", "\\|")


def description_cell(field: FieldInfo) -> str:
    """Return the description and the choices of a setting."""
    choices = list(literals(field.annotation))
    text = sentence(field).replace("|", "\\|").replace("<", "&lt;")
    return f"{text} Choices: {', '.join(f'`{choice}`' for choice in choices)}." if len(choices) > 1 else text


def sentence(field: FieldInfo) -> str:
    """Return the description of a setting as a sentence. A first word such as `softmax:` or `max_users` keeps its case."""
    text = field.description or ""
    if text and not re.search(r"[:_]", text.partition(" ")[0]):
        text = text[0].upper() + text[1:]
    return text if not text or text.endswith(".") else f"{text}."


def literals(annotation: Any) -> Iterator[str]:
    """Yield the strings of a Literal, also inside a union."""
    if get_origin(annotation) is Literal:
        yield from (str(choice) for choice in get_args(annotation) if isinstance(choice, str))
    elif get_origin(annotation) in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from literals(argument)


if __name__ == "__main__":
    main()
