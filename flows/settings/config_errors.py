"""Validation errors of a config as sentences: the key as the user wrote it, the problem, and the nearest valid key."""

import difflib
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import printable, shown

MAX_PROBLEMS = 20
"""Number of problems listed in one message."""
ADVICE_BY_REMOVED_SETTING = {
    "checksums": "this setting no longer exists; delete it. Page checksums are always verified, and <file>.sha256 is not read"
}
"""What to do about a setting of an earlier version that has no successor, by the last part of its key."""


def describe_problems(error: ValidationError, raw_settings: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each of the first problems of `raw_settings`, with the dotted key, the problem and a fix."""
    all_errors = error.errors(include_url=False)
    # Pydantic reports a misspelt key twice: as unknown and as missing.
    errors = [details for details in all_errors if details["type"] == "extra_forbidden"] or all_errors
    problems = [_describe_problem(details, raw_settings) for details in errors[:MAX_PROBLEMS]]
    return problems if len(errors) <= MAX_PROBLEMS else [*problems, f"and {len(errors) - MAX_PROBLEMS:,} more"]


def _describe_problem(details: ErrorDetails, raw_settings: Mapping[str, Any]) -> str:
    may_be_missing = details["type"] not in ("value_error", "union_tag_not_found", "union_tag_invalid")
    key = printable(dotted_key_of(details["loc"], raw_settings, may_be_missing=may_be_missing), max_characters=200)
    match details["type"]:
        case "extra_forbidden":
            return f"{key}: {ADVICE_BY_REMOVED_SETTING.get(key.rpartition('.')[2]) or f'unknown key; {_suggestion(key)}'}"
        case "missing":
            return f"{key}: is missing and has no default; set it"
        case "union_tag_not_found" | "union_tag_invalid":
            tag_name = details["ctx"]["discriminator"].strip("'")
            tags = _tags_at(details["loc"], tag_name)
            return f"{key}: set {tag_name} to one of {', '.join(tags)}"
        case "tuple_type" | "list_type":
            return f"{key}: expected a list, but it is {shown(details['input'])}; write its entries in brackets"
        case "model_type" | "dict_type":  # e.g. a group whose settings are all commented out
            input_text = shown(details["input"])
            return (
                f"{key}: expected a group of settings, but it is {input_text}; write its settings below it, or delete the key"
            )
        case "value_error":
            message = details["msg"].removeprefix("Value error, ")
            return f"{key}: {message}" if key else message
        case _:
            return f"{key}: {details['msg']}, but it is {shown(details['input'])}"


def dotted_key_of(location: tuple[int | str, ...], raw_settings: Any, *, may_be_missing: bool = False) -> str:
    """Convert the location of a validation error to a dotted key of `raw_settings`.

    A location may also contain the name of a union member, which is not a key of the file.

    Args:
        may_be_missing: whether the last part of the location may be a key that is not in the file.
    """
    key_parts: list[str] = []
    group = raw_settings
    for index, location_part in enumerate(location):
        if _contains(group, location_part):
            group = group[location_part]
            key_parts.append(str(location_part))
        elif may_be_missing and index == len(location) - 1 and isinstance(location_part, str) and isinstance(group, dict):
            key_parts.append(location_part)  # a missing key
    return ".".join(key_parts)


def _tags_at(location: tuple[int | str, ...], tag_name: str) -> list[str]:
    """Return the allowed values of the setting `tag_name`, such as `kind`, which selects the class at `location`."""
    member_classes: list[type[BaseModel]] = [PipelineConfig]
    for name in (part for part in location if isinstance(part, str)):
        fields = [member_class.model_fields[name] for member_class in member_classes if name in member_class.model_fields]
        member_classes = list(nested_config_classes(fields[0].annotation)) if fields else member_classes
    tag_fields = [
        member_class.model_fields[tag_name] for member_class in member_classes if tag_name in member_class.model_fields
    ]
    return list(dict.fromkeys(field.default for field in tag_fields))


def union_tag(config_class: type[BaseModel]) -> str | None:
    """Return the name of the setting, such as `kind`, whose only value selects this class in a union; None if there is none.

    A class in a union inside another union has a setting for each union. Return the setting of the inner union.
    """
    return next(reversed(union_tags(config_class)), None)


def union_tags(config_class: type[BaseModel]) -> list[str]:
    """Return the names of all settings with only one possible value. They select an inner union and a class in it."""
    fields = config_class.model_fields.items()
    return [name for name, field in fields if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1]


def _contains(group: Any, location_part: int | str) -> bool:
    if isinstance(group, dict):
        return location_part in group
    return isinstance(group, list) and isinstance(location_part, int) and location_part < len(group)


def _suggestion(key: str) -> str:
    valid_keys = sorted(set(setting_keys(PipelineConfig)))
    key_without_index = re.sub(r"\.\d+(?=\.)", "", key)  # an index is the position of a group in a list of groups
    parent, _, name = key_without_index.rpartition(".")
    sibling_names = {
        valid_key.rpartition(".")[2] for valid_key in valid_keys if fnmatchcase(parent, valid_key.rpartition(".")[0])
    }
    if name in sibling_names:  # a setting of another member of the union
        return f"only another kind of {parent} has this setting; remove the setting, or set that kind"
    similar_names = difflib.get_close_matches(name, sibling_names, n=1)
    if similar_names:
        return f"did you mean {parent}{'.' if parent else ''}{similar_names[0]}?"
    same_name_keys = [valid_key for valid_key in valid_keys if valid_key.rpartition(".")[2] == name]
    if not same_name_keys and sibling_names:
        return f"the known keys are {', '.join(sorted(sibling_names))}"
    similar_keys = same_name_keys or difflib.get_close_matches(key_without_index, valid_keys, n=1)
    return f"did you mean {' or '.join(similar_keys)}?" if similar_keys else f"{parent} is not a group of settings"


def setting_keys(config_class: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all settings and groups of `config_class`, with the settings of every member of a union.

    `*` replaces a key that the user chooses, such as the name of a table.
    """
    for name, field in config_class.model_fields.items():
        yield prefix + name
        nested_prefix = f"{prefix}{name}.*." if get_origin(field.annotation) is dict else f"{prefix}{name}."
        for member_class in nested_config_classes(field.annotation):
            yield from setting_keys(member_class, nested_prefix)


def nested_config_classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the config classes that a field with this annotation may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from nested_config_classes(argument)
