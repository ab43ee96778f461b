"""Settings of the evaluation, and the rules that decide whether a new version replaces the champion.

A new rule is one class with the field `kind` and the method `compare`, and a member of `RuleConfig`.
"""

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Protocol

from pydantic import Field

from recsys_core.config import MAX_COUNT, Settings

if TYPE_CHECKING:
    from recsys_core.evaluation.metrics import Floats

CutOff = Annotated[int, Field(ge=1, le=1_000_000)]


class EvaluationConfig(Settings):
    """Metrics over the full catalogue."""

    ks: tuple[CutOff, ...] = Field(
        (10, 20, 50, 100),
        min_length=1,
        max_length=100,
        description="cut-offs K of the metrics Recall@K, NDCG@K, Precision@K, HitRate@K and Coverage@K",
    )
    exclude_seen: bool = Field(
        True,
        description="exclude items that the user already had before the evaluated events, from the ranking and from the "
        "targets",
    )
    max_users: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="number of users that are evaluated. They are sampled with a fixed seed. If empty, all users are evaluated",
    )


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
