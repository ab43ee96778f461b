"""Benchmark of complete runs: metrics of the model and of baselines, duration of each stage, and time outside of the stages.

    make bench-nightly          # writes benchmarks/nightly.json and benchmarks/nightly.md

The dataset beauty is skipped if data/beauty does not exist. `python examples/get_data.py beauty` downloads it.
"""

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.orchestration import measure_orchestration
from recsys_core.preflight import installed_versions

ROOT = Path(__file__).resolve().parents[1]
NIGHTJAR = [sys.executable, "-m", "flows.cli"]
ARGUMENTS_BY_DATASET = {
    "demo": ["demo", "--workspace", "{workspace}"],
    "beauty": ["run", "examples/beauty.yaml", "--set", "workspace={workspace}"],
}
METRICS = ("recall@20", "hit_rate@10", "ndcg@10", "mrr", "auc")
PREFIX_BY_MODEL = {
    "model": "test",
    "popularity": "baseline/popularity",
    "zero_shot": "baseline/zero_shot",
    "served": "served",
}


def execute_run(arguments: list[str]) -> dict[str, Any]:
    """Execute one run in a new workspace, and return the metrics and seconds of its --json output, without paths."""
    with tempfile.TemporaryDirectory() as workspace:
        command = [*NIGHTJAR, *(argument.format(workspace=workspace) for argument in arguments), "--json"]
        process = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    output = json.loads(process.stdout.splitlines()[-1])
    return {
        "metrics": {
            model: {metric: output["metrics"].get(f"{prefix}/{metric}") for metric in METRICS}
            for model, prefix in PREFIX_BY_MODEL.items()
        },
        "seconds": {stage: round(result["seconds"], 1) for stage, result in output["stages"].items()},
    }


def to_markdown(results: dict[str, Any]) -> str:
    """Return one table per run."""
    lines = [
        f"This page was written by `make bench-nightly` on {results['date']} on {results['machine']}. There was one run per",
        "dataset. A table has the metrics of the trained model (`model`), of two baselines without training (`popularity` and",
        "`zero_shot`), and of the packaged retriever (`served`). `zero_shot` ranks items by the similarity of their pretrained",
        "vectors. `served` was measured in a new process on a sample of 2,000 test users.",
        "",
    ]
    for dataset, run in results["runs"].items():
        lines += [f"## {dataset}", "", "| | " + " | ".join(METRICS) + " |", "|:---|" + "---:|" * len(METRICS)]
        for model, value_by_metric in run["metrics"].items():
            cells = ("-" if value_by_metric[metric] is None else f"{value_by_metric[metric]:.4f}" for metric in METRICS)
            lines.append(f"| {model} | " + " | ".join(cells) + " |")
        seconds = ", ".join(f"{stage} {stage_s:g}" for stage, stage_s in run["seconds"].items())
        lines += ["", f"Duration of each stage in seconds: {seconds}.", ""]
    lines += [
        "## Time outside of the stages",
        "",
        "The table compares the wall time of `nightjar run` on the demo data with the sum of its stages. In the first row the",
        "command starts its own Prefect server. In the second row it uses Prefect and MLflow servers that already run.",
        "",
        "| seconds | wall time | stages | difference |",
        "|:---|---:|---:|---:|",
    ]
    for servers, seconds in results["orchestration"].items():
        lines.append(f"| {servers} | {seconds['wall']:g} | {seconds['stages']:g} | {seconds['difference']:g} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Execute the runs, and write nightly.json and nightly.md."""
    has_beauty = (ROOT / "data" / "beauty").is_dir()
    arguments_by_dataset = {
        name: arguments for name, arguments in ARGUMENTS_BY_DATASET.items() if name != "beauty" or has_beauty
    }
    versions = installed_versions()
    results = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{len(os.sched_getaffinity(0))} cores",
        "versions": {name: versions[name] for name in ("torch", "torchrec", "prefect", "mlflow") if name in versions},
        "runs": {name: execute_run(arguments) for name, arguments in arguments_by_dataset.items()},
        "orchestration": measure_orchestration(),
    }
    (ROOT / "benchmarks" / "nightly.json").write_text(json.dumps(results, indent=2) + "\n")
    (ROOT / "benchmarks" / "nightly.md").write_text(to_markdown(results))
    sys.stdout.write(to_markdown(results))


if __name__ == "__main__":
    main()
