"""Config of hyperparameter tuning: the settings that vary, their ranges, and the size of the search."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from recsys_core.config import OPERATIONAL, WEEK_S, Settings

Number = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | Annotated[float, Field(ge=-1e300, le=1e300)]


class RangeConfig(Settings):
    """The values that a setting may take: {low, high} with log or step, or {choices}."""

    low: Number | None = Field(None, description="smallest value of the range")
    high: Number | None = Field(None, description="upper end of the range. It is included, unless the steps from `low` miss it")
    log: bool = Field(False, description="whether values are sampled on a logarithmic scale, as is usual for learning rates")
    step: Number | None = Field(
        None,
        gt=0,
        description="distance between neighbouring values of the range. Default: 1 for whole numbers; other numbers may have "
        "any value of the range",
    )
    choices: tuple[Any, ...] | None = Field(
        None, max_length=1_000, description="list of possible values, for example `[softmax, bce]`"
    )

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.choices is not None:
            self._check_choices(self.choices)
            return self
        if self.low is None or self.high is None:
            raise ValueError("neither low and high nor choices are set; set {low: 0.01, high: 1} or {choices: [...]}")
        if self.low > self.high:
            raise ValueError(f"low is {self.low:g}, but high is {self.high:g}; swap them")
        if self.log and self.low <= 0:
            raise ValueError(f"log is true, but low is {self.low:g}, which has no logarithm; raise low above 0, or drop log")
        if self.log and self.step is not None:
            raise ValueError(f"log is true and step is {self.step:g}, but a logarithmic range has no step; drop one of them")
        return self

    def _check_choices(self, choices: tuple[Any, ...]) -> None:
        for key in ("low", "high", "step", "log"):
            if getattr(self, key) not in (None, False):
                raise ValueError(f"choices and {key} are both set; drop one of them")
        if not choices:
            raise ValueError("choices is empty; name at least one value")
        try:
            label, count = Counter(map(label_of, choices)).most_common(1)[0]
        except TypeError:
            raise ValueError("choices has a YAML set or binary value; write texts, numbers, lists or groups") from None
        if count > 1:
            raise ValueError(f"choices has {label} {count} times; name each value once")

    @property
    def probes(self) -> tuple[Any, ...]:
        """The values that are checked before the search: every choice, or the ends of the range and the second value.

        >>> RangeConfig(low=16, high=64, step=16).probes
        (16, 32, 64)
        """
        if self.choices is not None:
            return self.choices
        assert self.low is not None and self.high is not None
        is_integer = isinstance(self.low, int)
        second_values = (self.low + (self.step or 1),) if is_integer or self.step else ()
        return tuple(dict.fromkeys((self.low, *(value for value in second_values if value <= self.high), self.high)))

    def convert_to_setting_type(self, value_by_label: Mapping[str, Any]) -> Self:
        """Return the range with its values converted to the type of the setting.

        Args:
            value_by_label: value of the setting after validation of the config, by label of the probe.

        Raises:
            ValueError: the setting does not take numbers.

        >>> RangeConfig(low=0, high=1).convert_to_setting_type({"0": 0.0, "1": 1.0}).low
        0.0
        """
        if self.choices is not None:
            # Keep a group of settings as the user wrote it: the validated group also has the defaults.
            choices = [
                choice if isinstance(choice, dict) else value_by_label.get(label_of(choice), choice) for choice in self.choices
            ]
            return self.model_copy(update={"choices": tuple(choices)})
        number_type = type(next(iter(value_by_label.values())))
        if number_type not in (int, float):
            raise ValueError("the setting is not a number; set {choices: [...]}")
        if number_type is int and self.step is not None and self.step != int(self.step):
            raise ValueError(f"step is {self.step:g}, but the setting takes whole numbers; set step to a whole number")
        number_by_key = {"low": self.low, "high": self.high, "step": self.step}
        return self.model_copy(
            update={key: None if number is None else number_type(number) for key, number in number_by_key.items()}
        )


def label_of(value: Any) -> str:
    """Return a string unchanged and any other value as JSON.

    >>> label_of("softmax"), label_of([64, 32]), label_of(None)
    ('softmax', '[64, 32]', 'null')
    """
    return value if isinstance(value, str) else json.dumps(value)


def format_setting_value(value: object) -> str:
    """Return the value of a setting as text: a float with 4 digits, any other value like `label_of`.

    >>> format_setting_value(0.0123456), format_setting_value("softmax"), format_setting_value([64, 32])
    ('0.01235', 'softmax', '[64, 32]')
    """
    return f"{value:.4g}" if isinstance(value, float) else label_of(value)


class TuningConfig(Settings):
    """The search of `nightjar tune` for the settings with the best `training.validation` metric. `nightjar run` ignores it."""

    trials: Annotated[int, OPERATIONAL] = Field(
        20, ge=1, le=100_000, description="total number of trials of a study. Trials before an interruption are included"
    )
    timeout_s: Annotated[float | None, OPERATIONAL] = Field(
        None, gt=0, le=52 * WEEK_S, description="time in seconds after which no new trial starts. Default: no limit"
    )
    startup_trials: int = Field(
        3, ge=1, le=100_000, description="number of trials that must be completed before a trial can be pruned"
    )
    seed: int = Field(7, ge=0, le=40_000, description="seed of the search. All trials train with `training.seed`")
    ranges: dict[str, RangeConfig] = Field(
        default_factory=dict,
        max_length=100,
        description="ranges by setting, named as for `--set`: `{low, high, log: true}`, `{low, high, step}`, or `{choices: "
        "[...]}`, e.g. `model.temperature: {low: 0.03, high: 0.3, log: true}`. Default: ranges of the settings that usually "
        "matter most for the config",
    )
