"""Config files: reading YAML and `--set a.b=value` options into a PipelineConfig, and writing a PipelineConfig as YAML."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from yaml import YAMLError

from flows import yaml_loader
from flows.config import PipelineConfig
from flows.config_errors import describe_error, dotted_key, relevant_errors
from recsys_core.atomic import write_text
from recsys_core.errors import InputError, printable, shown
from tasks.tuning.config import RangeConfig, label_of

TUNABLE_GROUPS = ("model", "tables", "loss", "training", "sharding")
"""Groups of settings that `nightjar tune` may vary."""
NOT_TUNABLE = {
    "training.validation": "trials are compared by this setting, so all trials need the same value; leave it out",
    "training.warm_start": "trials start from scratch; leave it out",
}
MAX_PROBLEMS = 20
"""Number of problems listed in one message."""
_NAME_PATTERN = r'(?:"[^"]+"|[^".]+)'


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read the config in `path` and apply `overrides`.

    Args:
        path: config file. Relative paths in the file and in the overrides are relative to its folder.
        overrides: settings as "a.b=value" with the value in YAML, such as "training.batch_size=8192". A name that contains a
            dot is quoted: 'tables."item.brand".dim=8'.

    Raises:
        InputError: the file cannot be read, or the config is invalid; the message lists the problems.
    """
    path = Path(path)
    raw = _read(path)
    for override in overrides:
        _apply_override(raw, override)
    try:
        config = PipelineConfig.model_validate(raw)
    except ValidationError as error:
        details = relevant_errors(error)
        problems = [describe_error(detail, raw) for detail in details[:MAX_PROBLEMS]]
        raise _input_error(path, problems, num_more=len(details) - len(problems)) from None
    if config.tuning is None:
        return config.with_absolute_paths(path.parent)
    range_problems: list[str] = []
    ranges: dict[str, RangeConfig] = {}
    for name, value_range in config.tuning.ranges.items():
        try:
            ranges[name] = _check_range(config, name, value_range)
        except InputError:  # the name of the setting is invalid
            raise
        except ValueError as error:
            range_problems += [f"tuning.ranges: {line}" for line in str(error).splitlines()]
    if range_problems:
        raise _input_error(path, range_problems)
    tuning = config.tuning.model_copy(update={"ranges": ranges})
    return config.model_copy(update={"tuning": tuning}).with_absolute_paths(path.parent)


def with_settings(config: PipelineConfig, settings: Mapping[str, Any]) -> PipelineConfig:
    """Return `config` without tuning, and with the values in `settings` by dotted name. Raise InputError if it is invalid."""
    validation = _validate(config, settings)
    if validation.config is None:
        raise InputError("; ".join(validation.problems))
    return validation.config


def settings_as_yaml(config: PipelineConfig, settings: Mapping[str, Any]) -> str:
    """Return `settings` as YAML for the user's config file. If a setting is in a list, the whole list is written."""
    raw = with_settings(config, settings).model_dump(mode="json")
    groups: dict[str, Any] = {}
    for dotted_name in settings:
        name_of_list = re.sub(r"\.\d+(\..*)?$", "", dotted_name)
        _put_setting(groups, name_of_list, _get_setting(raw, name_of_list), source=dotted_name)
    return yaml_loader.dump(groups)


