"""Benchmark of the exact evaluation, compared with plain numpy, on an idle and on a busy machine.

    make bench-evaluate          # writes benchmarks/evaluate.json and evaluate.md
    python -m benchmarks.evaluate --rounds 1 --queries 3000

The data are 30,000 users, 41,000 items, vectors of 64 numbers, 217,000 test targets and five times as many seen items. The
contestant `ours` ranks the catalogue and computes every metric of the stage `evaluate`. The contestant `numpy` computes
Recall@20 from a matrix product and argpartition. Each run is a separate process, and the contestants alternate.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measuring import run_in_new_process
from recsys_core.data.jagged import JaggedArray
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import all_metrics
from recsys_core.evaluation.ranking import rank_catalogue
from recsys_core.preflight import installed_versions

QUERIES, ITEMS, DIM, TARGETS_PER_QUERY, SEEN_PER_TARGET, K = 30_000, 41_000, 64, 217 / 30, 5, 20
CHUNK = 1024
HERE = Path(__file__).parent
CONTESTANTS = ("numpy", "ours")


def random_data(num_queries: int) -> tuple[NDArray[np.float32], NDArray[np.float32], JaggedArray, JaggedArray]:
    """Return query vectors, item vectors, seen items and targets; no target is a seen item."""
    random = np.random.default_rng(0)
    query_BD = random.normal(size=(num_queries, DIM)).astype(np.float32)
    item_ID = random.normal(size=(ITEMS, DIM)).astype(np.float32)
    num_targets = round(num_queries * TARGETS_PER_QUERY)
    sizes = (num_targets, num_targets * SEEN_PER_TARGET)
    query_indices = [np.sort(random.integers(0, num_queries, size)) for size in sizes]
    targets, seen = (
        JaggedArray.from_pairs(query_L, random.integers(0, ITEMS, len(query_L)), num_lists=num_queries)
        for query_L in query_indices
    )
    targets, seen = targets.distinct(bound=ITEMS), seen.distinct(bound=ITEMS)
    return query_BD, item_ID, seen, targets.difference(seen, bound=ITEMS)


def evaluate_with_numpy(
    query_BD: NDArray[np.float32], item_ID: NDArray[np.float32], seen: JaggedArray, targets: JaggedArray
) -> float:
    """Return Recall@20, the mean over the queries with a target."""
    num_hits_B = np.zeros(len(query_BD))
    for start in range(0, len(query_BD), CHUNK):
        end = min(start + CHUNK, len(query_BD))
        score_BI = query_BD[start:end] @ item_ID.T
        chunk_seen = seen.slice(start, end)
        score_BI[chunk_seen.list_index_L, chunk_seen.values_L] = -np.inf
        top_BK = np.argpartition(score_BI, ITEMS - K, axis=1)[:, ITEMS - K :]
        key_BK = np.arange(end - start)[:, None] * ITEMS + top_BK
        chunk_targets = targets.slice(start, end)
        is_hit_T = np.isin(chunk_targets.pair_keys(bound=ITEMS), key_BK)
        num_hits_B[start:end] = np.bincount(chunk_targets.list_index_L, weights=is_hit_T, minlength=end - start)
    has_target_B = targets.lengths > 0
    return float((num_hits_B[has_target_B] / targets.lengths[has_target_B]).mean())


def evaluate_with_nightjar(
    query_BD: NDArray[np.float32], item_ID: NDArray[np.float32], seen: JaggedArray, targets: JaggedArray
) -> float:
    """Compute all metrics with the default cut-offs, and return Recall@20."""
    config = EvaluationConfig()
    ranking = rank_catalogue(
        torch.from_numpy(query_BD), item_ID=torch.from_numpy(item_ID), seen=seen, targets=targets, k=max(config.ks)
    )
    return all_metrics("test", ranking, config=config)[f"test/recall@{K}"]


def measure(contestant: str, *, num_queries: int) -> dict[str, float]:
    """Return the seconds, the CPU seconds of all cores, and Recall@20 of one run."""
    data = random_data(num_queries)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    recall = (evaluate_with_numpy if contestant == "numpy" else evaluate_with_nightjar)(*data)
    return {"seconds": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s, "recall": recall}


@contextmanager
def busy_cores(num_cores: int) -> Iterator[None]:
    """Keep this many cores busy while the body runs."""
    busy_processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_cores)]
    try:
        yield
    finally:
        for process in busy_processes:
            process.kill()
            process.wait()


def compare(*, rounds: int, num_queries: int, num_cores: int) -> list[dict[str, Any]]:
    """Return all runs of each contestant, with 0, 1 and `num_cores` other busy processes.

    Raises AssertionError if the contestants compute different recalls.
    """
    rows = []
    for num_busy in sorted({0, 1, num_cores}):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        with busy_cores(num_busy):
            for _ in range(rounds):
                for name in CONTESTANTS:
                    runs[name].append(run_in_new_process("benchmarks.evaluate", "--only", name, "--queries", str(num_queries)))
        recalls = [run["recall"] for contestant_runs in runs.values() for run in contestant_runs]
        assert max(recalls) - min(recalls) < 1e-6, f"the contestants disagree on Recall@{K}: {recalls}"
        rows.append({"others": num_busy, "runs": runs})
    return rows


def to_markdown(results: dict[str, Any]) -> str:
    """Return the report."""
    lines = [
        "# Exact evaluation",
        "",
        f"Measured on {results['date']} on {results['cores']} cores by `make bench-evaluate` with torch {results['torch']} "
        f"and numpy {results['numpy']}.",
        f"The data have {results['queries']:,} users, {ITEMS:,} items, vectors of {DIM} numbers and "
        f"{round(results['queries'] * TARGETS_PER_QUERY):,} targets (test items). Two programs are",
        f"compared. `nightjar` computes all metrics of the stage `evaluate`. `numpy` computes only Recall@{K}, with a matrix",
        "product and argpartition. Each run is a separate process, and the programs alternate. Number of",
        f"runs of each program: {results['rounds']}. The table has the median duration, with all durations in parentheses.",
        "The CPU time is the total over all cores.",
        "",
        "| other busy processes | numpy, s | nightjar, s | nightjar / numpy | CPU time of numpy, s | CPU time of nightjar, s |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in results["rows"]:
        seconds = {name: sorted(run["seconds"] for run in runs) for name, runs in row["runs"].items()}
        cpu_s = {name: median(run["cpu_s"] for run in runs) for name, runs in row["runs"].items()}
        cells = [f"{median(seconds[name]):.1f} ({', '.join(f'{s:.1f}' for s in seconds[name])})" for name in CONTESTANTS]
        ratio = median(seconds["ours"]) / median(seconds["numpy"])
        lines.append(
            f"| {row['others']} | {cells[0]} | {cells[1]} | {ratio:.2f} | {cpu_s['numpy']:.1f} | {cpu_s['ours']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write evaluate.json and evaluate.md; with --only print one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--only", choices=CONTESTANTS, help="run one contestant once and print its measurement")
    options = parser.parse_args(arguments)
    if options.only:
        sys.stdout.write(json.dumps(measure(options.only, num_queries=options.queries)) + "\n")
        return
    num_cores, versions = len(os.sched_getaffinity(0)), installed_versions()
    results = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cores": num_cores,
        "torch": versions["torch"],
        "numpy": np.__version__,
        "rounds": options.rounds,
        "queries": options.queries,
        "rows": compare(rounds=options.rounds, num_queries=options.queries, num_cores=num_cores),
    }
    (HERE / "evaluate.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "evaluate.md").write_text(to_markdown(results))


if __name__ == "__main__":
    main()
