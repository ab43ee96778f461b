"""Whole nights on the demo's data and on Amazon Beauty: metrics beside baselines, and seconds per stage.

    make bench-nightly          # writes benchmarks/nightly.json and benchmarks/nightly.md

Beauty is left out where ../shared/data/beauty is absent.
"""

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recsys_core.preflight import installed_versions

ROOT = Path(__file__).resolve().parents[1]
NIGHTJAR = [sys.executable, "-m", "flows.cli"]
NIGHTS = {
    "demo": ["demo", "--workspace", "{workspace}"],
    "beauty": ["run", "examples/beauty.yaml", "--set", "workspace={workspace}"],
}
METRICS = ("recall@20", "hit_rate@10", "ndcg@10", "mrr", "auc")
CONTENDERS = {"model": "test", "popularity": "baseline/popularity", "zero_shot": "baseline/zero_shot"}


def run_night(arguments: list[str]) -> dict[str, Any]:
    """One night in a workspace of its own; its --json answer without anything that names a path."""
    with tempfile.TemporaryDirectory() as workspace:
        command = [*NIGHTJAR, *(part.format(workspace=workspace) for part in arguments), "--json"]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return {
        "metrics": {
            **{name: {m: answer["metrics"].get(f"{p}/{m}") for m in METRICS} for name, p in CONTENDERS.items()},
            "served": {m: answer["metrics"].get(f"served/{m}") for m in METRICS},
        },
        "seconds": {stage: round(facts["seconds"], 1) for stage, facts in answer["stages"].items()},
    }


def to_markdown(results: dict[str, Any]) -> str:
    """One table per night."""
    lines = [f"Made on {results['date']} on {results['machine']} by `make bench-nightly`; one run each.", ""]
    for name, night in results["nights"].items():
        lines += [f"## {name}", "", "| | " + " | ".join(METRICS) + " |", "|:---|" + "---:|" * len(METRICS)]
        for contender, values in night["metrics"].items():
            shown = ("-" if values[m] is None else f"{values[m]:.4f}" for m in METRICS)
            lines.append(f"| {contender} | " + " | ".join(shown) + " |")
        seconds = ", ".join(f"{stage} {value:g}" for stage, value in night["seconds"].items())
        lines += ["", f"Seconds: {seconds}.", ""]
    lines.append("`served` is the INT8 tower and the index, asked in a fresh process for a sample of 2,000 test users.")
    return "\n".join(lines) + "\n"


def main() -> None:
    nights = {
        name: arguments for name, arguments in NIGHTS.items() if name != "beauty" or (ROOT / "../shared/data/beauty").is_dir()
    }
    versions = installed_versions()
    results = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{len(os.sched_getaffinity(0))} cores",
        "versions": {name: versions[name] for name in ("torch", "torchrec", "prefect", "mlflow") if name in versions},
        "nights": {name: run_night(arguments) for name, arguments in nights.items()},
    }
    (ROOT / "benchmarks" / "nightly.json").write_text(json.dumps(results, indent=2) + "\n")
    (ROOT / "benchmarks" / "nightly.md").write_text(to_markdown(results))
    sys.stdout.write(to_markdown(results))


if __name__ == "__main__":
    main()
