"""The indexes as a picture: recall against latency."""

from collections.abc import Mapping
from pathlib import Path

from recsys_core.manifests import IndexReport
from recsys_core.units import MIB


def plot_indexes(reports: Mapping[str, IndexReport], *, served: str, path: Path) -> Path:
    """Writes a png with one point per index; the served one is filled. Returns `path`."""
    from matplotlib.figure import Figure  # most commands draw nothing

    figure = Figure(figsize=(6.4, 4.0), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for kind, report in reports.items():
        axes.scatter(
            report.ms_per_query, report.recall, s=70, zorder=3, edgecolors="#22577a",
            facecolors="#22577a" if kind == served else "white",
        )  # fmt: skip
        label = f"{kind}  {report.bytes / MIB:.1f} MiB" + ("  (served)" if kind == served else "")
        axes.annotate(label, (report.ms_per_query, report.recall), xytext=(8, -12), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.5, y=0.15)
    axes.set_xlabel("ms per query (one thread, batched)")
    axes.set_ylabel(f"recall@{max(report.k for report in reports.values())} against exact search")
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return path
