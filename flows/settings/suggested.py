"""Configs with suggested settings, and the default ranges in which `nightjar tune` searches around the suggestions."""

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
        changes: suggested value by setting, for the settings that have another value in the original config.
        problem_by_setting: why a suggestion is left out, for the suggestions that contradict the original config.
    """

    config: PipelineConfig
    changes: dict[str, Any]
    problem_by_setting: dict[str, str]

    @classmethod
    def of(cls, config: PipelineConfig, suggestions: Iterable[Suggestion]) -> "SuggestedConfig":
        """Return `config` with the suggestions, which are applied one after the other."""
        changes: dict[str, Any] = {}
        problem_by_setting: dict[str, str] = {}
        current_config = config
        for suggestion in suggestions:
            try:
                config_with_suggestion = with_settings(current_config, {suggestion.setting: suggestion.value})
            except InputError as error:
                problem_by_setting[suggestion.setting] = str(error)
                continue
            if setting_value(config_with_suggestion, suggestion.setting) != setting_value(current_config, suggestion.setting):
                current_config = config_with_suggestion
                changes[suggestion.setting] = suggestion.value
        return cls(current_config.model_copy(update={"tuning": config.tuning}), changes, problem_by_setting)


def default_ranges(config: PipelineConfig, suggestions: Iterable[Suggestion]) -> dict[str, RangeConfig]:
    """Return the ranges of the search by setting. Each range contains the value of the config and the suggested value.

    Values that contradict another setting of the config are left out. A setting with fewer than two valid values has no range.
    """
    suggestion_by_setting = {suggestion.setting: suggestion for suggestion in suggestions if suggestion.search is not None}
    for setting, searched_range in SEARCHED_RANGES.items():
        current_value = setting_value(config, setting)
        unchanged_suggestion = Suggestion(setting=setting, value=current_value, reason="", search=searched_range)
        suggestion_by_setting.setdefault(setting, unchanged_suggestion)
    ranges: dict[str, RangeConfig] = {}
    for suggestion in suggestion_by_setting.values():
        assert suggestion.search is not None
        if _has_no_effect(config, suggestion.setting):
            continue
        values = (setting_value(config, suggestion.setting), suggestion.value)
        value_range = (
            _choices(config, suggestion, values) if suggestion.search.choices else _interval(config, suggestion, values)
        )
        if value_range is not None:
            ranges[suggestion.setting] = value_range
    return ranges


def first_trials(
    config: PipelineConfig, suggestions: Iterable[Suggestion], ranges: dict[str, RangeConfig]
) -> list[dict[str, Any]]:
    """Return the settings of the first trials: the values of the config, then the suggested values.

    If one of the two values is not in the range, such as the temperature `auto`, both trials have the other value.
    """
    current_values = {setting: setting_value(config, setting) for setting in ranges}
    suggested_values = current_values | {
        suggestion.setting: suggestion.value for suggestion in suggestions if suggestion.setting in ranges
    }
    for setting, value_range in ranges.items():
        if value_range.choices and suggested_values[setting] not in value_range.choices:
            suggested_values[setting] = current_values[setting]
        if not value_range.choices and not isinstance(current_values[setting], int | float):
            current_values[setting] = suggested_values[setting]
    return [current_values] if suggested_values == current_values else [current_values, suggested_values]


def _interval(config: PipelineConfig, suggestion: Suggestion, values: tuple[Any, Any]) -> RangeConfig | None:
    assert suggestion.search is not None and suggestion.search.low is not None and suggestion.search.high is not None
    numbers = [value for value in values if isinstance(value, int | float)]  # a temperature may be auto
    low, high = min(suggestion.search.low, *numbers), max(suggestion.search.high, *numbers)
    if not all(_is_valid(config, suggestion.setting, value) for value in (low, high)):
        return None
    return suggestion.search.model_copy(update={"low": low, "high": high})


def _choices(config: PipelineConfig, suggestion: Suggestion, values: tuple[Any, Any]) -> RangeConfig | None:
    assert suggestion.search is not None and suggestion.search.choices is not None
    choices: list[Any] = []
    for value in (*values, *suggestion.search.choices):
        if value not in choices and _is_valid(config, suggestion.setting, value):
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