def dump_config(config: PipelineConfig, path: Path) -> None:
    """Write `config` as YAML that load_config reads. A resumed run replaces the file, so it is written atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, yaml_loader.dump(config.model_dump(mode="json")))


def _input_error(path: Path, problems: Sequence[str], *, num_more: int = 0) -> InputError:
    last_line = [f"and {num_more:,} more"] if num_more else []
    return InputError("\n".join([f"{path}:", *(f"  {problem}" for problem in (*problems, *last_line))]))


class _Validation(NamedTuple):
    """A config with changed settings, after validation.

    Attributes:
        config: the config; None if it is invalid.
        has_invalid_settings: whether a changed setting is invalid by itself; False if it only contradicts another setting.
        problems: the problems of an invalid config.
    """

    config: PipelineConfig | None
    has_invalid_settings: bool = False
    problems: tuple[str, ...] = ()


def _validate(config: PipelineConfig, settings: Mapping[str, Any]) -> _Validation:
    """Validate `config` with `settings` replaced."""
    raw = config.model_dump(mode="json") | {"tuning": None}
    for dotted_name, value in settings.items():
        _put_setting(raw, dotted_name, value, source=f"tuning.ranges.{dotted_name}")
    try:
        return _Validation(PipelineConfig.model_validate(raw))
    except ValidationError as error:
        details = relevant_errors(error)
        names = tuple(name.replace('"', "") for name in settings)
        setting_details = [
            detail for detail in details if detail["type"] != "value_error" or dotted_key(detail["loc"], raw).startswith(names)
        ]
        return _Validation(
            None, bool(setting_details), tuple(describe_error(detail, raw) for detail in setting_details or details)
        )


def _check_range(config: PipelineConfig, dotted_name: str, value_range: RangeConfig) -> RangeConfig:
    """Return the range with its values converted to the type of the setting.

    Raise ValueError if a value is invalid. Each line of its message describes one problem.
    """
    if dotted_name.partition(".")[0] not in TUNABLE_GROUPS or "." not in dotted_name:
        raise ValueError(
            f"{dotted_name}: all trials share one ingest and end after training, so only these groups of settings can have a "
            f"range: {', '.join(TUNABLE_GROUPS)}"
        )
    for group, reason in NOT_TUNABLE.items():
        if f"{dotted_name}.".startswith(f"{group}."):
            raise ValueError(f"{dotted_name}: {reason}")
    validations = [(probe, _validate(config, {dotted_name: probe})) for probe in value_range.probes]
    value_by_label = {
        label_of(probe): _get_setting(validation.config.model_dump(mode="json"), dotted_name)
        for probe, validation in validations
        if validation.config is not None
    }
    # A value can contradict a setting whose value also varies. But at least one value must be valid.
    failed_validations = [validation for _, validation in validations if validation.has_invalid_settings or not value_by_label]
    if failed_validations:
        raise ValueError("\n".join(failed_validations[0].problems))
    try:
        return value_range.convert_to_setting_type(value_by_label)
    except ValueError as error:
        raise ValueError(f"{dotted_name}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(yaml_loader.MAX_CHARACTERS + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; `nightjar init {path}` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    raw = _parse(text, subject=f"{path}:")
    if not isinstance(raw, dict):
        raise InputError(f"{path}: holds {type(raw).__name__}, expected a mapping with keys like interactions: and workspace:")
    return raw


def _parse(text: str, *, subject: str) -> Any:
    try:
        return yaml_loader.load(text)
    except YAMLError as error:
        raise InputError(f"{subject} is not valid YAML: {error}") from None
    except yaml_loader.TooLargeError as error:
        raise InputError(f"{subject} {error}") from None


def _apply_override(raw: dict[str, Any], override: str) -> None:
    source = f"--set {printable(override, max_characters=200)}"
    dotted_name, separator, text = override.partition("=")
    if not separator or not dotted_name:
        raise InputError(f"{source}: expected a.b=value, e.g. --set training.batch_size=8192")
    _put_setting(raw, dotted_name.strip(), _parse(text, subject=f"{source}: the value"), source=source)


def _split(dotted_name: str, *, source: str) -> list[str]:
    """Split a."b.c".d into a, b.c, d."""
    if re.fullmatch(rf"{_NAME_PATTERN}(\.{_NAME_PATTERN})*", dotted_name) is None:
        raise InputError(f'{source}: expected a.b=value; put quotes only around a name that contains a dot: a."b.c"=value')
    names = [quoted or plain for quoted, plain in re.findall(r'"([^"]+)"|([^".]+)', dotted_name)]
    if len(names) > yaml_loader.MAX_DEPTH:
        raise InputError(f"{source}: {len(names):,} nested names, but no setting is nested that deep")
    return names


def _get_setting(raw: Any, dotted_name: str) -> Any:
    for key in _split(dotted_name, source=dotted_name):
        raw = raw[int(key)] if isinstance(raw, list) else raw[key]
    return raw


def _put_setting(raw: dict[str, Any], dotted_name: str, value: Any, *, source: str) -> None:
    """Set raw[a][b] for the name a.b and create missing groups.

    Args:
        source: the user's text, for error messages.
    """
    *parents, last_name = _split(dotted_name, source=source)
    group: Any = raw
    for depth, key in enumerate(parents):
        if isinstance(group, list):
            if not (key.isdecimal() and key.isascii() and int(key[:9]) < len(group)):
                parent = ".".join(parents[:depth])
                raise InputError(f"{source}: {parent} is a list of {len(group)}; name an entry by its index, from 0")
            group = group[int(key[:9])]
        else:
            group[key] = {} if group.get(key) is None else group[key]
            group = group[key]
        is_list_entry = isinstance(group, list) and depth + 1 == len(parents)
        if not isinstance(group, dict | list) or is_list_entry:
            group_name = ".".join(parents[: depth + 1])
            raise InputError(f"{source}: {group_name} is the value {shown(group)}, not a group of settings")
    group[last_name] = value
