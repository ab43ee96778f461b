"""Benchmark of the exact evaluation, compared with plain numpy and with FAISS, on an idle and on a busy machine.

    make bench-evaluate          # writes benchmarks/evaluate.json and evaluate.md
    python -m benchmarks.evaluate --rounds 1 --queries 3000

Case `all_metrics`: 30,000 users, 41,000 items, 217,000 test targets and 1,085,000 seen items. The contestant `nightjar` ranks
the catalogue and computes every metric of the stage `evaluate`. The contestant `numpy` computes Recall@20 from a matrix product
and argpartition.

Case `recall@100`: 100,000 users and items, 5 targets and 20 seen items per user. The contestant `nightjar` computes Recall@100.
The contestant `faiss` only searches the 100 nearest items with IndexFlatIP, without excluding seen items.

Vectors have 64 numbers. Each run is a separate process, and the contestants alternate.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measuring import measure_work, run_in_new_process
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.estimates import Columns, RankingMetrics
from recsys_core.evaluation.ranking.catalogue import rank_catalogue
from recsys_core.evaluation.ranking.queries import Queries
from recsys_core.preflight import installed_versions

DIM = 64
QUERIES_PER_CHUNK = 1024
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """Size of the data, cut-off of the recall, and the contestant that nightjar is compared with."""

    num_queries: int
    num_items: int
    targets_per_query: float
    seen_per_target: int
    k: int
    reference: str


CASES = {
    "all_metrics": Case(30_000, 41_000, 217 / 30, 5, 20, reference="numpy"),
    "recall@100": Case(100_000, 100_000, 5, 4, 100, reference="faiss"),
}


def random_data(case: Case) -> tuple[NDArray[np.float32], NDArray[np.float32], JaggedArray, JaggedArray]:
    """Return query vectors, item vectors, seen items and targets; no target is a seen item."""
    rng = np.random.default_rng(0)
    num_queries, num_items = case.num_queries, case.num_items
    query_BD = rng.normal(size=(num_queries, DIM)).astype(np.float32)
    item_vector_ID = rng.normal(size=(num_items, DIM)).astype(np.float32)
    num_targets = round(num_queries * case.targets_per_query)
    pair_counts = (num_targets, num_targets * case.seen_per_target)
    query_indices = [np.sort(rng.integers(0, num_queries, num_pairs)) for num_pairs in pair_counts]
    targets, seen = (
        JaggedArray.from_pairs(query_L, rng.integers(0, num_items, len(query_L)), num_lists=num_queries)
        for query_L in query_indices
    )
    targets, seen = targets.distinct(bound=num_items), seen.distinct(bound=num_items)
    return query_BD, item_vector_ID, seen, targets.difference(seen, bound=num_items)


def evaluate_with_numpy(
    case: Case, query_BD: NDArray[np.float32], item_vector_ID: NDArray[np.float32], seen: JaggedArray, targets: JaggedArray
) -> float:
    """Return the recall, the mean over the queries with a target."""
    num_items, k = case.num_items, case.k
    num_hits_B = np.zeros(len(query_BD))
    for start in range(0, len(query_BD), QUERIES_PER_CHUNK):
        end = min(start + QUERIES_PER_CHUNK, len(query_BD))
        score_BI = query_BD[start:end] @ item_vector_ID.T
        chunk_seen = seen.slice(start, end)
        score_BI[chunk_seen.list_index_L, chunk_seen.values_L] = -np.inf
        top_BK = np.argpartition(score_BI, num_items - k, axis=1)[:, num_items - k :]
        top_pair_key_BK = np.arange(end - start)[:, None] * num_items + top_BK
        chunk_targets = targets.slice(start, end)
        is_hit_T = np.isin(chunk_targets.pair_keys(bound=num_items), top_pair_key_BK)
        num_hits_B[start:end] = np.bincount(chunk_targets.list_index_L, weights=is_hit_T, minlength=end - start)
    has_target_B = targets.lengths > 0
    return float((num_hits_B[has_target_B] / targets.lengths[has_target_B]).mean())


def search_with_faiss(
    case: Case, query_BD: NDArray[np.float32], item_vector_ID: NDArray[np.float32], seen: JaggedArray, targets: JaggedArray
) -> None:
    """Search the k nearest items of each query."""
    index = faiss.IndexFlatIP(DIM)
    index.add(item_vector_ID)
    index.search(query_BD, case.k)


def evaluate_with_nightjar(
    case: Case, query_BD: NDArray[np.float32], item_vector_ID: NDArray[np.float32], seen: JaggedArray, targets: JaggedArray
) -> float:
    """Compute the metrics and return the recall: only this metric if FAISS is the reference, otherwise all metrics."""
    config = EvaluationConfig()
    if case.reference == "faiss":
        config = EvaluationConfig(ks=(case.k,), metrics=("recall",))
    queries = Queries(torch.from_numpy(query_BD), is_known_B=np.ones(len(query_BD), np.bool_), seen=seen, targets=targets)
    top_only = "auc" not in config.metrics
    ranking = rank_catalogue(queries, item_vector_ID=torch.from_numpy(item_vector_ID), k=max(config.ks), top_only=top_only)
    with tempfile.TemporaryDirectory() as folder:
        ranking_metrics = RankingMetrics(Columns(Path(folder)), "test", config=config)
        ranking_metrics.add(ranking, ranking.target_positions())
        return ranking_metrics.estimates()[f"recall@{case.k}"].value


CONTESTANTS: dict[str, Callable[..., float | None]] = {
    "nightjar": evaluate_with_nightjar,
    "numpy": evaluate_with_numpy,
    "faiss": search_with_faiss,
}


def measure(case: Case, contestant: str) -> dict[str, float | None]:
    """Return the duration, the CPU time of all cores, the memory in addition to the data, and the recall of one run."""
    data = random_data(case)
    start_cpu_s, recalls = time.process_time(), []
    measurement = measure_work(lambda: recalls.append(CONTESTANTS[contestant](case, *data)))
    return {
        "seconds": measurement["seconds"],
        "cpu_s": time.process_time() - start_cpu_s,
        "extra_bytes": measurement["peak_anon_bytes"] - measurement["start_anon_bytes"],
        "recall": recalls[0],
    }


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


def compare(name: str, *, rounds: int, num_queries: int, num_cores: int) -> list[dict[str, Any]]:
    """Return all runs of nightjar and of the reference of a case, with 0, 1 and `num_cores` other busy processes.

    Raises AssertionError if the contestants compute different recalls.
    """
    comparisons = []
    for num_busy_processes in sorted({0, 1, num_cores}):
        runs_by_contestant: dict[str, list[dict[str, Any]]] = {"nightjar": [], CASES[name].reference: []}
        with busy_cores(num_busy_processes):
            for _ in range(rounds):
                for contestant, runs in runs_by_contestant.items():
                    arguments = ("--case", name, "--only", contestant, "--queries", str(num_queries))
                    runs.append(run_in_new_process("benchmarks.evaluate", *arguments))
        recalls = [run["recall"] for runs in runs_by_contestant.values() for run in runs if run["recall"] is not None]
        assert max(recalls) - min(recalls) < 1e-6, f"the contestants disagree on the recall: {recalls}"
        comparisons.append({"others": num_busy_processes, "runs": runs_by_contestant})
    return comparisons


def to_markdown(results: dict[str, Any]) -> str:
    """Return the report."""
    lines = [
        "# Exact evaluation",
        "",
        f"Measured on {results['date']} on {results['cores']} cores by `make bench-evaluate` with torch {results['torch']},",
        f"numpy {results['numpy']} and faiss {results['faiss']}. Vectors have {DIM} numbers. Each run is a separate process,",
        f"and the programs alternate. Number of runs of each program: {results['rounds']}. The tables have the median",
        "duration, with all durations in parentheses. The CPU time is the total over all cores. The memory is the peak in",
        "addition to the vectors, targets and seen items.",
    ]
    if results["load"] > 1:
        lines += [
            "",
            f"Other programs were running on the machine: the load average at the start was {results['load']:.1f}. Only the "
            "ratios are comparable.",
        ]
    for name, comparisons in results["cases"].items():
        case, num_queries = CASES[name], results["queries"][name]
        reference = case.reference
        task = {
            "numpy": f"`nightjar` computes all metrics of the stage `evaluate`. `numpy` computes only Recall@{case.k}, with a "
            "matrix product and\nargpartition.",
            "faiss": f"`nightjar` computes Recall@{case.k} without the items that a user has seen. `faiss` only searches "
            f"the {case.k} nearest items with\nIndexFlatIP.",
        }[reference]
        lines += [
            "",
            f"## {num_queries:,} users, {case.num_items:,} items",
            "",
            task,
            "",
            f"| other busy processes | {reference}, s | nightjar, s | nightjar / {reference} | CPU time of {reference}, s "
            f"| CPU time of nightjar, s | memory of {reference}, MB | memory of nightjar, MB |",
            "|" + "---:|" * 8,
        ]
        lines += [_table_line(comparison, reference=reference) for comparison in comparisons]
    return "\n".join(lines) + "\n"


def _table_line(comparison: dict[str, Any], *, reference: str) -> str:
    """Return the line of a table for one number of other busy processes."""
    cells, medians = [str(comparison["others"])], {}
    for contestant in (reference, "nightjar"):
        seconds = sorted(run["seconds"] for run in comparison["runs"][contestant])
        medians[contestant] = median(seconds)
        cells.append(f"{median(seconds):.1f} ({', '.join(f'{run_s:.1f}' for run_s in seconds)})")
    cells.append(f"{medians['nightjar'] / medians[reference]:.2f}")
    for key, unit in (("cpu_s", 1), ("extra_bytes", 1e6)):
        for contestant in (reference, "nightjar"):
            cells.append(f"{median(run[key] for run in comparison['runs'][contestant]) / unit:,.{1 if unit == 1 else 0}f}")
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write evaluate.json and evaluate.md; with --only print one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queries", type=int, help="number of users; default: the number of each case")
    parser.add_argument("--case", choices=CASES, help="measure only one case")
    parser.add_argument("--only", choices=CONTESTANTS, help="run one contestant of --case once and print its measurement")
    options = parser.parse_args(arguments)
    cases = {
        name: case if options.queries is None else replace(case, num_queries=options.queries)
        for name, case in CASES.items()
        if options.case in (None, name)
    }
    if options.only:
        sys.stdout.write(json.dumps(measure(cases[options.case], options.only)) + "\n")
        return
    num_cores, versions, load = len(os.sched_getaffinity(0)), installed_versions(), os.getloadavg()[0]
    results = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cores": num_cores,
        "torch": versions["torch"],
        "numpy": np.__version__,
        "faiss": faiss.__version__,
        "load": load,
        "rounds": options.rounds,
        "queries": {name: case.num_queries for name, case in cases.items()},
        "cases": {
            name: compare(name, rounds=options.rounds, num_queries=case.num_queries, num_cores=num_cores)
            for name, case in cases.items()
        },
    }
    (FOLDER / "evaluate.json").write_text(json.dumps(results, indent=1) + "\n")
    (FOLDER / "evaluate.md").write_text(to_markdown(results))


if __name__ == "__main__":
    main()
