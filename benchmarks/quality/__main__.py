"""Benchmark of recommendation quality on public data: pretrained vectors, cold items, small logs and models of ids only.

    make bench-quality                                # all parts; writes benchmarks/quality/results.json and report.md
    python -m benchmarks.quality beauty --missing     # the experiments of one part without a result

The report has means and standard deviations over seeds. Epochs and settings are chosen on validation data. Test data is used
only for the tables.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.quality import beauty, citeulike, ml1m, speed
from benchmarks.quality.experiment import Experiment, run
from benchmarks.quality.report import write_report
from recsys_core.preflight import installed_versions

FOLDER = Path(__file__).parent
DATA_FOLDER = FOLDER.parents[2] / "shared" / "data"
PARTS = ("beauty", "all_events", "sequence", "limited", "cold", "warm", "collaborative", "ml1m", "speed")
CORES = sorted(os.sched_getaffinity(0))


def all_experiments(folder: Path, *, seeds: range) -> list[Experiment]:
    """Return the experiments of all datasets that exist in DATA_FOLDER."""
    experiments: list[Experiment] = []
    if (DATA_FOLDER / "beauty").is_dir():
        experiments += beauty.experiments(DATA_FOLDER / "beauty", folder=folder, seeds=seeds)
    if (DATA_FOLDER / "citeulike_t").is_dir():
        experiments += citeulike.experiments(DATA_FOLDER / "citeulike_t", folder=folder, seeds=seeds)
    if (DATA_FOLDER / "ml1m").is_dir():
        experiments += ml1m.experiments(DATA_FOLDER / "ml1m", seeds=seeds)
    return experiments


def main() -> None:
    """Run the selected experiments, and write results.json after each one and the report at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"parts to run: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--missing", action="store_true", help="only experiments without a result in results.json")
    parser.add_argument("--variant", help="only variants whose name contains this text")
    arguments = parser.parse_args()
    results_path = FOLDER / "results.json"
    results: dict[str, Any] = json.loads(results_path.read_text()) if results_path.is_file() else {"runs": {}}
    with tempfile.TemporaryDirectory() as folder_name:
        selected_experiments = [
            experiment
            for experiment in all_experiments(Path(folder_name), seeds=range(arguments.seeds))
            if experiment.part in arguments.parts and (arguments.variant or "") in experiment.variant
        ]
        if arguments.missing:
            selected_experiments = [experiment for experiment in selected_experiments if experiment.key not in results["runs"]]
        free_cores = multiprocessing.Manager().Queue()
        for core in CORES:
            free_cores.put(core)
        with ProcessPoolExecutor(len(CORES), mp_context=multiprocessing.get_context("spawn")) as pool:
            experiment_by_future = {
                pool.submit(run, experiment, folder=Path(folder_name), free_cores=free_cores): experiment
                for experiment in selected_experiments
            }
            for num_finished, future in enumerate(as_completed(experiment_by_future), 1):
                experiment_key = experiment_by_future[future].key
                results["runs"][experiment_key] = future.result()
                results["runs"] = dict(sorted(results["runs"].items()))
                results_path.write_text(json.dumps(results, indent=1) + "\n")
                headline = _headline(results["runs"][experiment_key])
                sys.stdout.write(f"{num_finished} of {len(selected_experiments)}: {experiment_key}: {headline}\n")
                sys.stdout.flush()
        if "speed" in arguments.parts:
            results["runs"] |= speed.measure(Path(folder_name))
    versions = installed_versions()
    results |= {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{len(CORES)} cores",
        "versions": {name: versions[name] for name in ("torch", "torchrec") if name in versions},
    }
    results_path.write_text(json.dumps(results, indent=1) + "\n")
    write_report(results, folder=FOLDER)


def _headline(result: dict[str, Any]) -> str:
    metrics = {name: value for name, value in result["metrics"].items() if name.startswith("test/") and "slice" not in name}
    printed_metrics = ("test/hit_rate@10", "test/ndcg@10", "test/recall@20", "test/cold/recall@20")
    epoch_text = f"epoch {result['best_epoch']} of {len(result['validation'])}"
    return epoch_text + ", " + ", ".join(f"{name} {metrics[name]:.4f}" for name in printed_metrics if name in metrics)


if __name__ == "__main__":
    main()
