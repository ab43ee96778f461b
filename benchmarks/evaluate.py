"""Exact evaluation compared with plain numpy, quiet and under load; writes benchmarks/evaluate.json and evaluate.md.

    make bench-evaluate
    python -m benchmarks.evaluate --rounds 1 --queries 3000

30,000 users, 41,000 items, 64 numbers per vector, 217,000 test targets, five times as many seen items. `ours` ranks the
catalogue and computes every metric of the stage `evaluate`; `numpy` computes Recall@20 from a matrix product and argpartition.
Each run is a process of its own, and the two take turns.
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

from benchmarks.measuring import in_fresh_process
from recsys_core.data.jagged import JaggedArray
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import all_metrics
from recsys_core.evaluation.ranking import rank_catalogue
from recsys_core.preflight import installed_versions

QUERIES, ITEMS, DIM, TARGETS_PER_QUERY, SEEN_PER_TARGET, K = 30_000, 41_000, 64, 217 / 30, 5, 20
CHUNK = 1024
HERE = Path(__file__).parent
CONTESTANTS = ("numpy", "ours")


def draw(queries: int) -> tuple[NDArray[np.float32], NDArray[np.float32], JaggedArray, JaggedArray]:
    """Query vectors, item vectors, seen items and targets; no target is seen."""
    random = np.random.default_rng(0)
    query_BD = random.normal(size=(queries, DIM)).astype(np.float32)
    item_ID = random.normal(size=(ITEMS, DIM)).astype(np.float32)
    count = round(queries * TARGETS_PER_QUERY)
    pairs = [np.sort(random.integers(0, queries, size)) for size in (count, count * SEEN_PER_TARGET)]
    targets, seen = (JaggedArray.from_pairs(owner, random.integers(0, ITEMS, len(owner)), num_lists=queries) for owner in pairs)
    targets, seen = targets.distinct(bound=ITEMS), seen.distinct(bound=ITEMS)
    return query_BD, item_ID, seen, targets.difference(seen, bound=ITEMS)


def evaluate_with_numpy(
    query_BD: NDArray[np.float32], item_ID: NDArray[np.float32], seen: JaggedArray, targets: JaggedArray
) -> float:
    """Recall@20, mean over the queries with a target."""
    hits_E = np.zeros(len(query_BD))
    for start in range(0, len(query_BD), CHUNK):
        end = min(start + CHUNK, len(query_BD))
        score_CI = query_BD[start:end] @ item_ID.T
        part = seen.slice(start, end)
        score_CI[part.list_index_L, part.values_L] = -np.inf
        top_CK = np.argpartition(score_CI, ITEMS - K, axis=1)[:, ITEMS - K :]
        key_CK = np.arange(end - start)[:, None] * ITEMS + top_CK
        part = targets.slice(start, end)
        is_hit_T = np.isin(part.pair_keys(bound=ITEMS), key_CK)
        hits_E[start:end] = np.bincount(part.list_index_L, weights=is_hit_T, minlength=end - start)
    has_target_E = targets.lengths > 0
    return float((hits_E[has_target_E] / targets.lengths[has_target_E]).mean())


def evaluate_with_ours(
    query_BD: NDArray[np.float32], item_ID: NDArray[np.float32], seen: JaggedArray, targets: JaggedArray
) -> float:
    """The same, from all metrics with the default cut-offs."""
    config = EvaluationConfig()
    ranking = rank_catalogue(
        torch.from_numpy(query_BD), item_ID=torch.from_numpy(item_ID), seen=seen, targets=targets, k=max(config.ks)
    )
    return all_metrics("test", ranking, config=config)[f"test/recall@{K}"]


def measure(contestant: str, *, queries: int) -> dict[str, float]:
    """Seconds, seconds of all cores, and the recall, which both contestants must agree on."""
    drawn = draw(queries)
    started, started_cpu = time.perf_counter(), time.process_time()
    recall = (evaluate_with_numpy if contestant == "numpy" else evaluate_with_ours)(*drawn)
    return {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - started_cpu, "recall": recall}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep as many cores busy while the body runs."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def compare(*, rounds: int, queries: int, cores: int) -> list[dict[str, Any]]:
    """One row per load: all runs of each contestant."""
    rows = []
    for others in sorted({0, 1, cores}):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        with busy(others):
            for _ in range(rounds):
                for name in CONTESTANTS:
                    runs[name].append(in_fresh_process("benchmarks.evaluate", "--only", name, "--queries", str(queries)))
        recalls = [run["recall"] for of_one in runs.values() for run in of_one]
        assert max(recalls) - min(recalls) < 1e-6, f"the contestants disagree on Recall@{K}: {recalls}"
        rows.append({"others": others, "runs": runs})
    return rows


def to_markdown(results: dict[str, Any]) -> str:
    """The rows as a table."""
    lines = [
        "# Exact evaluation",
        "",
        f"Made on {results['date']} on {results['cores']} cores by `make bench-evaluate`: torch {results['torch']}, "
        f"numpy {results['numpy']}. {results['queries']:,} users, {ITEMS:,} items, vectors of {DIM}, "
        f"{round(results['queries'] * TARGETS_PER_QUERY):,} test targets. `ours` computes every metric of the stage "
        f"`evaluate`, `numpy` Recall@{K} from a matrix product and argpartition. Medians of {results['rounds']} runs in turns, "
        "each in a fresh process; in parentheses all runs. CPU: seconds of all cores together.",
        "",
        "| other busy processes | numpy, s | ours, s | ours to numpy | numpy, CPU s | ours, CPU s |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in results["rows"]:
        seconds = {name: sorted(run["seconds"] for run in runs) for name, runs in row["runs"].items()}
        cpu = {name: median(run["cpu_s"] for run in runs) for name, runs in row["runs"].items()}
        cells = [f"{median(seconds[name]):.1f} ({', '.join(f'{s:.1f}' for s in seconds[name])})" for name in CONTESTANTS]
        ratio = median(seconds["ours"]) / median(seconds["numpy"])
        lines.append(f"| {row['others']} | {cells[0]} | {cells[1]} | {ratio:.2f} | {cpu['numpy']:.1f} | {cpu['ours']:.1f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--only", choices=CONTESTANTS, help="run one contestant once and print its figures")
    options = parser.parse_args(arguments)
    if options.only:
        sys.stdout.write(json.dumps(measure(options.only, queries=options.queries)) + "\n")
        return
    cores, versions = len(os.sched_getaffinity(0)), installed_versions()
    results = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cores": cores,
        "torch": versions["torch"],
        "numpy": np.__version__,
        "rounds": options.rounds,
        "queries": options.queries,
        "rows": compare(rounds=options.rounds, queries=options.queries, cores=cores),
    }
    (HERE / "evaluate.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "evaluate.md").write_text(to_markdown(results))


if __name__ == "__main__":
    main()
