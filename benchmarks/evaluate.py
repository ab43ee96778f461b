"""Benchmark of the exact evaluation, compared with plain numpy, on an idle and on a busy machine.

    make bench-evaluate          # writes benchmarks/evaluate.json and evaluate.md
    python -m benchmarks.evaluate --rounds 1 --queries 3000

The data are 30,000 users, 41,000 items, vectors of 64 numbers, 217,000 test targets and 1,085,000 seen items. The
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
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.estimates import full_ranking_metrics
from recsys_core.evaluation.ranking import Queries, rank_catalogue
from recsys_core.preflight import installed_versions

NUM_QUERIES, NUM_ITEMS, DIM, TARGETS_PER_QUERY, SEEN_PER_TARGET, K = 30_000, 41_000, 64, 217 / 30, 5, 20
QUERIES_PER_CHUNK = 1024
FOLDER = Path(__file__).parent
CONTESTANTS = ("numpy", "ours")


def random_data(num_queries: int) -> tuple[NDArray[np.float32], NDArray[np.float32], JaggedArray, JaggedArray]:
    """Return query vectors, item vectors, seen items and targets; no target is a seen item."""
    rng = np.random.default_rng(0)
    query_BD = rng.normal(size=(num_queries, DIM)).astype(np.float32)
    item_vector_ID = rng.normal(size=(NUM_ITEMS, DIM)).astype(np.float32)
    num_targets = round(num_queries * TARGETS_PER_QUERY)
    pair_counts = (num_targets, num_targets * SEEN_PER_TARGET)
    query_indices = [np.sort(rng.integers(0, num_queries, num_pairs)) for num_pairs in pair_counts]
    targets, seen = (
        JaggedArray.from_pairs(query_L, rng.integers(0, NUM_ITEMS, len(query_L)), num_lists=num_queries)
        for query_L in query_indices
    )
    targets, seen = targets.distinct(bound=NUM_ITEMS), seen.distinct(bound=NUM_ITEMS)
    return query_BD, item_vector_ID, seen, targets.difference(seen, bound=NUM_ITEMS)


def evaluate_with_numpy(
    query_BD: NDArray[np.float32], item_vector_ID: NDArray[np.float32], seen: JaggedArray, targets: JaggedArray
) -> float:
    """Return Recall@20, the mean over the queries with a target."""
    num_hits_B = np.zeros(len(query_BD))
    for start in range(0, len(query_BD), QUERIES_PER_CHUNK):
        end = min(start + QUERIES_PER_CHUNK, len(query_BD))
        score_BI = query_BD[start:end] @ item_vector_ID.T
        chunk_seen = seen.slice(start, end)
        score_BI[chunk_seen.list_index_L, chunk_seen.values_L] = -np.inf
        top_BK = np.argpartition(score_BI, NUM_ITEMS - K, axis=1)[:, NUM_ITEMS - K :]
        top_pair_key_BK = np.arange(end - start)[:, None] * NUM_ITEMS + top_BK
        chunk_targets = targets.slice(start, end)
        is_hit_T = np.isin(chunk_targets.pair_keys(bound=NUM_ITEMS), top_pair_key_BK)
        num_hits_B[start:end] = np.bincount(chunk_targets.list_index_L, weights=is_hit_T, minlength=end - start)
    has_target_B = targets.lengths > 0
    return float((num_hits_B[has_target_B] / targets.lengths[has_target_B]).mean())


def evaluate_with_nightjar(
    query_BD: NDArray[np.float32], item_vector_ID: NDArray[np.float32], seen: JaggedArray, targets: JaggedArray
) -> float:
    """Compute all metrics with the default cut-offs, and return Recall@20."""
    config = EvaluationConfig()
    queries = Queries(torch.from_numpy(query_BD), is_known_B=np.ones(len(query_BD), np.bool_), seen=seen, targets=targets)
    ranking = rank_catalogue(queries, item_vector_ID=torch.from_numpy(item_vector_ID), k=max(config.ks))
    return full_ranking_metrics(ranking, config=config)[f"recall@{K}"].value


def measure(contestant: str, *, num_queries: int) -> dict[str, float]:
    """Return the seconds, the CPU seconds of all cores, and Recall@20 of one run."""
    data = random_data(num_queries)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    recall = (evaluate_with_numpy if contestant == "numpy" else evaluate_with_nightjar)(*data)
    return {"seconds": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s, "recall": recall}


@contextmanager
def busy_cores(num_cores: int) -> Iterator[None]:
    """Keep `num_cores` cores busy while the body runs."""
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
    comparisons = []
    for num_busy_processes in sorted({0, 1, num_cores}):
        runs_by_contestant: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        with busy_cores(num_busy_processes):
            for _ in range(rounds):
                for name in CONTESTANTS:
                    runs_by_contestant[name].append(
                        run_in_new_process("benchmarks.evaluate", "--only", name, "--queries", str(num_queries))
                    )
        recalls = [run["recall"] for contestant_runs in runs_by_contestant.values() for run in contestant_runs]
        assert max(recalls) - min(recalls) < 1e-6, f"the contestants disagree on Recall@{K}: {recalls}"
        comparisons.append({"others": num_busy_processes, "runs": runs_by_contestant})
    return comparisons


def to_markdown(results: dict[str, Any]) -> str:
    """Return the report."""
    lines = [
        "# Exact evaluation",
        "",
        f"Measured on {results['date']} on {results['cores']} cores by `make bench-evaluate` with torch {results['torch']} "
        f"and numpy {results['numpy']}.",
        f"The data have {results['queries']:,} users, {NUM_ITEMS:,} items, vectors of {DIM} numbers and "
        f"{round(results['queries'] * TARGETS_PER_QUERY):,} targets (test items). Two programs are",
        f"compared. `nightjar` computes all metrics of the stage `evaluate`. `numpy` computes only Recall@{K}, with a matrix",
        "product and argpartition. Each run is a separate process, and the programs alternate. Number of",
        f"runs of each program: {results['rounds']}. The table has the median duration, with all durations in parentheses.",
        "The CPU time is the total over all cores.",
        "",
        "| other busy processes | numpy, s | nightjar, s | nightjar / numpy | CPU time of numpy, s | CPU time of nightjar, s |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for comparison in results["rows"]:
        seconds_by_name = {name: sorted(run["seconds"] for run in runs) for name, runs in comparison["runs"].items()}
        cpu_s_by_name = {name: median(run["cpu_s"] for run in runs) for name, runs in comparison["runs"].items()}
        cells = [
            f"{median(seconds_by_name[name]):.1f} ({', '.join(f'{run_s:.1f}' for run_s in seconds_by_name[name])})"
            for name in CONTESTANTS
        ]
        ratio = median(seconds_by_name["ours"]) / median(seconds_by_name["numpy"])
        lines.append(
            f"| {comparison['others']} | {cells[0]} | {cells[1]} | {ratio:.2f} "
            f"| {cpu_s_by_name['numpy']:.1f} | {cpu_s_by_name['ours']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write evaluate.json and evaluate.md; with --only print one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queries", type=int, default=NUM_QUERIES)
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
    (FOLDER / "evaluate.json").write_text(json.dumps(results, indent=1) + "\n")
    (FOLDER / "evaluate.md").write_text(to_markdown(results))


if __name__ == "__main__":
    main()
