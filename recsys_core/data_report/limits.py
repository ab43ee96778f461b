"""Checks of the data report: metrics against the configured limits, and warnings about suspicious metrics."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from recsys_core.config import Frozen
from recsys_core.data_report.config import DataReportConfig

MODERATE_PSI, MAJOR_PSI = 0.1, 0.25

Unit = Literal["share", "count", "index"]


class _MetricLimit(NamedTuple):
    """A setting of DataReportConfig that limits a metric, and the name, description and unit of the metric."""

    setting: str
    metric_name: str
    description: str
    unit: Unit = "share"


LIMITS = (
    _MetricLimit("min_train_events", "train_events", "training events", "count"),
    _MetricLimit("min_validation_users", "validation_users", "users with a validation event", "count"),
    _MetricLimit("min_test_users", "test_users", "users with a test event", "count"),
    _MetricLimit("max_event_drop_share", "event_drop_share", "drop of training events since the previous run"),
    _MetricLimit("max_new_user_share", "new_user_share", "users without an event in the previous run"),
    _MetricLimit("max_new_item_share", "new_item_share", "items without an event in the previous run"),
    _MetricLimit("max_vanished_user_share", "vanished_user_share", "users of the previous run without an event in this run"),
    _MetricLimit("max_vanished_item_share", "vanished_item_share", "items of the previous run without an event in this run"),
    _MetricLimit("max_popularity_psi", "popularity_psi", "popularity shift (PSI) since the previous run", "index"),
    _MetricLimit("min_item_vector_share", "item_vector_share", "items with a pretrained vector"),
    _MetricLimit("max_null_share", "null_share", "nulls in the column with the most nulls"),
    _MetricLimit("max_duplicate_share", "duplicate_share", "events that repeat another event (user, item, time)"),
    _MetricLimit(
        "max_leaked_event_share", "leaked_event_share", "validation and test events with a copy in an earlier part of the split"
    ),
    _MetricLimit(
        "max_train_after_test_share", "future_event_share", "training events later than the first test event of their user"
    ),
    _MetricLimit("max_split_violations", "split_violations", "events in the wrong part of the split, or out of order", "count"),
    _MetricLimit("max_unseen_item_share", "unseen_item_share", "test events whose item has no training event"),
    _MetricLimit("max_unseen_user_share", "unseen_user_share", "test users without a training event"),
    _MetricLimit("max_repeated_pair_share", "repeated_pair_share", "test events whose user had the item in training"),
)

WARNINGS = (
    ("future_event_share", 0.0, "of the training events are later than the first test event of their user: the model may learn "
     "from the future"),
    ("leaked_event_share", 0.0, "of the validation and test events have a copy (user, item, time) in an earlier part of the "
     "split"),
    ("duplicate_share", 0.01, "of the events repeat another event (user, item, time)"),
    ("unseen_item_share", 0.5, "of the test events have an item without a training event"),
    ("unseen_user_share", 0.5, "of the test users have no training event"),
    ("empty_day_share", 0.0, "of the days between the first and the last event have no event: is a partition missing?"),
)  # fmt: skip
"""(metric, largest value without a warning, end of the warning). The warning begins with the value of the metric."""


class Check(Frozen):
    """One limit and the value of the metric. limit: None without a limit. value: None if the metric was not measured."""

    setting: str
    description: str
    value: float | None
    limit: float | None
    is_passed: bool
    value_text: str
    limit_text: str


def check_limits(metrics: Mapping[str, float], config: DataReportConfig) -> tuple[Check, ...]:
    """Check every limit. A metric that was not measured (no previous run, no timestamps) violates no limit.

    >>> checks = check_limits({"event_drop_share": 0.75}, DataReportConfig(max_event_drop_share=0.5))
    >>> [(check.setting, check.is_passed, check.value_text, check.limit_text) for check in checks if check.value is not None]
    [('max_event_drop_share', False, '75 %', 'at most 50 %')]
    """
    return tuple(
        _check_limit(limit, metrics.get(limit.metric_name, math.nan), getattr(config, limit.setting)) for limit in LIMITS
    )


def _check_limit(metric_limit: _MetricLimit, metric_value: float, limit_value: float | None) -> Check:
    is_minimum = metric_limit.setting.startswith("min_")
    # Comparisons with NaN are false, so a metric that was not measured violates no limit.
    is_violated = limit_value is not None and (metric_value < limit_value if is_minimum else metric_value > limit_value)
    return Check(
        setting=metric_limit.setting,
        description=metric_limit.description,
        value=None if math.isnan(metric_value) else metric_value,
        limit=limit_value,
        is_passed=not is_violated,
        value_text="not measured" if math.isnan(metric_value) else format_metric(metric_value, metric_limit.unit),
        limit_text="no limit"
        if limit_value is None
        else f"{'at least' if is_minimum else 'at most'} {format_metric(limit_value, metric_limit.unit)}",
    )


def describe_breaches(checks: tuple[Check, ...]) -> tuple[str, ...]:
    """Return one sentence per violated limit."""
    return tuple(
        f"{check.description}: {check.value_text}, but data_report.{check.setting} requires {check.limit_text}"
        for check in checks
        if not check.is_passed
    )


def describe_held_out_users(metrics: Mapping[str, float]) -> str:
    """Return the numbers of validation and test users, which limit the precision of the metrics of a run.

    >>> describe_held_out_users({"validation_users": 1_200.0, "test_users": 950.0})
    '1,200 validation users, 950 test users'
    """
    return ", ".join(
        f"{metrics[f'{part}_users']:,.0f} {part} users" for part in ("validation", "test") if f"{part}_users" in metrics
    )


def find_warnings(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return one sentence for each suspicious metric. The configured limits do not matter."""
    warnings = []
    psi = metrics.get("popularity_psi", math.nan)
    if psi >= MODERATE_PSI:
        severity = "major" if psi >= MAJOR_PSI else "moderate"
        warnings.append(
            f"item popularity changed since the previous run: PSI {psi:.3f}, by the rule of thumb a {severity} shift"
        )
    for metric_name, threshold, sentence_end in WARNINGS:
        if metrics.get(metric_name, math.nan) > threshold:
            warnings.append(f"{format_metric(metrics[metric_name], 'share')} {sentence_end}")
    return tuple(warnings)


def format_metric(value: float | None, unit: Unit) -> str:
    """Format a metric. A share becomes a percentage with up to four significant digits, and None becomes "-".

    >>> [format_metric(value, "share") for value in (0, 0.5, 0.0123, 0.00004)]
    ['0 %', '50 %', '1.23 %', '0.004 %']
    >>> format_metric(12345, "count"), format_metric(0.2, "index"), format_metric(None, "count")
    ('12,345', '0.200', '-')
    """
    if value is None:
        return "-"
    if unit == "count":
        return f"{value:,.0f}"
    return f"{value:.3f}" if unit == "index" else f"{100 * value:.4g} %"
