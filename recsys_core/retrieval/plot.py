"""Figure and table that compare the indexes: recall, latency and size."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from recsys_core import plots
from recsys_core.manifests import IndexReport
from recsys_core.units import MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_indexes(report_by_kind: Mapping[str, IndexReport], *, served_kind: str, path: Path) -> Path:
    """Write a PNG of `draw_indexes`. Return `path`."""
    return plots.save_png(draw_indexes(report_by_kind, served_kind=served_kind), path)


def draw_indexes(report_by_kind: Mapping[str, IndexReport], *, served_kind: str) -> "Figure":
    """Draw recall and latency with one point per index; the point of the served index is filled."""
    recall_k = max(report.k for report in report_by_kind.values())
    figure, axes = plots.new_figure(title="Recall and latency of the indexes")
    for kind, report in report_by_kind.items():
        for points in _curves(report):
            axes.plot(*zip(*points, strict=True), color=plots.GREY, linewidth=1.2, marker=".", zorder=2)
        axes.scatter(
            report.ms_per_query,
            report.recall,
            s=70,
            zorder=3,
            edgecolors=plots.BLUE,
            facecolors=plots.BLUE if kind == served_kind else "white",
        )
        axes.annotate(
            f"{kind}, {report.bytes / MIB:.1f} MiB" + (" (served)" if kind == served_kind else ""),
            (report.ms_per_query, report.recall),
            xytext=(8, -12),
            textcoords="offset points",
            fontsize=8,
            color=plots.INK,
        )
    axes.set_xscale("log", subs=(2, 5))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.margins(x=0.5, y=0.15)
    axes.set_xlabel("latency: ms per query (one thread, all queries in one batch)")
    axes.set_ylabel(f"recall@{recall_k} against exact search")
    return figure


def _curves(report: IndexReport) -> list[list[tuple[float, float]]]:
    """Return latency and recall of the settings that were tried, as one curve for each number of rescored candidates."""
    curve_by_rescore: dict[int, list[tuple[float, float]]] = {}
    for point in report.tried:
        curve_by_rescore.setdefault(point.parameters.get("rescore", 0), []).append((point.ms_per_query, point.recall))
    return [*curve_by_rescore.values()]


def index_table(report_by_kind: Mapping[str, IndexReport], *, served_kind: str) -> str:
    """Return the comparison as a table in GitHub's Markdown.

    >>> report = IndexReport(recall=0.99, k=20, ms_per_query=0.5, bytes=3 * MIB, parameters={"nlist": 8})
    >>> print(index_table({"ivf_flat": report}, served_kind="ivf_flat"))
    | index | recall@20 of exact search | ms per query | MiB | parameters |
    |:---|---:|---:|---:|:---|
    | **ivf_flat** (served) | 0.9900 | 0.500 | 3.0 | nlist 8 |
    """
    recall_k = max(report.k for report in report_by_kind.values())
    lines = [
        f"| index | recall@{recall_k} of exact search | ms per query | MiB | parameters |",
        "|:---|---:|---:|---:|:---|",
    ]
    for kind, report in report_by_kind.items():
        shown_kind = f"**{kind}** (served)" if kind == served_kind else kind
        parameters = (
            ", ".join(f"{parameter} {parameter_value}" for parameter, parameter_value in report.parameters.items()) or "none"
        )
        lines.append(
            f"| {shown_kind} | {report.recall:.4f} | {report.ms_per_query:.3f} | {report.bytes / MIB:.1f} | {parameters} |"
        )
    return "\n".join(lines)
