"""Config files: reading YAML and `--set a.b=value` options into a PipelineConfig, and writing a PipelineConfig as YAML."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.settings import yaml_loader
from flows.settings.config_errors import describe_problems
from flows.settings.pipeline import PipelineConfig
from recsys_core.disk import write_text
from recsys_core.errors import InputError, printable, shown
from tasks.tuning.config import RangeConfig, label_of

TUNABLE_GROUPS = ("model", "tables", "loss", "training", "sharding")
"""Groups of settings that `nightjar tune` may vary."""
REASON_BY_FIXED_SETTING = {
    "training.validation": "trials are compared by this setting, so all trials need the same value; leave it out",
    "training.warm_start": "trials start from scratch; leave it out",
}
"""Why a setting of TUNABLE_GROUPS cannot vary, and what to do."""
_NAME_PATTERN = r'(?:"[^"]+"|[^".]+)'


@dataclass(frozen=True)
class LoadedConfig:
    """A config with the file and the overrides that it was read from."""

    config: PipelineConfig
    path: Path
    overrides: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] | None = None) -> "LoadedConfig":
        """Read the config in `path` and apply `overrides`, as `load_config` does."""
        return cls(load_config(path, overrides or ()), path, tuple(overrides or ()))

    @property
    def flow_parameters(self) -> dict[str, Any]:
        """The parameters with which a deployed flow reads the config again."""
        return {"pipeline": str(self.path.absolute()), "overrides": list(self.overrides)}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read the config in `path` and apply `overrides`.

    Args:
        path: config file. Relative paths in the file and in the overrides are relative to the file's folder.
        overrides: settings as "a.b=value" with the value in YAML, such as "training.batch_size=8192". A name that contains a
            dot is quoted: 'tables."item.brand".dim=8'.

    Raises:
        InputError: the file cannot be read, or the config is invalid. The message lists the problems.
    """
    path = Path(path)
    raw_settings = _read_settings(path)
    for override in overrides:
        _apply_override(raw_settings, override)
    try:
        config = PipelineConfig.model_validate(raw_settings)
    except ValidationError as error:
        raise InputError(f"{path}:\n  " + "\n  ".join(describe_problems(error, raw_settings))) from None
    if config.tuning is not None:
        try:
            _require_effect_of_each_range(list(config.tuning.ranges))
            range_by_key = {key: _typed_range(config, key, value) for key, value in config.tuning.ranges.items()}
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        config = config.model_copy(update={"tuning": config.tuning.model_copy(update={"ranges": range_by_key})})
    return config.with_absolute_paths(path.parent)


def with_settings(config: PipelineConfig, settings: Mapping[str, Any]) -> PipelineConfig:
    """Return `config` with the values of `settings`, a mapping by dotted key, and without the group `tuning`.

    Raise InputError if the resulting config is invalid.
    """
    raw_settings = _changed_settings(config, settings)
    try:
        return PipelineConfig.model_validate(raw_settings)
    except ValidationError as error:
        raise InputError("; ".join(describe_problems(error, raw_settings))) from None


def setting_value(config: PipelineConfig, key: str) -> Any:
    """Return the value of the setting `key`, a dotted key; None if the config does not have the group of the setting."""
    try:
        return _get_setting(config.model_dump(mode="json"), key)
    except (KeyError, TypeError):
        return None


def settings_as_yaml(config: PipelineConfig, settings: Mapping[str, Any]) -> str:
    """Return `settings` as YAML for the user's config file. If a setting is in a list, the YAML contains the whole list."""
    raw_settings = with_settings(config, settings).model_dump(mode="json")
    groups: dict[str, Any] = {}
    for key in settings:
        key_or_list_key = re.sub(r"\.\d+(\..*)?$", "", key)  # without the index in a list and the keys below it
        value = _get_setting(raw_settings, key_or_list_key)
        _put_setting(groups, key_or_list_key, value, user_text=key)
    return yaml_loader.dump(groups)


def dump_config(config: PipelineConfig, path: Path) -> None:
    """Write `config` as YAML that load_config reads. The file is written atomically, because a resumed run replaces it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, yaml_loader.dump(config.model_dump(mode="json")))


def _changed_settings(config: PipelineConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `config` without `tuning`, and with the values of `settings`, a mapping by dotted key."""
    raw_settings = config.model_dump(mode="json") | {"tuning": None}
    for key, value in settings.items():
        _put_setting(raw_settings, key, value, user_text=f"tuning.ranges.{key}")
    return raw_settings


def _require_effect_of_each_range(keys: Sequence[str]) -> None:
    """Raise InputError if the key of a range is a group that contains the key of an earlier range, and replaces its value."""
    for index, key in enumerate(keys):
        names = _split_key(key, user_text=f"tuning.ranges.{key}")
        for earlier_key in keys[:index]:
            if _split_key(earlier_key, user_text=f"tuning.ranges.{earlier_key}")[: len(names)] == names:
                raise InputError(
                    f"tuning.ranges: {key} replaces the value of {earlier_key}, which then has no effect; drop one of the two "
                    "ranges, or write the group first"
                )


