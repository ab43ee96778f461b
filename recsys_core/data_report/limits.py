"""Which limits the measured data breaks, and what is worth a look although it breaks none."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from recsys_core.config import Frozen
from recsys_core.data_report.config import DataReportConfig

MODERATE_SHIFT, MAJOR_SHIFT = 0.1, 0.25


class _Limit(NamedTuple):
    """A setting of DataReportConfig and the metric that it bounds."""

    setting: str
    metric: str
    words: str
    unit: Literal["share", "count", "index"] = "share"


LIMITS = (
    _Limit("min_events", "train_events", "training events", "count"),
    _Limit("max_event_drop_share", "event_drop_share", "drop of training events against last night"),
    _Limit("max_new_user_share", "new_user_share", "users that last night had not"),
    _Limit("max_new_item_share", "new_item_share", "items that last night had not"),
    _Limit("max_vanished_user_share", "vanished_user_share", "users of last night that are gone"),
    _Limit("max_vanished_item_share", "vanished_item_share", "items of last night that are gone"),
    _Limit("max_popularity_psi", "popularity_psi", "popularity shift (PSI) against last night", "index"),
    _Limit("min_item_vector_share", "item_vector_share", "items with a pretrained vector"),
    _Limit("max_null_share", "null_share", "nulls in the column with most of them"),
    _Limit("max_duplicate_share", "duplicate_share", "events that repeat another one (user, item, time)"),
    _Limit(
        "max_leaked_event_share", "leaked_event_share", "validation and test events with a copy in an earlier part of the split"
    ),
    _Limit("max_future_event_share", "future_event_share", "training events later than their user's first test event"),
    _Limit("max_split_violations", "split_violations", "events on the wrong side of the split, or out of order", "count"),
    _Limit("max_unseen_item_share", "unseen_item_share", "test events of items without a training event"),
    _Limit("max_unseen_user_share", "unseen_user_share", "test users without a training event"),
    _Limit("max_repeated_pair_share", "repeated_pair_share", "test events of an item the user had in training"),
)


class Check(Frozen):
    """One limit beside what was measured; `limit` is None where none is set, `value` where there was nothing to measure."""

    setting: str
    words: str
    value: float | None
    limit: float | None
    kept: bool
    shown_value: str
    shown_limit: str


def check_limits(metrics: Mapping[str, float], config: DataReportConfig) -> tuple[Check, ...]:
    """Every limit; one without a value, because there was no last night or there are no times, is kept.

    >>> checks = check_limits({"event_drop_share": 0.75}, DataReportConfig(max_event_drop_share=0.5))
    >>> [(check.setting, check.kept, check.shown_value, check.shown_limit) for check in checks if check.value is not None]
    [('max_event_drop_share', False, '75 %', 'at most 50 %')]
    """
    return tuple(_check(limit, metrics.get(limit.metric, math.nan), getattr(config, limit.setting)) for limit in LIMITS)


def _check(limit: _Limit, value: float, bound: float | None) -> Check:
    least = limit.setting.startswith("min_")
    # What could not be measured (nan) is less than nothing and more than nothing, so it breaks no limit.
    broken = bound is not None and (value < bound if least else value > bound)
    return Check(
        setting=limit.setting,
        words=limit.words,
        value=None if math.isnan(value) else value,
        limit=bound,
        kept=not broken,
        shown_value="not measured" if math.isnan(value) else _in_words(value, limit.unit),
        shown_limit="no limit" if bound is None else f"{'at least' if least else 'at most'} {_in_words(bound, limit.unit)}",
    )


def breaches_of(checks: tuple[Check, ...]) -> tuple[str, ...]:
    """The broken ones as sentences."""
    return tuple(
        f"{check.words}: {check.shown_value}, but data_report.{check.setting} is {check.shown_limit.split(maxsplit=2)[2]}"
        for check in checks
        if not check.kept
    )


def warnings_of(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """What a person should look at, though no limit is set on it or it is kept."""
    said = []
    shift = metrics.get("popularity_psi", math.nan)
    if shift >= MODERATE_SHIFT:
        size = "major" if shift >= MAJOR_SHIFT else "moderate"
        said.append(f"popularity moved: PSI {shift:.3f} against last night, which is read as a {size} shift")
    for metric, least, words in (
        (
            "future_event_share",
            0.0,
            "of the training events are later than their user's first test event: a model may learn the answer",
        ),
        (
            "leaked_event_share",
            0.0,
            "of the validation and test events have a copy (user, item, time) in an earlier part of the split",
        ),
        ("duplicate_share", 0.01, "of the events repeat another one (user, item, time)"),
        ("unseen_item_share", 0.5, "of the test events are of items without a training event"),
        ("unseen_user_share", 0.5, "of the test users have no training event"),
        ("empty_day_share", 0.0, "of the days between the first and the last event have no event: is a partition missing?"),
    ):
        if metrics.get(metric, math.nan) > least:
            said.append(f"{_in_words(metrics[metric], 'share')} {words}")
    return tuple(said)


def _in_words(value: float, unit: Literal["share", "count", "index"]) -> str:
    """A share in percent with as many digits as it needs.

    >>> [_in_words(value, "share") for value in (0, 0.5, 0.0123, 0.00004)], _in_words(12345, "count")
    (['0 %', '50 %', '1.23 %', '0.004 %'], '12,345')
    """
    if unit == "count":
        return f"{value:,.0f}"
    return f"{value:.3f}" if unit == "index" else f"{100 * value:.4g} %"
