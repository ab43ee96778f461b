"""Quality on public data: transfer strategies, cold items, little data, collaborative filtering; mean and spread over seeds.

    make bench-quality                                # all of it; writes benchmarks/quality/results.json and report.md
    python -m benchmarks.quality beauty --missing     # one part, and of it what results.json has not

Every choice (epoch, settings) is made on validation data; test data is looked at once, for the table.
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

from benchmarks.quality import beauty, citeulike, speed
from benchmarks.quality.experiment import Experiment, run
from benchmarks.quality.report import write_report
from recsys_core.preflight import installed_versions

HERE = Path(__file__).parent
DATA = HERE.parents[2] / "shared" / "data"
PARTS = ("beauty", "limited", "cold", "warm", "collaborative", "speed")
CORES = sorted(os.sched_getaffinity(0))


def all_experiments(folder: Path, *, seeds: range) -> list[Experiment]:
    """What the data that are there allow."""
    found: list[Experiment] = []
    if (DATA / "beauty").is_dir():
        found += beauty.experiments(DATA / "beauty", folder=folder, seeds=seeds)
    if (DATA / "citeulike_t").is_dir():
        found += citeulike.experiments(DATA / "citeulike_t", folder=folder, seeds=seeds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--missing", action="store_true", help="only what results.json has not")
    parser.add_argument("--variant", help="only variants with this in their name")
    arguments = parser.parse_args()
    file = HERE / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"runs": {}}
    with tempfile.TemporaryDirectory() as name:
        wanted = [
            one
            for one in all_experiments(Path(name), seeds=range(arguments.seeds))
            if one.part in arguments.parts and (arguments.variant or "") in one.variant
        ]
        if arguments.missing:
            wanted = [one for one in wanted if one.key not in results["runs"]]
        cores = multiprocessing.Manager().Queue()
        for core in CORES:
            cores.put(core)
        with ProcessPoolExecutor(len(CORES), mp_context=multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(run, one, folder=Path(name), cores=cores): one for one in wanted}
            for number, done in enumerate(as_completed(running), 1):
                one = running[done]
                results["runs"][one.key] = done.result()
                results["runs"] = dict(sorted(results["runs"].items()))
                file.write_text(json.dumps(results, indent=1) + "\n")
                sys.stdout.write(f"{number} of {len(wanted)}: {one.key}: {_headline(results['runs'][one.key])}\n")
                sys.stdout.flush()
        if "speed" in arguments.parts:
            results["runs"] |= speed.measure(Path(name))
    versions = installed_versions()
    results |= {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{len(CORES)} cores",
        "versions": {name: versions[name] for name in ("torch", "torchrec") if name in versions},
    }
    file.write_text(json.dumps(results, indent=1) + "\n")
    write_report(results, folder=HERE)


def _headline(result: dict[str, Any]) -> str:
    shown = {name: value for name, value in result["metrics"].items() if name.startswith("test/") and "slice" not in name}
    names = ("test/hit_rate@10", "test/ndcg@10", "test/recall@20", "test/cold/recall@20")
    best = f"epoch {result['best_epoch']} of {len(result['validation'])}"
    return best + ", " + ", ".join(f"{name} {shown[name]:.4f}" for name in names if name in shown)


if __name__ == "__main__":
    main()
