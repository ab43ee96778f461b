"""Suggested settings in a config, and the search space of `nightjar tune` around them for a config without `tuning.ranges`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flows.settings.config_file import setting_value, with_settings
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError
from tasks.tuning.config import RangeConfig
from tasks.tuning.suggestions import SEARCHED_RANGES, Suggestion


@dataclass(frozen=True)
class SuggestedConfig:
    """A config with suggested settings.

    Attributes:
        changed: suggested value by setting, for the settings of which the original config has another value.
        problem_by_setting: why a suggested value is left out, for those that contradict the original config.
    """

    config: PipelineConfig
    changed: dict[str, Any]
    problem_by_setting: dict[str, str]

    @classmethod
    def of(cls, config: PipelineConfig, suggested: Iterable[Suggestion]) -> "SuggestedConfig":
        """Apply the suggestions one after the other."""
        changed: dict[str, Any] = {}
        problem_by_setting: dict[str, str] = {}
        current_config = config
        for item in suggested:
            try:
                config_with_item = with_settings(current_config, {item.setting: item.value})
            except InputError as error:
                problem_by_setting[item.setting] = str(error)
                continue
            if setting_value(config_with_item, item.setting) != setting_value(current_config, item.setting):
                current_config = config_with_item
                changed[item.setting] = item.value
        return cls(current_config.model_copy(update={"tuning": config.tuning}), changed, problem_by_setting)


def default_ranges(config: PipelineConfig, suggested: Iterable[Suggestion]) -> dict[str, RangeConfig]:
    """Return the ranges of the search by setting. Each range contains the value of the config and the suggested value.

    A value that contradicts another setting of the config is left out, and so is a setting without a second value.
    """
    with_search = {item.setting: item for item in suggested if item.search is not None}
    for setting, search in SEARCHED_RANGES.items():
        unchanged = Suggestion(setting=setting, value=setting_value(config, setting), reason="", search=search)
        with_search.setdefault(setting, unchanged)
    ranges: dict[str, RangeConfig] = {}
    for item in with_search.values():
        assert item.search is not None
        if _has_no_effect(config, item.setting):
            continue
        values = (setting_value(config, item.setting), item.value)
        value_range = _choices(config, item, values) if item.search.choices else _interval(config, item, values)
        if value_range is not None:
            ranges[item.setting] = value_range
    return ranges


def first_trials(
    config: PipelineConfig, suggested: Iterable[Suggestion], ranges: dict[str, RangeConfig]
) -> list[dict[str, Any]]:
    """Return the settings of the first trials: the values of the config, then the suggested values.

    A value outside its range, such as the temperature `auto`, is replaced by the other value.
    """
    current_values = {setting: setting_value(config, setting) for setting in ranges}
    proposed = current_values | {item.setting: item.value for item in suggested if item.setting in ranges}
    for setting, value_range in ranges.items():
        if value_range.choices and proposed[setting] not in value_range.choices:
            proposed[setting] = current_values[setting]
        if not value_range.choices and not isinstance(current_values[setting], int | float):
            current_values[setting] = proposed[setting]
    return [current_values] if proposed == current_values else [current_values, proposed]


def _interval(config: PipelineConfig, item: Suggestion, values: tuple[Any, Any]) -> RangeConfig | None:
    assert item.search is not None and item.search.low is not None and item.search.high is not None
    numbers = [value for value in values if isinstance(value, int | float)]  # a temperature may be auto
    low, high = min(item.search.low, *numbers), max(item.search.high, *numbers)
    if not all(_is_valid(config, item.setting, value) for value in (low, high)):
        return None
    return item.search.model_copy(update={"low": low, "high": high})


def _choices(config: PipelineConfig, item: Suggestion, values: tuple[Any, Any]) -> RangeConfig | None:
    assert item.search is not None and item.search.choices is not None
    choices: list[Any] = []
    for value in (*values, *item.search.choices):
        if value not in choices and _is_valid(config, item.setting, value):
            choices.append(value)
    return RangeConfig(choices=tuple(choices)) if len(choices) > 1 else None


def _has_no_effect(config: PipelineConfig, setting: str) -> bool:
    if setting == "loss.num_negatives":
        return config.loss.negatives == "all"
    return setting.startswith("model.history.") and config.model.history.length == 0


def _is_valid(config: PipelineConfig, setting: str, value: Any) -> bool:
    try:
        with_settings(config, {setting: value})
    except InputError:
        return False
    return True
