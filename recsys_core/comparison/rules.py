"""Rules that decide whether a new version replaces the champion. A rule is a config class, and its `kind` is a config value.

A new rule is one class with the field `kind` and the method `compare`, and a member of `RuleConfig`.

Shapes: U users, R resamples.
"""

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self

from pydantic import Field

from recsys_core.config import Frozen, Settings

if TYPE_CHECKING:
    from recsys_core.evaluation.metrics import Floats

Outcome = Literal["accepted", "rejected", "not_enough_data"]
MIN_MARGIN = 0.001
"""Smallest relative drop that a bootstrap rule can allow."""
POWER = 0.8
"""Required probability of accepting an equally good version. If it is lower, there are too few users for the margin."""


class Comparison(Frozen):
    """Comparison of one metric of a new version and of a baseline, for the same users.

    Attributes:
        outcome: whether the new version may replace the baseline, or whether there are too few users for an answer.
        reason: both means and the condition of the rule, as a clause that follows "<metric> is".
        num_users: number of users that are compared.
        new_mean, baseline_mean: means over the users.
        interval: one-sided lower and upper bounds of the relative difference, at the confidence of the rule. None if a bound
            is missing; for example, a baseline with few hits has no upper bound.
        absolute_interval: one-sided bounds of the absolute difference; None if there are no bounds.
        num_better_users, num_worse_users: numbers of users whose value is higher, and lower, with the new version.
        detectable_drop: smallest margin for which this number of users suffices, so that an equally good version is accepted
            with the probability POWER. None if unknown.
        num_needed_users: number of users that are enough for the margin of the rule; None if unknown.
    """

    outcome: Outcome
    reason: str
    num_users: int
    new_mean: float
    baseline_mean: float
    interval: tuple[float, float] | None = None
    absolute_interval: tuple[float, float] | None = None
    num_better_users: int
    num_worse_users: int
    detectable_drop: float | None = None
    num_needed_users: int | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether the new version may replace the baseline."""
        return self.outcome == "accepted"

    @property
    def relative_difference(self) -> float | None:
        """Difference of the means divided by the mean of the baseline; None if the baseline has the mean 0."""
        return self.new_mean / self.baseline_mean - 1 if self.baseline_mean else None


class Rule(Protocol):
    """A rule decides from one metric of the same users whether a new version may replace a baseline.

    If a rule accepts a version, it also accepts a version with larger values of the metric.

    Attributes:
        min_users: number of users below which the outcome is not_enough_data.
    """

    @property
    def min_users(self) -> int: ...

    def compare(
        self, new_value_U: "Floats", baseline_value_U: "Floats", *, baseline: str, num_comparisons: int = 1
    ) -> Comparison:
        """Compare the metric [U] of a new version and of a baseline for the same users. The reason names `baseline`.

        Args:
            num_comparisons: number of comparisons that must all be accepted. A statistical rule needs more users for several
                comparisons, because one of them is rejected by chance more often.
        """

    def with_margin(self, max_relative_drop: float) -> "Rule":
        """Return the rule with another margin."""

    def for_guardrail(self, max_relative_drop: float, *, min_users: int | None = None) -> "Rule":
        """Return the rule for a metric that need not improve, with its own margin.

        Args:
            min_users: number of users below which the outcome is not_enough_data. None means the number of the rule.
        """

    def for_baseline(self) -> "Rule":
        """Return the rule for a baseline that a version has to beat."""


class Margin(Settings):
    """The new mean must be at least (1 - max_relative_drop) times the mean of the baseline, without a test of significance."""

    kind: Literal["margin"] = Field("margin", description="compare the means, without a test of significance")
    max_relative_drop: float = Field(0.02, ge=0, lt=1, description="largest relative drop of the metric")
    min_users: int = Field(
        1, ge=1, le=10_000_000, description="number of test users below which no version is promoted automatically"
    )

    def compare(
        self, new_value_U: "Floats", baseline_value_U: "Floats", *, baseline: str, num_comparisons: int = 1
    ) -> Comparison:
        """Compare the means.

        >>> import numpy as np
        >>> comparison = Margin().compare(np.array([0.1, 0.3]), np.array([0.2, 0.3]), baseline="version 3")
        >>> comparison.outcome, comparison.reason
        ('rejected', '0.2000, less than 0.98 times the 0.2500 of version 3')
        """
        if (
            comparison := _too_few_users(new_value_U, baseline_value_U, baseline=baseline, min_users=self.min_users)
        ) is not None:
            return comparison
        min_ratio, new_mean, baseline_mean = (
            1 - self.max_relative_drop,
            float(new_value_U.mean()),
            float(baseline_value_U.mean()),
        )
        is_accepted = new_mean >= baseline_mean * min_ratio
        relation_text = "at least" if is_accepted else "less than"
        return Comparison(
            outcome="accepted" if is_accepted else "rejected",
            reason=f"{new_mean:.4f}, {relation_text} {min_ratio:g} times the {baseline_mean:.4f} of {baseline}",
            **_counts_and_means(new_value_U, baseline_value_U),
        )

    def with_margin(self, max_relative_drop: float) -> Self:
        """Return the rule with another margin."""
        return self.model_copy(update={"max_relative_drop": max_relative_drop})

    def for_guardrail(self, max_relative_drop: float, *, min_users: int | None = None) -> Self:
        """Return the rule with the margin of a guardrail."""
        return self.with_margin(max_relative_drop).model_copy(update={"min_users": min_users or self.min_users})

    def for_baseline(self) -> Self:
        """Return the rule without a margin."""
        return self.with_margin(0)


class PairedBootstrap(Settings):
    """The relative drop must be smaller than max_relative_drop with the given confidence (a test of non-inferiority).

    A paired bootstrap resamples the users, who are the same for both versions. A version that is not accepted is
    rejected if it is significantly worse, or if there are enough users for the margin. Otherwise the outcome is
    not_enough_data.
    """

    kind: Literal["paired_bootstrap"] = Field("paired_bootstrap", description="compare with a paired bootstrap over the users")
    max_relative_drop: float = Field(
        0.05, ge=MIN_MARGIN, lt=1, description="largest relative drop of the metric with which a new version is promoted"
    )
    confidence: float = Field(
        0.95, ge=0.5, le=0.9999, description="confidence with which the drop must be smaller than `max_relative_drop`"
    )
    min_users: int = Field(
        200, ge=2, le=10_000_000, description="number of test users below which no version is promoted automatically"
    )
    must_be_better: bool = Field(
        False,
        description="promote a version only if it is better with this confidence. If `false`, a version may be worse by up to "
        "the margin",
    )
    num_resamples: int = Field(10_000, ge=100, le=1_000_000, description="number of resamples of the users")

    def compare(
        self, new_value_U: "Floats", baseline_value_U: "Floats", *, baseline: str, num_comparisons: int = 1
    ) -> Comparison:
        """Compare the means by their joint bootstrap distribution.

        >>> import numpy as np
        >>> rule, new_value_U = PairedBootstrap(num_resamples=1000), np.tile([0.0, 1.0], 500)
        >>> rule.compare(new_value_U, new_value_U, baseline="version 3").reason
        '0.5000, +0.0 % (+0.0 to +0.0 %) from the 0.5000 of version 3 (margin -5 %; users +0 / -0)'
        >>> rule.compare(new_value_U[:8], new_value_U[:8], baseline="version 3").reason
        '0.5000, not compared with version 3: 8 test users, but the gate needs at least 200'
        """
        from recsys_core.comparison.bootstrap import PairedMeans

        counts_and_means = _counts_and_means(new_value_U, baseline_value_U)
        if (
            comparison := _too_few_users(new_value_U, baseline_value_U, baseline=baseline, min_users=self.min_users)
        ) is not None:
            return comparison
        num_users, new_mean, baseline_mean = len(new_value_U), float(new_value_U.mean()), float(baseline_value_U.mean())
        if new_mean == baseline_mean == 0:
            reason = f"0.0000, not compared with {baseline}: neither has a hit for any of {num_users:,} test users"
            return Comparison(outcome="not_enough_data", reason=reason, **counts_and_means)

        paired_means = PairedMeans.resample(new_value_U, baseline_value_U, num_resamples=self.num_resamples)
        margin = 0.0 if self.must_be_better else self.max_relative_drop
        excess_lower_bound = paired_means.difference_quantile(1 - self.confidence, margin=margin)
        detectable_drop = self._detectable_drop(new_value_U, baseline_value_U, margin=margin, num_comparisons=num_comparisons)
        if excess_lower_bound > 0 or (excess_lower_bound == 0 and not self.must_be_better):
            outcome: Outcome = "accepted"
        else:
            is_worse = paired_means.difference_quantile(1 - (1 - self.confidence) / num_comparisons) < 0
            outcome = "rejected" if is_worse or detectable_drop <= self.max_relative_drop else "not_enough_data"
        interval, difference_text = None, f"{new_mean:+z.4f}"
        if baseline_mean:
            low, high = paired_means.relative_bounds(self.confidence)
            interval = None if high is None else (low, high)
            bounds_text = f"{100 * low:+z.1f} % or more" if high is None else f"{100 * low:+z.1f} to {100 * high:+z.1f} %"
            difference_text = f"{100 * (new_mean / baseline_mean - 1):+z.1f} % ({bounds_text})"
        condition_text = "must be better" if self.must_be_better else f"margin {-100 * margin:.3g} %"
        reason = (
            f"{new_mean:.4f}, {difference_text} from the {baseline_mean:.4f} of {baseline} ({condition_text}; users "
            f"+{counts_and_means['num_better_users']:,} / -{counts_and_means['num_worse_users']:,})"
        )
        num_needed_users = None
        if outcome == "not_enough_data":
            reason += f"; {num_users:,} test users are too few for this margin"
            if math.isfinite(detectable_drop):
                num_needed_users = math.ceil(num_users * (detectable_drop / self.max_relative_drop) ** 2)
                reason += f", which needs about {num_needed_users:,}"
        return Comparison(
            outcome=outcome,
            reason=reason,
            interval=interval,
            absolute_interval=(
                paired_means.difference_quantile(1 - self.confidence),
                paired_means.difference_quantile(self.confidence),
            ),
            detectable_drop=detectable_drop,
            num_needed_users=num_needed_users,
            **counts_and_means,
        )

    def _detectable_drop(
        self, new_value_U: "Floats", baseline_value_U: "Floats", *, margin: float, num_comparisons: int
    ) -> float:
        """Return `Comparison.detectable_drop` for these users. It is infinite if the baseline has no hit."""
        baseline_mean = float(baseline_value_U.mean())
        if not baseline_mean:
            return math.inf
        z_score = NormalDist().inv_cdf(self.confidence) + NormalDist().inv_cdf(1 - (1 - POWER) / num_comparisons)
        standard_error = float((new_value_U - (1 - margin) * baseline_value_U).std(ddof=1)) / math.sqrt(len(new_value_U))
        return z_score * standard_error / baseline_mean

    def with_margin(self, max_relative_drop: float) -> Self:
        """Return the rule with another margin, of at least MIN_MARGIN."""
        return self.model_copy(update={"max_relative_drop": max(MIN_MARGIN, max_relative_drop)})

    def for_guardrail(self, max_relative_drop: float, *, min_users: int | None = None) -> Self:
        """Return the rule for a metric that need not improve."""
        updated_fields = {"must_be_better": False, "min_users": min_users or self.min_users}
        return self.with_margin(max_relative_drop).model_copy(update=updated_fields)

    def for_baseline(self) -> Self:
        """Return the rule that accepts only a better version."""
        return self.model_copy(update={"must_be_better": True})


def _too_few_users(new_value_U: "Floats", baseline_value_U: "Floats", *, baseline: str, min_users: int) -> Comparison | None:
    """Return a comparison with the outcome not_enough_data if there are fewer than `min_users` users; otherwise None."""
    num_users = len(new_value_U)
    if num_users >= max(1, min_users):
        return None
    counts_and_means = _counts_and_means(new_value_U, baseline_value_U)
    no_comparison_text = (
        f"{counts_and_means['new_mean']:.4f}, not compared with {baseline}" if num_users else f"not compared with {baseline}"
    )
    reason = f"{no_comparison_text}: {num_users:,} test users, but the gate needs at least {min_users:,}"
    return Comparison(outcome="not_enough_data", reason=reason, num_needed_users=max(1, min_users), **counts_and_means)


def _counts_and_means(new_value_U: "Floats", baseline_value_U: "Floats") -> dict[str, Any]:
    """Return the fields of a Comparison that do not depend on the rule. The mean over no user is 0."""
    return {
        "num_users": len(new_value_U),
        "new_mean": float(new_value_U.mean()) if len(new_value_U) else 0.0,
        "baseline_mean": float(baseline_value_U.mean()) if len(baseline_value_U) else 0.0,
        "num_better_users": int((new_value_U > baseline_value_U).sum()),
        "num_worse_users": int((new_value_U < baseline_value_U).sum()),
    }


RuleConfig = Annotated[Margin | PairedBootstrap, Field(discriminator="kind")]
"""Config of a rule. The field `kind` selects the class."""
