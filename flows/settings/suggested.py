"""Suggested settings in a config: those that it can have, and those that contradict its other settings."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flows.settings.config_file import setting_value, with_settings
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError
from tasks.tuning.suggestions import Suggestion


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
        current = config
        for item in suggested:
            try:
                config_with_item = with_settings(current, {item.setting: item.value})
            except InputError as error:
                problem_by_setting[item.setting] = str(error)
                continue
            if setting_value(config_with_item, item.setting) != setting_value(current, item.setting):
                current = config_with_item
                changed[item.setting] = item.value
        return cls(current.model_copy(update={"tuning": config.tuning}), changed, problem_by_setting)
