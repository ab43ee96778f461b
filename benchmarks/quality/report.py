"""The tables and curves of results.json: mean and standard deviation over the seeds."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Runs = dict[str, dict[int, dict[str, Any]]]
"""variant -> seed -> result."""

TABLES = {
    "beauty": ("Amazon Beauty", ("test/hit_rate@10", "test/ndcg@10", "test/recall@20")),
    "limited": ("Amazon Beauty, training events of few users, all users asked", ("test/hit_rate@10", "test/ndcg@10")),
    "cold": ("citeulike_t, cold articles among cold articles", ("test/cold/recall@20", "test/cold/ndcg@20")),
    "warm": ("citeulike_t, all articles", ("test/recall@20", "test/ndcg@20")),
    "collaborative": ("citeulike_t, ids alone", ("test/recall@20", "test/ndcg@20")),
}
BASELINES = {"popularity": "baseline/popularity", "zero-shot": "baseline/zero_shot"}


def write_report(results: dict[str, Any], *, folder: Path) -> None:
    """report.md and curves.png beside results.json."""
    parts: dict[str, Runs] = {}
    for key, result in results["runs"].items():
        part, variant, seed = key.split("/")
        parts.setdefault(part, {}).setdefault(variant, {})[int(seed)] = result
    lines = [
        "# Quality on public data",
        "",
        f"Made on {results['date']} on {results['machine']} by `make bench-quality`. Mean and standard deviation over seeds;",
        "the epoch is chosen on the validation split, the test split is looked at once. Settings of each run: results.json.",
    ]
    for part, (title, metrics) in TABLES.items():
        if part in parts:
            lines += ["", f"## {title}", "", *_table(parts[part], metrics)]
    if "beauty" in parts:
        lines += ["", *_first_to_reach(parts["beauty"]), "", "![validation by epoch](curves.png)"]
        _plot_curves(parts["beauty"], path=folder / "curves.png")
    if "speed" in parts:
        lines += ["", "## Seconds per epoch", "", *_speed(parts["speed"])]
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def _table(runs: Runs, metrics: tuple[str, ...]) -> list[str]:
    names = [name.removeprefix("test/") for name in metrics]
    lines = ["| | seeds | " + " | ".join(names) + " | best epoch |", "|:---|---:|" + "---:|" * (len(names) + 1)]
    for variant, seeds in runs.items():
        cells = [_spread([one["metrics"][name] for one in seeds.values()]) for name in metrics]
        epochs = ", ".join(str(one["best_epoch"] or "-") for one in seeds.values())
        lines.append(f"| {variant} | {len(seeds)} | " + " | ".join(cells) + f" | {epochs} |")
    for name, prefix in BASELINES.items():
        wanted = [f"{prefix}/{metric.removeprefix('test/')}" for metric in metrics]
        found = next((one["metrics"] for seeds in runs.values() for one in seeds.values() if wanted[0] in one["metrics"]), None)
        if found is not None:
            lines.append(f"| {name} | | " + " | ".join(f"{found[metric]:.4f}" for metric in wanted) + " | |")
    return lines


def _spread(values: list[float]) -> str:
    """Mean and standard deviation.

    >>> _spread([0.1, 0.3])
    '.2000 ± .1414'
    """
    numbers = [f"{np.mean(values):.4f}", f"{np.std(values, ddof=1):.4f}"] if len(values) > 1 else [f"{values[0]:.4f}"]
    return " ± ".join(number.lstrip("0") for number in numbers)


def _curve(one: dict[str, Any]) -> list[float]:
    return [metrics["ndcg@10"] for metrics in one["validation"]]


def _first_to_reach(runs: Runs) -> list[str]:
    """When each variant first reaches the best validation value of the random one of its kind, by seed."""
    lines = [
        "When a variant first reaches the best validation NDCG@10 of random initialisation, and when random does, by seed:",
        "",
        "| | reached in epoch | random needs | share |",
        "|:---|---:|---:|---:|",
    ]
    for variant, seeds in runs.items():
        base = "random, features" if variant.endswith("features") else "random"
        if variant == base or base not in runs:
            continue
        reached, needed = [], []
        for seed, one in seeds.items():
            if seed in runs[base]:
                random = _curve(runs[base][seed])
                needed.append(1 + int(np.argmax(random)))
                reached.append(next((epoch for epoch, value in enumerate(_curve(one), 1) if value >= max(random)), None))
        share = "-" if None in reached else f"{sum(filter(None, reached)) / sum(needed):.2f}"
        shown = ", ".join("never" if epoch is None else str(epoch) for epoch in reached)
        lines.append(f"| {variant} | {shown} | {', '.join(map(str, needed))} | {share} |")
    return lines


def _plot_curves(runs: Runs, *, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for variant, seeds in runs.items():
        curves = np.array([_curve(one) for one in seeds.values()])
        epochs = np.arange(1, curves.shape[1] + 1)
        style = "--" if variant.startswith("random") else "-"
        (line,) = axes.plot(epochs, curves.mean(axis=0), style, label=variant, marker="o", markersize=3)
        axes.fill_between(epochs, curves.min(axis=0), curves.max(axis=0), color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(
        xlabel="epoch", ylabel="NDCG@10 on validation, all items ranked", title="Amazon Beauty, mean and range over the seeds"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _speed(runs: Runs) -> list[str]:
    lines = ["| | training pairs | seconds per epoch |", "|:---|---:|---:|"]
    for variant, seeds in runs.items():
        for one in seeds.values():
            lines.append(f"| {variant} | {one['pairs']:,} | {', '.join(f'{value:.1f}' for value in one['epoch_s'])} |")
    return lines
