"""Report of the quality benchmark: tables and curves with means and standard deviations over seeds."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.quality.ingredients import Runs, ingredient_table

TABLES = {
    "beauty": ("Amazon Beauty", ("test/hit_rate@10", "test/ndcg@10", "test/recall@20")),
    "all_events": (
        "Amazon Beauty, trained on all events before the test event",
        ("test/hit_rate@10", "test/ndcg@10", "test/recall@20"),
    ),
    "sequence": ("Amazon Beauty, self-attention over the history", ("test/hit_rate@10", "test/ndcg@10")),
    "limited": ("Amazon Beauty, trained on few users, evaluated on all users", ("test/hit_rate@10", "test/ndcg@10")),
    "cold": ("citeulike_t, only articles without interactions are ranked", ("test/cold/recall@20", "test/cold/ndcg@20")),
    "warm": ("citeulike_t, all articles are ranked", ("test/recall@20", "test/ndcg@20")),
    "collaborative": ("citeulike_t, all articles are ranked, models without text", ("test/recall@20", "test/ndcg@20")),
    "ml1m": ("ml1m, all films are ranked, ids only", ("test/recall@20", "test/ndcg@20")),
}
NOTES = {
    "all_events": (
        "The training includes the validation event of each user, as with the setting",
        "[training.refit](../../docs/operations.md#refit-on-all-events). The settings and the number of epochs come from",
        "experiments with validation. Published results on this split do not train on these events, so compare them with the",
        "table above.",
        "",
    )
}
"""Lines above the table of a part."""
BASELINES = {
    "popularity": "baseline/popularity",
    "zero-shot": "baseline/zero_shot",
    "closed form": "baseline/closed_form",
}


def write_report(results: dict[str, Any], *, folder: Path) -> None:
    """Write report.md and curves.png into `folder`."""
    runs_by_part: dict[str, Runs] = {}
    for key, result in results["runs"].items():
        part, variant, seed = key.split("/")
        runs_by_part.setdefault(part, {}).setdefault(variant, {})[int(seed)] = result
    lines = [
        "# Quality on public data",
        "",
        f"Measured on {results['machine']} by `make bench-quality`, the newest results on {results['date']}. The tables have",
        "means and standard deviations over the seeds. The epoch is chosen on the validation split, and the test split is",
        "used once. `results.json` has all settings.",
        "",
        "- `random`: the item embeddings start from random numbers. `for ids`: without dropout, and with fewer negatives,",
        "  which is better for ids alone.",
        "- `pretrained`, `text`: the item embeddings use pretrained vectors. `full`, `frozen`, `gradual` and `residual` are",
        "  values of the setting [transfer](../../docs/models.md#pretrained-vectors).",
        "- `log vectors`: the item embeddings use [vectors from the log](../../docs/models.md#vectors-from-the-log).",
        "- `features`: the model also uses attributes and words of the items.",
        "- `decay`: both learning rates fall to 0 like a cosine. `average`: the weights are",
        "  [averaged](../../docs/models.md#averaged-weights) over 8 epochs. `3 members`: an",
        "  [ensemble](../../docs/models.md#ensembles), with vectors of 3 x 64 numbers.",
        "- `wide`: vectors of 128 numbers (3 x 128 with `3 members`), and layers of 512 and 128 in the candidate tower.",
        "- `all articles`, `all pairs`: the training includes what the other experiments use for validation.",
        "- `plain`, `exponents`: matrix factorisation with a softmax over the catalogue. `exponents` also has",
        "  [`negatives_exponent` and `user_exponent`](../../docs/models.md#losses). `block`: a",
        "  [spectral block](../../docs/models.md#spectral-block), reduced to 64 numbers.",
        "- `with text, popularity`, `without text, popularity`: the scores have a fixed",
        "  [popularity term](../../docs/models.md#popularity).",
        "- `popularity`, `zero-shot`, `closed form`: baselines without training. They rank items by popularity, by the",
        "  similarity of their pretrained vectors, or by a linear model of the log (EASE, or a truncated SVD with",
        "  exponents of 0.5).",
    ]
    for part, (title, metrics) in TABLES.items():
        if part in runs_by_part:
            lines += ["", f"## {title}", "", *NOTES.get(part, ()), *_table(runs_by_part[part], metrics)]
    lines += [
        "",
        "## What each ingredient adds",
        "",
        "Each row compares two variants of the tables above that differ in one ingredient. The change is the mean over the",
        "seeds that both variants have, with the standard deviation of the changes of the seeds.",
        "",
        *ingredient_table(runs_by_part),
    ]
    if "beauty" in runs_by_part:
        lines += [
            "",
            "## Epochs to the quality of random initialisation",
            "",
            *_epochs_to_reach_table(runs_by_part["beauty"]),
            "",
            "![validation by epoch](curves.png)",
        ]
        _plot_curves(runs_by_part["beauty"], path=folder / "curves.png")
    if "speed" in runs_by_part:
        lines += ["", "## Seconds per epoch", "", *_speed_table(runs_by_part["speed"])]
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def _table(runs: Runs, metric_names: tuple[str, ...]) -> list[str]:
    column_titles = [metric_name.removeprefix("test/") for metric_name in metric_names]
    lines = ["| | seeds | " + " | ".join(column_titles) + " | best epoch |", "|:---|---:|" + "---:|" * (len(column_titles) + 1)]
    for variant, result_by_seed in runs.items():
        cells = [
            _spread([result["metrics"][metric_name] for result in result_by_seed.values()]) for metric_name in metric_names
        ]
        epochs = ", ".join(str(result["best_epoch"] or "-") for result in result_by_seed.values())
        lines.append(f"| {variant} | {len(result_by_seed)} | " + " | ".join(cells) + f" | {epochs} |")
    for baseline, prefix in BASELINES.items():
        baseline_keys = [f"{prefix}/{metric.removeprefix('test/')}" for metric in metric_names]
        metrics_of_runs = [
            result["metrics"]
            for result_by_seed in runs.values()
            for result in result_by_seed.values()
            if baseline_keys[0] in result["metrics"]
        ]
        if metrics_of_runs:  # the same in all results
            lines.append(f"| {baseline} | | " + " | ".join(f"{metrics_of_runs[0][key]:.4f}" for key in baseline_keys) + " | |")
    return lines


def _spread(values: list[float]) -> str:
    """Format the mean and the standard deviation.

    >>> _spread([0.1, 0.3])
    '.2000 ± .1414'
    """
    formatted_numbers = [f"{np.mean(values):.4f}", f"{np.std(values, ddof=1):.4f}"] if len(values) > 1 else [f"{values[0]:.4f}"]
    return " ± ".join(number.lstrip("0") for number in formatted_numbers)


def _validation_curve(result: dict[str, Any]) -> list[float]:
    return [metrics["ndcg@10"] for metrics in result["validation"]]


def _epochs_to_reach_table(runs: Runs) -> list[str]:
    """Return the table of the epochs in which each variant reaches the best validation value of random initialisation."""
    lines = [
        "On Amazon Beauty, the first epoch in which a variant reaches the best validation NDCG@10 of random initialisation,",
        "for each seed:",
        "",
        "| | epoch | epoch of random initialisation | ratio |",
        "|:---|---:|---:|---:|",
    ]
    for variant, result_by_seed in runs.items():
        reference_variant = "random, features" if variant.endswith("features") else "random"
        if variant == reference_variant or reference_variant not in runs:
            continue
        reached_epochs, reference_epochs = [], []
        for seed, result in result_by_seed.items():
            if seed in runs[reference_variant]:
                reference_curve = _validation_curve(runs[reference_variant][seed])
                reference_epochs.append(1 + int(np.argmax(reference_curve)))
                epochs_at_reference = (
                    epoch for epoch, ndcg in enumerate(_validation_curve(result), 1) if ndcg >= max(reference_curve)
                )
                reached_epochs.append(next(epochs_at_reference, None))
        ratio = "-" if None in reached_epochs else f"{sum(filter(None, reached_epochs)) / sum(reference_epochs):.2f}"
        epochs = ", ".join("never" if epoch is None else str(epoch) for epoch in reached_epochs)
        lines.append(f"| {variant} | {epochs} | {', '.join(map(str, reference_epochs))} | {ratio} |")
    return lines


def _plot_curves(runs: Runs, *, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    axes.set_prop_cycle(color=plt.colormaps["tab20"](range(20)))
    for variant, result_by_seed in runs.items():
        curves = np.array([_validation_curve(result) for result in result_by_seed.values()])
        epochs = np.arange(1, curves.shape[1] + 1)
        style = "--" if variant.startswith("random") else "-"
        (line,) = axes.plot(epochs, curves.mean(axis=0), style, label=variant, marker="o", markersize=3)
        axes.fill_between(epochs, curves.min(axis=0), curves.max(axis=0), color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(
        xlabel="epoch", ylabel="NDCG@10 on validation, all items ranked", title="Amazon Beauty, mean and range over the seeds"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _speed_table(runs: Runs) -> list[str]:
    lines = ["| | training pairs | seconds per epoch |", "|:---|---:|---:|"]
    for variant, result_by_seed in runs.items():
        for result in result_by_seed.values():
            seconds = ", ".join(f"{value:.1f}" for value in result["epoch_s"])
            lines.append(f"| {variant} | {result['pairs']:,} | {seconds} |")
    return lines
