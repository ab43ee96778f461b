"""Figure and table that compare the indexes: recall, latency and size."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recsys_core import plots
from recsys_core.manifests import IndexManifest, IndexReport
from recsys_core.units import MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (plots.INK, plots.BLUE, plots.GREEN, plots.ORANGE, plots.RED)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_indexes(manifest: IndexManifest, path: Path) -> Path:
    """Write a PNG of `draw_indexes`. Return `path`."""
    return plots.save_png(draw_indexes(manifest), path)


def draw_indexes(manifest: IndexManifest) -> "Figure":
    """Draw each index as a point, which is filled for the served index, and its tried settings as a curve."""
    report_by_kind, served_kind = manifest.reports, manifest.served_index
    recall_k = max(report.k for report in report_by_kind.values())
    figure, axes = plots.new_figure(title="Recall and latency of the indexes", size=(6.4, 4.4))
    for index_number, (kind, report) in enumerate(report_by_kind.items()):
        colour, marker = _COLOURS[index_number % len(_COLOURS)], _MARKERS[index_number % len(_MARKERS)]
        for curve in _curves(report):
            axes.plot(*zip(*curve, strict=True), color=colour, alpha=0.5, linewidth=1, marker=".", markersize=3, zorder=2)
        axes.scatter(
            report.ms_per_query,
            report.recall,
            s=60,
            zorder=3,
            marker=marker,
            edgecolors=colour,
            facecolors=colour if kind == served_kind else "white",
            label=f"{kind}, {report.size_bytes / MIB:.1f} MiB" + (" (served)" if kind == served_kind else ""),
        )
    if manifest.recall_target is not None:
        axes.axhline(manifest.recall_target, color=plots.GREY, linestyle="--", linewidth=1, zorder=1, label="recall target")
    axes.set_xscale("log", subs=(2, 5))
    axes.tick_params(axis="x", which="both", length=3, pad=4)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.margins(x=0.1, y=0.1)
    axes.set_xlabel("latency: ms per query (one thread, all queries in one batch)")
    axes.set_ylabel(f"recall@{recall_k} against exact search")
    axes.legend(  # below the axes, where it hides no point
        loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3, frameon=False, fontsize=8, labelcolor=plots.INK
    )
    return figure


def _curves(report: IndexReport) -> list[list[tuple[float, float]]]:
    """Return a curve for each tried value of `rescore`, with the latency and recall of each setting."""
    curve_by_rescore: dict[int, list[tuple[float, float]]] = {}
    for point in report.tried:
        curve_by_rescore.setdefault(point.parameters.get("rescore", 0), []).append((point.ms_per_query, point.recall))
    return [*curve_by_rescore.values()]


def index_table(report_by_kind: Mapping[str, IndexReport], *, served_kind: str, notes: Sequence[str] = ()) -> str:
    """Return a Markdown text: a table of the indexes, the notes, and a table of all settings that were tried.

    >>> report = IndexReport(recall=0.99, k=20, ms_per_query=0.5, size_bytes=3 * MIB, parameters={"nlist": 8})
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
        kind_text = f"**{kind}** (served)" if kind == served_kind else kind
        kind_text += "" if report.shards == 1 else f", {report.shards} shards"
        lines.append(
            f"| {kind_text} | {report.recall:.4f} | {report.ms_per_query:.3f} | {report.size_bytes / MIB:.1f} "
            f"| {_parameters_text(report.parameters)} |"
        )
    for note in notes:
        lines += ["", note]
    if any(report.tried for report in report_by_kind.values()):
        lines += ["", "Settings that were tried on validation queries:", ""]
        lines += [f"| index | recall@{recall_k} of exact search | ms per query | parameters |", "|:---|---:|---:|:---|"]
    lines += [
        f"| {kind} | {point.recall:.4f} | {point.ms_per_query:.3f} | {_parameters_text(point.parameters)} |"
        for kind, report in report_by_kind.items()
        for point in report.tried
    ]
    return "\n".join(lines)


def _parameters_text(parameters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parameters.items()) or "none"
