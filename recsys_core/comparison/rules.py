"""Rules that decide whether a new version replaces the champion, as config classes by `kind`.

A new rule is one class with the field `kind` and the method `compare`, and a member of `RuleConfig`.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from pydantic import Field

from recsys_core.config import Settings

if TYPE_CHECKING:
    from recsys_core.evaluation.metrics import Floats


class Comparison(NamedTuple):
    """Result of a rule.

    Attributes:
        is_accepted: whether the new version may replace the baseline.
        reason: both values and the rule in one clause.
    """

    is_accepted: bool
    reason: str


class Rule(Protocol):
    """Decides from one metric of the same users. Equal values are accepted, and a larger new value never changes that."""

    def compare(self, new_U: "Floats", baseline_U: "Floats", *, baseline: str) -> Comparison:
        """Compare the users' values [U] with those of `baseline`, which is named in the reason."""


class Margin(Settings):
    """The new mean must be at least (1 - max_relative_drop) times the mean of the baseline."""

    kind: Literal["margin"] = "margin"
    max_relative_drop: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="largest relative drop of the metric. A new version becomes champion if its metric is at least (1 - "
        "max_relative_drop) times the champion's metric",
    )

    def compare(self, new_U: "Floats", baseline_U: "Floats", *, baseline: str) -> Comparison:
        """Compare the means.

        >>> import numpy as np
        >>> Margin().compare(np.array([0.1, 0.3]), np.array([0.2, 0.3]), baseline="version 3")
        Comparison(is_accepted=False, reason='0.2000, less than 0.98 times the 0.2500 of version 3')
        """
        min_ratio, new_mean, baseline_mean = 1 - self.max_relative_drop, float(new_U.mean()), float(baseline_U.mean())
        is_accepted = new_mean >= baseline_mean * min_ratio
        relation = "at least" if is_accepted else "less than"
        return Comparison(is_accepted, f"{new_mean:.4f}, {relation} {min_ratio:g} times the {baseline_mean:.4f} of {baseline}")


RuleConfig = Margin
"""The config of a rule: a union of the classes above, distinguished by `kind`."""
