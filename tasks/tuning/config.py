"""What the user says about tuning: which settings vary, between what, and for how long."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from recsys_core.config import WEEK_S, Settings
from recsys_core.units import INT64_MAX

Number = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | Annotated[float, Field(ge=-1e300, le=1e300)]


class RangeConfig(Settings):
    """The values of one setting: {low, high} with log or step, or {choices}."""

    low: Number | None = Field(None, description="smallest value")
    high: Number | None = Field(None, description="largest value, itself included")
    log: bool = Field(False, description="factors count, not differences: for learning rates and temperatures")
    step: Number | None = Field(None, gt=0, description="only low + a multiple of it; empty: 1 for settings of whole numbers")
    choices: tuple[Any, ...] | None = Field(None, max_length=1_000, description="the values themselves, e.g. [softmax, bce]")

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.choices is not None:
            self._check_choices(self.choices)
            return self
        if self.low is None or self.high is None:
            raise ValueError("says neither low and high nor choices; give {low: 0.01, high: 1} or {choices: [...]}")
        if self.low > self.high:
            raise ValueError(f"low is {self.low:g}, but high is {self.high:g}; swap them")
        if self.log and self.low <= 0:
            raise ValueError(f"log is true, but low is {self.low:g}, which has no logarithm; raise low above 0, or drop log")
        if self.log and self.step is not None:
            raise ValueError(f"log is true, and step is {self.step:g}; factors have no step: drop one of them")
        return self

    def _check_choices(self, choices: tuple[Any, ...]) -> None:
        others = [name for name in ("low", "high", "step") if getattr(self, name) is not None] + ["log"] * self.log
        if others:
            raise ValueError(f"gives choices and {others[0]}; a setting varies in one way or the other: drop one")
        if not choices:
            raise ValueError("choices is empty; name at least one value")
        label, times = Counter(map(label_of, choices)).most_common(1)[0]
        if times > 1:
            raise ValueError(f"choices has {label} {times} times; name each value once")

    @property
    def probes(self) -> tuple[Any, ...]:
        """Values that tell whether a setting takes this range: every choice, or the ends and the first step.

        >>> RangeConfig(low=16, high=64, step=16).probes
        (16, 32, 64)
        """
        if self.choices is not None:
            return self.choices
        assert self.low is not None and self.high is not None
        whole = isinstance(self.low, int)
        second = (self.low + (self.step or 1),) if whole or self.step else ()
        return tuple(dict.fromkeys((self.low, *(value for value in second if value <= self.high), self.high)))

    def typed(self, taken: Mapping[str, Any]) -> Self:
        """The range in the type of its setting. taken: by label, what the setting made of the probes that it took.

        >>> RangeConfig(low=0, high=1).typed({"0": 0.0, "1": 1.0}).low
        0.0
        """
        if self.choices is not None:
            kept = (taken.get(label_of(choice), choice) for choice in self.choices)
            # A group of settings is kept as it was written, without the defaults of the others in it.
            pairs = zip(self.choices, kept, strict=True)
            return self.model_copy(update={"choices": tuple(old if isinstance(old, dict) else new for old, new in pairs)})
        kind = type(next(iter(taken.values())))
        if kind not in (int, float):
            raise ValueError("takes no numbers; give {choices: [...]}")
        if kind is int and self.step is not None and self.step != int(self.step):
            raise ValueError(f"step is {self.step:g}, but the setting takes whole numbers; set step to one")
        ends = {"low": self.low, "high": self.high, "step": self.step}
        return self.model_copy(update={name: None if end is None else kind(end) for name, end in ends.items()})


def label_of(choice: Any) -> str:
    """The name of a choice: a string as it is, anything else as JSON.

    >>> label_of("softmax"), label_of([64, 32]), label_of(None)
    ('softmax', '[64, 32]', 'null')
    """
    return choice if isinstance(choice, str) else json.dumps(choice)


class TuningConfig(Settings):
    """Search for settings by `training.validation`: `nightjar tune`. A night (`nightjar run`) passes it over."""

    trials: int = Field(20, ge=1, le=100_000, description="trainings in all, those of an interrupted tuning included")
    timeout_s: float | None = Field(None, gt=0, le=52 * WEEK_S, description="no trial begins later than this; empty: no limit")
    startup_trials: int = Field(
        5, ge=1, le=100_000, description="trials that come to their end before one is pruned for being below the median"
    )
    seed: int = Field(7, ge=0, le=40_000, description="of the search; every trial trains with training.seed")
    ranges: dict[str, RangeConfig] = Field(
        min_length=1,
        max_length=100,
        description="by setting, written as for --set: {low, high, log: true}, {low, high, step}, or {choices: [...]}, "
        "e.g. model.temperature: {low: 0.03, high: 0.3, log: true}",
    )
