"""Checks of the data report: metrics against the configured limits, and warnings about suspicious metrics."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from recsys_core.config import Frozen
from recsys_core.data_report.config import DataReportConfig

MODERATE_PSI, MAJOR_PSI = 0.1, 0.25

Unit = Literal["share", "count", "index"]


class _Limit(NamedTuple):
    """A setting of DataReportConfig, the metric that it bounds, and the description and unit of that metric."""

    setting: str
    metric: str
    description: str
    unit: Unit = "share"


LIMITS = (
    _Limit("min_train_events", "train_events", "training events", "count"),
    _Limit("max_event_drop_share", "event_drop_share", "drop of training events since the previous run"),
    _Limit("max_new_user_share", "new_user_share", "users without an event in the previous run"),
    _Limit("max_new_item_share", "new_item_share", "items without an event in the previous run"),
    _Limit("max_vanished_user_share", "vanished_user_share", "users of the previous run without an event in this run"),
    _Limit("max_vanished_item_share", "vanished_item_share", "items of the previous run without an event in this run"),
    _Limit("max_popularity_psi", "popularity_psi", "popularity shift (PSI) since the previous run", "index"),
    _Limit("min_item_vector_share", "item_vector_share", "items with a pretrained vector"),
    _Limit("max_null_share", "null_share", "nulls in the column with the most nulls"),
    _Limit("max_duplicate_share", "duplicate_share", "events that repeat another event (user, item, time)"),
    _Limit(
        "max_leaked_event_share", "leaked_event_share", "validation and test events with a copy in an earlier part of the split"
    ),
    _Limit("max_train_after_test_share", "future_event_share", "training events later than the first test event of their user"),
    _Limit("max_split_violations", "split_violations", "events in the wrong part of the split, or out of order", "count"),
    _Limit("max_unseen_item_share", "unseen_item_share", "test events whose item has no training event"),
    _Limit("max_unseen_user_share", "unseen_user_share", "test users without a training event"),
    _Limit("max_repeated_pair_share", "repeated_pair_share", "test events whose user had the item in training"),
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
"""(metric, largest value without a warning, end of the sentence that starts with the share)."""


class Check(Frozen):
    """One limit and the measured value. limit: None if the config has no limit. value: None if it could not be measured."""

    setting: str
    description: str
    value: float | None
    limit: float | None
    passed: bool
    value_text: str
    limit_text: str


def check_limits(metrics: Mapping[str, float], config: DataReportConfig) -> tuple[Check, ...]:
    """Check every limit. A metric that was not measured (no previous run, no timestamps) passes.

    >>> checks = check_limits({"event_drop_share": 0.75}, DataReportConfig(max_event_drop_share=0.5))
    >>> [(check.setting, check.passed, check.value_text, check.limit_text) for check in checks if check.value is not None]
    [('max_event_drop_share', False, '75 %', 'at most 50 %')]
    """
    return tuple(_check(limit, metrics.get(limit.metric, math.nan), getattr(config, limit.setting)) for limit in LIMITS)


def _check(limit: _Limit, value: float, configured_limit: float | None) -> Check:
    is_minimum = limit.setting.startswith("min_")
    # Comparisons with NaN are false, so a metric that was not measured passes.
    is_broken = configured_limit is not None and (value < configured_limit if is_minimum else value > configured_limit)
    return Check(
        setting=limit.setting,
        description=limit.description,
        value=None if math.isnan(value) else value,
        limit=configured_limit,
        passed=not is_broken,
        value_text="not measured" if math.isnan(value) else format_metric(value, limit.unit),
        limit_text="no limit"
        if configured_limit is None
        else f"{'at least' if is_minimum else 'at most'} {format_metric(configured_limit, limit.unit)}",
    )


def describe_breaches(checks: tuple[Check, ...]) -> tuple[str, ...]:
    """Return one sentence per broken limit."""
    return tuple(
        f"{check.description}: {check.value_text}, but data_report.{check.setting} requires {check.limit_text}"
        for check in checks
        if not check.passed
    )


def find_warnings(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return one sentence per suspicious metric, independent of the limits."""
    warnings = []
    psi = metrics.get("popularity_psi", math.nan)
    if psi >= MODERATE_PSI:
        severity = "major" if psi >= MAJOR_PSI else "moderate"
        warnings.append(
            f"item popularity changed since the previous run: PSI {psi:.3f}, by the rule of thumb a {severity} shift"
        )
    for metric, threshold, description in WARNINGS:
        if metrics.get(metric, math.nan) > threshold:
            warnings.append(f"{format_metric(metrics[metric], 'share')} {description}")
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
