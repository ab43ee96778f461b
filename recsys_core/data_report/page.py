"""report.html: one page without network or script; every word from the data is escaped by the template engine."""

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recsys_core.data_report.schema import DataReport, Day
from recsys_core.errors import SHOWN_CHARACTERS, printable
from recsys_core.manifests import DataReportManifest

_TEMPLATE = Path(__file__).with_suffix(".html")
# Colours that nothing else in a picture has: on the page they become variables, so that pictures follow light and dark.
_INK, _FAINT, _TRAIN, _VALIDATION, _TEST = "#010101", "#010102", "#010103", "#010104", "#010105"
_VARIABLES = {_INK: "muted", _FAINT: "line", _TRAIN: "train", _VALIDATION: "validation", _TEST: "test"}
_MOST_BARS = 120

_TABLE: tuple[tuple[str, str, str], ...] = (
    ("train_events", "training events", "count"),
    ("validation_events", "validation events", "count"),
    ("test_events", "test events", "count"),
    ("users", "users with an event", "count"),
    ("items", "items with an event", "count"),
    ("items_in_catalogue", "items in the catalogue", "count"),
    ("new_users", "users that last night had not", "count"),
    ("vanished_users", "users of last night that are gone", "count"),
    ("new_items", "items that last night had not", "count"),
    ("vanished_items", "items of last night that are gone", "count"),
    ("popularity_psi", "popularity shift against the night before (PSI)", "index"),
    ("days", "days from the first to the last event", "count"),
    ("empty_day_share", "days in between without an event", "share"),
    ("item_vector_share", "items with a pretrained vector", "share"),
    ("train_event_vector_share", "training events of items with a pretrained vector", "share"),
    ("head_share", "training events of the most frequent 1 % of the items", "share"),
    ("gini", "Gini coefficient of item popularity", "index"),
    ("history_median", "training events of a user, median", "count"),
    ("history_p95", "training events of a user, 95th percentile", "count"),
    ("history_longest", "training events of a user, most", "count"),
    ("duplicate_share", "events that repeat another one (user, item, time)", "share"),
    ("repeated_train_pair_share", "training events of an item the user had before", "share"),
    ("repeated_pair_share", "test events of an item the user had in training", "share"),
    ("unseen_item_share", "test events of items without a training event", "share"),
    ("unseen_user_share", "test users without a training event", "share"),
    ("leaked_event_share", "held-out events with a copy in an earlier part of the split", "share"),
    ("future_event_share", "training events later than their user's first test event", "share"),
    ("files_without_checksums", "files of the log without checksums, where a flipped bit passes unseen", "count"),
    ("split_violations", "events on the wrong side of the split, or out of order", "count"),
)


def to_html(report: DataReport, *, run: str) -> str:
    """The whole page, for the run named `run`."""
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {"number": number, "change": change, "plain": lambda text: printable(text, at_most=SHOWN_CHARACTERS)}
    plots = {
        "Events per day": plot_days(report.days),
        "Popularity of items": plot_popularity(report),
        "Length of histories": plot_histories(report.history_lengths),
    }
    return page.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report, run=run, plots={title: picture for title, picture in plots.items() if picture}, table=_TABLE
    )


def to_markdown(report: DataReportManifest, *, page: Path) -> str:
    """The verdict and the sizes in GitHub's markdown, and where the whole page lies."""
    broken = [
        f"**{len(report.breaches)} limit{'s' if len(report.breaches) > 1 else ''} broken**",
        *(f"- {words}" for words in report.breaches),
    ]
    lines = broken if report.breaches else ["**OK: every limit is kept**"]
    if report.warnings:
        lines += ["", "Worth a look", *(f"- {words}" for words in report.warnings)]
    compared = f"compared with {report.compared_with}" if report.compared_with else "no earlier night to compare with"
    lines += ["", "| | |", "|:---|---:|"]
    lines += [f"| {words} | {number(report.metrics[name], unit)} |" for name, words, unit in _TABLE if name in report.metrics]
    return "\n".join([*lines, "", f"{compared}; the whole report: `{page}`"])


def number(value: float | None, unit: str) -> str:
    """A metric for a reader.

    >>> number(12345, "count"), number(0.0371, "share"), number(0.2, "index"), number(None, "count")
    ('12,345', '3.71 %', '0.200', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if unit == "count" else f"{100 * value:.3g} %" if unit == "share" else f"{value:.3f}"


def change(now: float | None, before: float | None) -> str:
    """How far a count moved.

    >>> change(110, 100), change(95, 100), change(5, None), change(5, 0)
    ('+10 %', '-5 %', '', '')
    """
    return "" if now is None or not before else f"{100 * (now / before - 1):+.3g} %"


def plot_days(days: Sequence[Day]) -> Markup | None:
    """Events per day, or per equal run of days where there are many; None for a log without times."""
    if not days:
        return None
    at = [int((np.datetime64(day.day) - np.datetime64(days[0].day)).astype(int)) for day in days]
    wide = -(-(at[-1] + 1) // _MOST_BARS)
    sums = [[0.0] * (at[-1] // wide + 1) for _ in range(3)]
    for place, day in zip(at, days, strict=True):
        for part, events in zip(sums, (day.train, day.validation, day.test), strict=True):
            part[place // wide] += events
    figure, axes = _figure()
    bottom = [0.0] * len(sums[0])
    for part, name, colour in zip(sums, ("training", "validation", "test"), (_TRAIN, _VALIDATION, _TEST), strict=True):
        axes.bar(range(len(part)), part, 0.86, bottom=bottom, color=colour, label=name)
        bottom = [low + high for low, high in zip(bottom, part, strict=True)]
    every = max(1, len(bottom) // 6)
    axes.set_xticks(
        range(0, len(bottom), every), [str(np.datetime64(days[0].day) + wide * bar) for bar in range(0, len(bottom), every)]
    )
    axes.set_ylabel("events per day" if wide == 1 else f"events per {wide} days")
    _legend(axes)
    return _svg(figure)


def plot_popularity(report: DataReport) -> Markup | None:
    """Share of the training events by rank of the item, tonight and last night."""
    figure, axes = _figure()
    for curve, name, colour, dash in (
        (report.last_popularity, "last night", _VALIDATION, (0, (4, 2))),
        (report.popularity, "tonight", _TRAIN, "solid"),
    ):
        if curve:
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=2, linestyle=dash, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rank of the item")
    axes.set_ylabel("share of training events")
    _legend(axes)
    return _svg(figure)


def plot_histories(classes: Sequence[tuple[str, int]]) -> Markup | None:
    """Users by number of training events."""
    figure, axes = _figure()
    axes.bar([name for name, _ in classes], [users for _, users in classes], 0.8, color=_TRAIN)
    axes.set_xlabel("training events of the user")
    axes.set_ylabel("users")
    axes.tick_params(axis="x", labelrotation=35 if len(classes) > 7 else 0)
    return _svg(figure)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, 3.0), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(which="both", color=_FAINT, labelcolor=_INK, labelsize=8)
    axes.xaxis.label.set(color=_INK, size=9)
    axes.yaxis.label.set(color=_INK, size=9)
    axes.grid(axis="y", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)


def _svg(figure: Figure) -> Markup:
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nightjar", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        drawn = drawn.replace(colour, f"var(--{variable})")
    return Markup(drawn)  # made from numbers and dates alone
