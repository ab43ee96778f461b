"""Plots of decision.html. A function returns None if there is no data to plot.

Shapes: I items, L recommended items of all users, T targets.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recsys_core import plots
from recsys_core.comparison.decision import Evidence
from recsys_core.manifests import RegistrationManifest
from tasks.runs.context import StageContext
from tasks.runs.run_record import RunRecord
from tasks.runs.workspace import Workspace

MAX_TREND_VERSIONS = 30
NUM_SCORE_BINS = 40
_COLOURS = (plots.BLUE, plots.ORANGE)
"""Colours of the new version and of the version that it is compared with."""


class RecommendedItems(NamedTuple):
    """Recommended items of one version for all users of the sample, the best item of each user first.

    Attributes:
        score_L: scores.
        item_row_L: item rows; -1 for an item that is not in the catalogue.
    """

    score_L: NDArray[np.float64]
    item_row_L: NDArray[np.int64]


def draw_differences(evidence: Sequence[Evidence]) -> Any:
    """Draw the relative difference of each comparison with another version, and its interval."""
    shown_evidence = [fact for fact in evidence if fact.comparison.interval is not None and fact.baseline.startswith("version")]
    if not shown_evidence:
        return None
    figure, axes = plots.new_figure(grid_axis="x", size=(6.4, 1.2 + 0.34 * len(shown_evidence)))
    colour_by_outcome = {"accepted": plots.GREEN, "rejected": plots.RED, "not_enough_data": plots.GREY}
    for position, fact in enumerate(reversed(shown_evidence)):
        comparison = fact.comparison
        assert comparison.interval is not None
        low, high = (100 * bound for bound in comparison.interval)
        colour = colour_by_outcome[comparison.outcome]
        axes.plot([low, high], [position, position], color=colour, linewidth=3, solid_capstyle="round")
        axes.scatter(100 * (comparison.relative_difference or 0.0), position, 34, colour, zorder=3)
    axes.axvline(0, color=plots.INK, linewidth=0.8)
    axes.set_yticks(range(len(shown_evidence)), [fact.subject for fact in reversed(shown_evidence)])
    axes.set_xlabel("relative difference in %, with one-sided bounds")
    return figure


def draw_trend(registration: RegistrationManifest, context: StageContext, *, metric: str) -> Any:
    """Draw the metric of the workspace's newest versions up to the new version. Return None if there is only one version."""
    runs = [run for run in Workspace(context.run.workspace).runs() if run.run_id != context.run.run_id]
    records = (record for run in reversed(runs) if (record := RunRecord.read(run)) is not None)
    earlier_points = (
        (record.figures.version, record.figures.metrics[f"served/{metric}"], record.figures.promoted)
        for record in records
        if record.figures.version is not None and f"served/{metric}" in record.figures.metrics
    )
    points = [*reversed([*islice(earlier_points, MAX_TREND_VERSIONS - 1)])]
    points.append((registration.version, registration.metrics[f"served/{metric}"], registration.promoted))
    if len(points) < 2:
        return None
    figure, axes = plots.new_figure(grid_axis="y", size=(6.4, 3.0))
    positions = range(len(points))
    versions, metric_values, promotions = zip(*points, strict=True)
    axes.plot(positions, metric_values, color=plots.BLUE, linewidth=1.4)
    for is_promoted, colour, label in ((True, plots.GREEN, "promoted"), (False, plots.ORANGE, "not promoted")):
        shown_positions = [position for position in positions if promotions[position] == is_promoted]
        axes.scatter(
            shown_positions, [metric_values[position] for position in shown_positions], 30, colour, label=label, zorder=3
        )
    tick_step = -(-len(points) // 10)
    axes.set_xticks(positions[::tick_step], [str(version) for version in versions[::tick_step]])
    axes.set_xlabel("version")
    axes.set_ylabel(metric)
    axes.margins(y=0.2)
    plots.legend_above(axes)
    return figure


def draw_scores(items_by_version: Mapping[str, RecommendedItems]) -> Any:
    """Draw the score distribution of the recommended items, for each version."""
    figure, axes = plots.new_figure(grid_axis="y", size=(6.4, 3.0))
    scores = [items.score_L for items in items_by_version.values()]
    bin_edges = np.histogram_bin_edges(np.concatenate(scores), bins=NUM_SCORE_BINS)
    for colour, (version, items) in zip(_COLOURS, items_by_version.items(), strict=False):
        count_by_bin, _ = np.histogram(items.score_L, bins=bin_edges)
        axes.stairs(100 * count_by_bin / max(1, len(items.score_L)), bin_edges, color=colour, linewidth=1.6, label=version)
    axes.set_xlabel("score")
    axes.set_ylabel("% of the recommendations")
    plots.legend_above(axes)
    return figure


def draw_popularity(
    items_by_version: Mapping[str, RecommendedItems], *, train_count_I: NDArray[Any], target_item_T: NDArray[Any]
) -> Any:
    """Draw how popular the recommended items are: the share of the recommendations whose item has at most x training events.

    Args:
        target_item_T: item rows of the test events, which are drawn for comparison.
    """
    figure, axes = plots.new_figure(grid_axis="both", size=(6.4, 3.0))
    item_rows_by_label = {version: items.item_row_L for version, items in items_by_version.items()}
    item_rows_by_label["test events"] = target_item_T
    colours = (*_COLOURS[: len(items_by_version)], plots.GREY)
    for (label, item_row_L), colour in zip(item_rows_by_label.items(), colours, strict=True):
        train_count_L = np.sort(train_count_I[item_row_L[item_row_L >= 0]])
        share_L = 100 * np.arange(1, len(train_count_L) + 1) / max(1, len(train_count_L))
        axes.step(train_count_L, share_L, where="post", color=colour, linewidth=1.6, label=label)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=0)
    axes.set_xlabel("training events of the item")
    axes.set_ylabel("% of the recommendations")
    plots.legend_above(axes)
    return figure
