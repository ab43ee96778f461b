"""Figure that compares the indexes: recall against latency."""

from collections.abc import Mapping
from pathlib import Path

from recsys_core import plots
from recsys_core.manifests import IndexReport
from recsys_core.units import MIB


def plot_indexes(reports: Mapping[str, IndexReport], *, served: str, path: Path) -> Path:
    """Write a PNG with one point per index; the point of the served index is filled. Return `path`."""
    recall_k = max(report.k for report in reports.values())
    figure, axes = plots.new_figure(title="Recall and latency of the indexes")
    for kind, report in reports.items():
        axes.scatter(
            report.ms_per_query,
            report.recall,
            s=70,
            zorder=3,
            edgecolors=plots.BLUE,
            facecolors=plots.BLUE if kind == served else "white",
        )
        axes.annotate(
            f"{kind}, {report.bytes / MIB:.1f} MiB" + (" (served)" if kind == served else ""),
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
    return plots.save_png(figure, path)
