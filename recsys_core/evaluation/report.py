"""Metrics and training as tables and pictures, for the terminal, Prefect and MLflow."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from recsys_core.config import Frozen
from recsys_core.manifests import TrainManifest

COLOURS = {"model": "#22577a", "popularity": "#c7c7c7", "zero_shot": "#57a773"}
COLUMNS = ("recall@20", "ndcg@10", "hit_rate@10", "mrr", "auc", "coverage@20")
COLD = ", cold"
"""Ends the name of a row that is about cold items ranked among themselves."""


class MetricTable(Frozen):
    """One row per contender, one value per column; None where it was not measured. note: how many items the cold rows rank."""

    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    note: str = ""

    def best_beside(self, name: str) -> tuple[float, ...]:
        """The highest value of each column among the rows that ranked the same items as row `name`.

        >>> rows = {"model": (0.2,), "popularity": (0.3,), "model, cold": (0.9,)}
        >>> MetricTable(columns=("recall@20",), rows=rows).best_beside("model")
        (0.3,)
        """
        rivals = [values for other, values in self.rows.items() if other.endswith(COLD) == name.endswith(COLD)]
        return tuple(max(value or 0.0 for value in column) for column in zip(*rivals, strict=True))


def metric_table(metrics: Mapping[str, float], *, columns: Sequence[str] = COLUMNS) -> MetricTable:
    """The model's test metrics beside its baselines; below them the same for cold items, where there are some.

    >>> metric_table({"test/mrr": 0.5, "baseline/popularity/mrr": 0.25}, columns=["mrr"]).rows
    {'model': (0.5,), 'popularity': (0.25,)}
    """
    contenders = _contenders(metrics)
    shown = tuple(column for column in columns if column in contenders["model"])
    cold = {f"{name}{COLD}": _under("cold/", values) for name, values in contenders.items()}
    measured = {name: values for name, values in cold.items() if values.keys() & set(shown)}
    rows = {name: tuple(values.get(column) for column in shown) for name, values in (contenders | measured).items()}
    counts = cold[f"model{COLD}"]
    note = f"cold: {counts['items']:,.0f} items without an earlier event, for {counts['users']:,.0f} users" if measured else ""
    return MetricTable(columns=shown, rows=rows, note=note)


def to_markdown(table: MetricTable) -> str:
    """The table in GitHub's markdown.

    >>> print(to_markdown(MetricTable(columns=("mrr", "auc"), rows={"model": (0.5, None)})))
    | | mrr | auc |
    |:---|---:|---:|
    | model | 0.5000 | - |
    """
    lines = ["| | " + " | ".join(table.columns) + " |", "|:---|" + "---:|" * len(table.columns)]
    for name, values in table.rows.items():
        lines.append(f"| {name} | " + " | ".join("-" if value is None else f"{value:.4f}" for value in values) + " |")
    return "\n".join([*lines, "", table.note] if table.note else lines)


def plot_recall(metrics: Mapping[str, float], *, path: Path) -> Path:
    """Writes a png with recall@K by K, model and baselines side by side. Returns `path`."""
    from matplotlib.figure import Figure  # most commands draw nothing

    contenders = _contenders(metrics)
    ks = sorted(int(found[1]) for name in contenders["model"] if (found := re.fullmatch(r"recall@(\d+)", name)))
    figure = Figure(figsize=(6.4, 3.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(contenders)
    for number, (name, values) in enumerate(contenders.items()):
        left = [place + (number - (len(contenders) - 1) / 2) * width for place in range(len(ks))]
        bars = axes.bar(left, [values[f"recall@{k}"] for k in ks], width * 0.94, label=name, color=COLOURS[name])
        axes.bar_label(bars, fmt="%.3f", fontsize=7, padding=2)
    axes.set_xticks(range(len(ks)), [f"@{k}" for k in ks])
    axes.set_ylabel("recall on the test split")
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return path


def plot_loss(train: TrainManifest, *, path: Path) -> Path:
    """Write a png of the training loss, and of the validation metrics after each epoch. Return `path`.

    An epoch ends at each vertical line. The loss falls in steps there, where items are seen again.
    """
    from matplotlib.figure import Figure  # most commands draw nothing

    text = train.path("metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    figure = Figure(figsize=(6.4, 3.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], color=COLOURS["model"], linewidth=1.6)
    axes.set_xlabel("step; dotted: end of an epoch")
    axes.set_ylabel("training loss", color=COLOURS["model"])
    for end in {line["epoch"]: line["step"] for line in lines}.values():
        axes.axvline(end, color="#999999", linewidth=0.7, linestyle=":", zorder=0)
    measured = {line["epoch"]: line for line in lines if line["validation"]}
    if measured:
        right = axes.twinx()
        for name, style in zip(next(iter(measured.values()))["validation"], ("--", "-", ":"), strict=False):
            points = [(line["step"], line["validation"][name]) for line in measured.values()]
            right.plot(*zip(*points, strict=True), style, marker="o", markersize=3, color=COLOURS["zero_shot"], label=name)
        if train.best_epoch in measured:
            best = measured[train.best_epoch]["step"]
            right.axvline(best, color=COLOURS["zero_shot"], linewidth=1.2, zorder=0, label=f"best epoch: {train.best_epoch}")
        right.set_ylabel("validation", color=COLOURS["zero_shot"])
        right.set_ylim(bottom=0)
        right.spines["top"].set_visible(False)
        right.legend(frameon=False, fontsize=7, loc="best")
    axes.spines["top"].set_visible(False)
    figure.savefig(path)
    return path


def _contenders(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    baselines = sorted({name.split("/")[1] for name in metrics if name.startswith("baseline/")})
    return {"model": _under("test/", metrics)} | {name: _under(f"baseline/{name}/", metrics) for name in baselines}


def _under(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
