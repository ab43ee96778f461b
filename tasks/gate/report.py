"""decision.html: the decision about a version on one page, with its comparisons, metrics, training and examples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from markupsafe import Markup

from recsys_core import plots
from recsys_core.comparison.decision import Evidence, read_evidence
from recsys_core.errors import MAX_SHOWN_CHARACTERS, printable
from recsys_core.evaluation.report import draw_loss, metric_table
from recsys_core.manifests import (
    DataReportManifest,
    EvaluationManifest,
    IndexManifest,
    RegistrationManifest,
    TrainManifest,
)
from recsys_core.plots import render_page
from recsys_core.retrieval.plot import draw_indexes
from tasks.runs.context import StageContext
from tasks.runs.run_record import RunRecord
from tasks.runs.workspace import Workspace

LIST_METRICS = ("test/coverage@", "test/novelty@", "test/gini@", "test/popularity_lift@", "test/diversity@")
NUM_SAMPLE_USERS, NUM_SHOWN_ITEMS = 10, 10
MAX_TREND_RUNS = 30
_TEMPLATE = Path(__file__).with_name("decision.html")
_TONE = {"accepted": "good", "rejected": "bad", "not_enough_data": "none"}
_LABEL = {"accepted": "✓ passed", "rejected": "✗ failed", "not_enough_data": "- not enough data"}


class SampleUser(NamedTuple):
    """A test user, with the ids of the newest items of the history and of the best recommendations."""

    user_id: str
    history: list[str]
    recommended: list[tuple[str, float]]


def write_report(fields: dict[str, Any], context: StageContext, *, metric: str, folder: Path) -> Path:
    """Write decision.html into the folder of the stage `register`, from the files of the gate there; return its path.

    Args:
        fields: fields of RegistrationManifest.
        metric: metric of the decision.
    """
    results, metrics = context.results, context.results[EvaluationManifest].metrics
    registration = RegistrationManifest.model_construct(**fields)
    evidence = read_evidence(folder)
    page = render_page(
        _TEMPLATE,
        filters={
            "escaped": lambda text: printable(text, max_characters=MAX_SHOWN_CHARACTERS),
            "percent": format_percent,
        },
        registration=registration,
        run_id=context.run.run_id,
        tone={"Promoted": "good", "NotPromoted": "bad", "NotEnoughData": "warn"}[registration.state_name],
        evidence=evidence,
        tone_by_outcome=_TONE,
        label_by_outcome=_LABEL,
        metric=metric,
        data_metrics=results[DataReportManifest].metrics,
        tables={
            "Metrics over the full catalogue": metric_table(metrics),
            "Recommended items": metric_table(
                metrics, shown=[name.removeprefix("test/") for name in metrics if name.startswith(LIST_METRICS)]
            ),
        },
        index=results[IndexManifest].reports[results[IndexManifest].served_index],
        plots=_plots(registration, context, evidence, metric=metric),
        sample_users=_sample_users(folder / "smoke_test", version=registration.version),
    )
    page_path = folder / Path(RegistrationManifest.pages["decision"]).name
    page_path.write_text(page, encoding="utf-8")
    return page_path


def _plots(
    registration: RegistrationManifest, context: StageContext, evidence: Sequence[Evidence], *, metric: str
) -> dict[str, Markup]:
    index = context.results[IndexManifest]
    figure_by_title = {
        "Difference to the champion": draw_differences(evidence),
        f"{metric} of the last runs": _draw_trend(registration, context, metric=metric),
        "Training": draw_loss(context.results[TrainManifest]),
        "Index": draw_indexes(index.reports, served_kind=index.served_index),
    }
    return {title: plots.to_svg(figure) for title, figure in figure_by_title.items() if figure is not None}


def format_percent(share: float | None) -> str:
    """Format a signed share in percent.

    >>> format_percent(0.0123), format_percent(None)
    ('+1.2 %', '-')
    """
    return "-" if share is None else f"{100 * share:+.1f} %"


def draw_differences(evidence: Sequence[Evidence]) -> Any:
    """Draw the relative difference of each comparison with the champion and its interval; return None without one."""
    shown = [item for item in evidence if item.comparison.interval is not None and item.baseline.startswith("version")]
    if not shown:
        return None
    figure, axes = plots.new_figure(grid_axis="x", size=(6.4, 1.2 + 0.34 * len(shown)))
    colours = {"accepted": plots.GREEN, "rejected": plots.RED, "not_enough_data": plots.GREY}
    for position, item in enumerate(reversed(shown)):
        comparison = item.comparison
        assert comparison.interval is not None
        low, high = (100 * bound for bound in comparison.interval)
        colour = colours[comparison.outcome]
        axes.plot([low, high], [position, position], color=colour, linewidth=3, solid_capstyle="round")
        axes.scatter(100 * (comparison.relative_difference or 0.0), position, 34, colour, zorder=3)
    axes.axvline(0, color=plots.INK, linewidth=0.8)
    axes.set_yticks(range(len(shown)), [item.subject for item in reversed(shown)])
    axes.set_xlabel("relative difference in %, with one-sided bounds")
    return figure


def _draw_trend(registration: RegistrationManifest, context: StageContext, *, metric: str) -> Any:
    """Draw the metric of the last versions of the workspace, the new one last; return None with one version."""
    runs = [run for run in Workspace(context.run.workspace).runs() if run.run_id != context.run.run_id]
    records = [record for run in runs[-MAX_TREND_RUNS:] if (record := RunRecord.read(run)) is not None]
    points = [
        (record.figures.version, record.figures.metrics[f"served/{metric}"], record.figures.promoted)
        for record in records
        if record.figures.version is not None and f"served/{metric}" in record.figures.metrics
    ]
    points.append((registration.version, registration.metrics[f"served/{metric}"], registration.promoted))
    if len(points) < 2:
        return None
    figure, axes = plots.new_figure(grid_axis="y", size=(6.4, 3.0))
    positions, values = range(len(points)), [value for _, value, _ in points]
    axes.plot(positions, values, color=plots.BLUE, linewidth=1.4)
    for is_promoted, colour, label in ((True, plots.GREEN, "promoted"), (False, plots.ORANGE, "not promoted")):
        shown = [position for position in positions if points[position][2] == is_promoted]
        axes.scatter(shown, [values[position] for position in shown], 30, colour, label=label, zorder=3)
    step = -(-len(points) // 10)
    axes.set_xticks(positions[::step], [str(version) for version, _, _ in points[::step]])
    axes.set_xlabel("version")
    axes.set_ylabel(metric)
    axes.margins(y=0.2)
    plots.legend_above(axes)
    return figure


def _sample_users(folder: Path, *, version: str) -> list[SampleUser]:
    """Return the first users of the smoke test, with the recommendations of the version."""
    cases = pq.read_table(folder / "cases.parquet").slice(0, NUM_SAMPLE_USERS).to_pylist()
    answers = pq.read_table(folder / f"answers-{version}.parquet").slice(0, NUM_SAMPLE_USERS).to_pylist()
    return [
        SampleUser(
            str(case["user_id"]),
            [str(item_id) for item_id in case["history"][: -NUM_SHOWN_ITEMS - 1 : -1]],
            [(str(item_id), score) for item_id, score in zip(answer["item_ids"], answer["scores"], strict=True)][
                :NUM_SHOWN_ITEMS
            ],
        )
        for case, answer in zip(cases, answers, strict=True)
    ]