def _typed_range(config: PipelineConfig, key: str, value_range: RangeConfig) -> RangeConfig:
    """Return the range of the setting `key` with all values converted to the type of the setting.

    Only some values of the range are validated, such as the ends (`RangeConfig.probes`). Raise InputError if one is invalid.
    """
    if key.partition(".")[0] not in TUNABLE_GROUPS or "." not in key:
        raise InputError(
            f"tuning.ranges: {key}: all trials share one ingest and end after training, so only these groups of settings can "
            f"have a range: {', '.join(TUNABLE_GROUPS)}"
        )
    for fixed_key, reason in REASON_BY_FIXED_SETTING.items():
        if f"{key}.".startswith(f"{fixed_key}."):
            raise InputError(f"tuning.ranges: {key}: {reason}")
    value_by_label: dict[str, Any] = {}
    contradictions: list[str] = []
    for probe in value_range.probes:
        raw_settings = _changed_settings(config, {key: probe})
        try:
            valid_config = PipelineConfig.model_validate(raw_settings)
            value_by_label[label_of(probe)] = _get_setting(valid_config.model_dump(mode="json"), key)
        except ValidationError as error:
            problems = describe_problems(error, raw_settings)
            if any(details["type"] != "value_error" for details in error.errors()):
                raise InputError(f"tuning.ranges: {'; '.join(problems)}") from None
            contradictions += problems
    # A probe may contradict another setting, because this setting may vary too. But at least one probe must be valid.
    if not value_by_label:
        raise InputError(f"tuning.ranges: {'; '.join(contradictions)}")
    try:
        return value_range.convert_to_setting_type(value_by_label)
    except ValueError as error:
        raise InputError(f"tuning.ranges: {key}: {error}") from None


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        yaml_text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; `nightjar init {shlex.quote(str(path))}` writes one") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; name a config file, such as {path / 'nightly.yaml'}") from None
    except UnicodeDecodeError as error:
        line_number = error.object[: error.start].count(b"\n") + 1
        raise InputError(
            f"{path}: line {line_number}: byte 0x{error.object[error.start]:02x} is not UTF-8; name a text file, or save the "
            "file in UTF-8"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    raw_settings = yaml_loader.load(yaml_text, subject=str(path))
    if not isinstance(raw_settings, dict):
        content = "no setting" if raw_settings is None else shown(raw_settings)
        raise InputError(f"{path}: contains {content}, expected settings such as interactions: and workspace:")
    return raw_settings


def _apply_override(raw_settings: dict[str, Any], override: str) -> None:
    user_text = f"--set {printable(override, max_characters=200)}"
    key, separator, value_yaml = override.partition("=")
    if not separator or not key:
        raise InputError(f"{user_text}: expected a.b=value, e.g. --set training.batch_size=8192")
    fix = "put a text with special characters in quotes, e.g. --set 'name=\"*\"'"
    value = yaml_loader.load(value_yaml, subject=user_text, fix=fix)
    _put_setting(raw_settings, key.strip(), value, user_text=user_text)


def _split_key(dotted_key: str, *, user_text: str) -> list[str]:
    """Split a."b.c".d into a, b.c, d. `user_text` names the key in error messages, e.g. "--set a.b=1"."""
    if re.fullmatch(rf"{_NAME_PATTERN}(\.{_NAME_PATTERN})*", dotted_key) is None:
        raise InputError(f'{user_text}: expected a.b=value; put quotes only around a name that contains a dot: a."b.c"=value')
    matches = re.findall(r'"([^"]+)"|([^".]+)', dotted_key)
    names = [quoted_name or plain_name for quoted_name, plain_name in matches]
    if len(names) > yaml_loader.MAX_DEPTH:
        raise InputError(f"{user_text}: {len(names):,} nested names, but no setting is nested that deep")
    return names


def _get_setting(raw_settings: Any, dotted_key: str) -> Any:
    value = raw_settings
    for name in _split_key(dotted_key, user_text=dotted_key):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def _put_setting(raw_settings: dict[str, Any], dotted_key: str, value: Any, *, user_text: str) -> None:
    """Set raw_settings[a][b] for the key a.b and create missing groups.

    Args:
        user_text: text that names the key in error messages, such as "--set a.b=1".
    """
    *group_names, setting_name = _split_key(dotted_key, user_text=user_text)
    group: Any = raw_settings
    for depth, name in enumerate(group_names):
        if isinstance(group, list):
            # int() would reject a text of thousands of digits.
            if not (name.isdecimal() and name.isascii() and int(name[:9]) < len(group)):
                list_key = ".".join(group_names[:depth])
                raise InputError(f"{user_text}: {list_key} is a list of {len(group)}; name an entry by its index, from 0")
            group = group[int(name[:9])]
        else:
            group[name] = {} if group.get(name) is None else group[name]
            group = group[name]
        is_list_entry = isinstance(group, list) and depth + 1 == len(group_names)
        if not isinstance(group, dict | list) or is_list_entry:
            group_key = ".".join(group_names[: depth + 1])
            raise InputError(f"{user_text}: {group_key} is the value {shown(group)}, not a group of settings")
    group[setting_name] = value
