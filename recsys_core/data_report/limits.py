"""Limits on the metrics of the data report: the settings, their checks, and warnings that do not depend on settings."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from recsys_core.config import MAX_COUNT, Frozen, Settings

MODERATE_PSI, MAJOR_PSI = 0.1, 0.25

Unit = Literal["share", "count", "index"]
_Share = Annotated[float | None, Field(ge=0, le=1)]

METRICS: dict[str, tuple[str, Unit]] = {
    "train_events": ("training events", "count"),
    "validation_events": ("validation events", "count"),
    "test_events": ("test events", "count"),
    "users": ("users with an event", "count"),
    "validation_users": ("users with a validation event", "count"),
    "test_users": ("users with a test event", "count"),
    "items": ("items with an event", "count"),
    "items_in_catalogue": ("items in the catalogue", "count"),
    "event_drop_share": ("drop of training events since the previous run", "share"),
    "new_users": ("users without an event in the previous run", "count"),
    "new_user_share": ("users without an event in the previous run", "share"),
    "vanished_users": ("users of the previous run without an event in this run", "count"),
    "vanished_user_share": ("users of the previous run without an event in this run", "share"),
    "new_items": ("items without an event in the previous run", "count"),
    "new_item_share": ("items without an event in the previous run", "share"),
    "vanished_items": ("items of the previous run without an event in this run", "count"),
    "vanished_item_share": ("items of the previous run without an event in this run", "share"),
    "popularity_psi": ("popularity shift (PSI) since the previous run", "index"),
    "days": ("days from the first to the last event", "count"),
    "empty_day_share": ("days without an event between the first and the last event", "share"),
    "null_share": ("nulls in the column with the largest share of nulls", "share"),
    "item_vector_share": ("items with a pretrained vector", "share"),
    "train_event_vector_share": ("training events whose item has a pretrained vector", "share"),
    "head_share": ("training events of the most popular 1 % of the items", "share"),
    "gini": ("Gini coefficient of item popularity", "index"),
    "history_median": ("training events per user, median", "count"),
    "history_p95": ("training events per user, 95th percentile", "count"),
    "history_longest": ("training events per user, maximum", "count"),
    "duplicate_share": ("events that repeat another event (user, item, time)", "share"),
    "repeated_train_pair_share": ("training events whose user had the item before", "share"),
    "repeated_pair_share": ("test events whose user had the item in training", "share"),
    "unseen_item_share": ("test events whose item has no training event", "share"),
    "unseen_user_share": ("test users without a training event", "share"),
    "leaked_event_share": ("validation and test events with a copy in an earlier part of the split", "share"),
    "future_event_share": ("training events later than the first test event of their user", "share"),
    "files_without_checksums": ("log files without checksums, in which a flipped bit cannot be detected", "count"),
    "split_violations": ("events in the wrong part of the split, or out of order", "count"),
}
"""Description and unit of each metric, in the order of the page."""


class DataReportConfig(Settings):
    """Limits on the ingested data. A run whose data violates a limit stops before the training, with exit code 2.

    A value without a limit is only reported.
    The "previous run" is the last run in the workspace whose data passed all limits. Limits that compare two runs do not apply
    to the first run.
    """

    min_train_events: int | None = Field(
        None, ge=1, le=1_000 * MAX_COUNT, description="smallest allowed number of training events"
    )
    min_validation_users: int | None = Field(
        50,
        ge=1,
        le=MAX_COUNT,
        description="smallest allowed number of users with a validation event. The limit does not apply to a split without "
        "validation events",
    )
    min_test_users: int | None = Field(
        50,
        ge=1,
        le=MAX_COUNT,
        description="smallest allowed number of users with a test event. With too few users, the metrics of two versions "
        "differ mainly by chance",
    )
    max_event_drop_share: float | None = Field(
        0.5,
        gt=0,
        le=1,
        description="largest allowed decrease of the number of training events since the previous run, as a share of the "
        "previous run's number",
    )
    max_new_user_share: _Share = Field(None, description="largest allowed share of users that had no event in the previous run")
    max_new_item_share: _Share = Field(None, description="largest allowed share of items that had no event in the previous run")
    max_vanished_user_share: _Share = Field(
        None, description="largest allowed share of the previous run's users that have no event in this run"
    )
    max_vanished_item_share: _Share = Field(
        None, description="largest allowed share of the previous run's items that have no event in this run"
    )
    max_popularity_psi: float | None = Field(
        None,
        gt=0,
        le=1_000,
        description="largest allowed population stability index (PSI) between the item popularities of this run and the "
        "previous run. By a common rule of thumb, a PSI of 0.1 is a moderate shift and 0.25 a major shift. From "
        "0.1 on, the report has a warning",
    )
    min_item_vector_share: _Share = Field(None, description="smallest allowed share of items with a pretrained vector")
    max_null_share: _Share = Field(None, description="largest allowed share of nulls in any column of the log")
    max_duplicate_share: _Share = Field(
        None, description="largest allowed share of events with the same user, item and time as another event"
    )
    max_leaked_event_share: _Share = Field(
        0.01,
        description="largest allowed share of validation and test events that also occur in an earlier part of the split",
    )
    max_train_after_test_share: _Share = Field(
        None,
        description="largest allowed share of training events that are later than the first test event of the same user",
    )
    max_split_violations: int | None = Field(
        0,
        ge=0,
        le=1_000 * MAX_COUNT,
        description="largest allowed number of events in the wrong part of the split, for example training events after "
        "the start of the test period",
    )
    max_unseen_item_share: _Share = Field(
        None, description="largest allowed share of test events whose item has no training event"
    )
    max_unseen_user_share: _Share = Field(None, description="largest allowed share of test users without a training event")
    max_repeated_pair_share: _Share = Field(
        None,
        description="largest allowed share of test events whose user already has a training event with the same item",
    )


_METRIC_BY_SETTING = {"max_train_after_test_share": "future_event_share"}
"""Metric of each limit that is not named min_<metric> or max_<metric>."""

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


class LimitCheck(Frozen):
    """The check of a metric against its limit.

    value: value of the metric; None if it was not measured. limit: None if no limit is set.
    """

    setting: str
    description: str
    value: float | None
    limit: float | None
    is_passed: bool
    value_text: str
    limit_text: str


def check_limits(metrics: Mapping[str, float], config: DataReportConfig) -> tuple[LimitCheck, ...]:
    """Check every limit. A metric that was not measured violates no limit, for example in a first run or without timestamps.

    >>> checks = check_limits({"event_drop_share": 0.75}, DataReportConfig(max_event_drop_share=0.5))
    >>> [(check.setting, check.is_passed, check.value_text, check.limit_text) for check in checks if check.value is not None]
    [('max_event_drop_share', False, '75 %', 'at most 50 %')]
    """
    return tuple(_check_limit(setting, getattr(config, setting), metrics) for setting in DataReportConfig.model_fields)


def _check_limit(setting: str, limit: float | None, metrics: Mapping[str, float]) -> LimitCheck:
    is_minimum = setting.startswith("min_")
    metric_name = _METRIC_BY_SETTING.get(setting, setting.removeprefix("min_").removeprefix("max_"))
    description, unit = METRICS[metric_name]
    value = metrics.get(metric_name, math.nan)
    # Comparisons with NaN are false, so a metric that was not measured violates no limit.
    is_violated = limit is not None and (value < limit if is_minimum else value > limit)
    limit_text = "no limit" if limit is None else f"{'at least' if is_minimum else 'at most'} {format_metric(limit, unit)}"
    return LimitCheck(
        setting=setting,
        description=description,
        value=None if math.isnan(value) else value,
        limit=limit,
        is_passed=not is_violated,
        value_text="not measured" if math.isnan(value) else format_metric(value, unit),
        limit_text=limit_text,
    )


def describe_breaches(checks: tuple[LimitCheck, ...]) -> tuple[str, ...]:
    """Return one sentence per violated limit."""
    return tuple(
        f"{check.description}: {check.value_text}, but data_report.{check.setting} requires {check.limit_text}"
        for check in checks
        if not check.is_passed
    )


def describe_held_out_users(metrics: Mapping[str, float]) -> str:
    """Return the numbers of validation and test users as text. The fewer they are, the less precise are the metrics of a run.

    >>> describe_held_out_users({"validation_users": 1_200.0, "test_users": 950.0})
    '1,200 validation users, 950 test users'
    """
    return ", ".join(
        f"{metrics[f'{part}_users']:,.0f} {part} users" for part in ("validation", "test") if f"{part}_users" in metrics
    )


def find_warnings(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return one sentence for each suspicious metric, even if its limit is not set or not violated."""
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
