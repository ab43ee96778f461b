"""Benchmark of the exact ranking on several ranks: duration and memory per rank, with 1, 2 and 4 ranks of one machine.

    make bench-ranks             # writes benchmarks/ranks.json and ranks.md
    python -m benchmarks.ranks --queries 20000 --items 50000

Each rank creates its share of the query vectors and item vectors, with 20 seen items and 5 targets per query. It ranks all
items for its queries while the ranks pass the item vectors on to each other. The contestant `one process` ranks all queries in
one process, without ranks. All contestants use all cores, and must compute the same top lists and positions. The memory of a
rank includes its vectors, but not the libraries.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed as dist

from benchmarks.measuring import ROOT, measure_work
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation.ranking.catalogue import rank_catalogue
from recsys_core.evaluation.ranking.queries import Queries, Ranking
from recsys_core.launching.rank import Process
from recsys_core.preflight import installed_versions
from recsys_core.training.export.item_columns import EncodedRows, rows_of_rank
from recsys_core.training.export.ranking import PartOfRanking, rank_collectively

DIM, K, NUM_SEEN, NUM_TARGETS = 64, 100, 20, 5
ROWS_PER_SEED = 1_000
WORLD_SIZES = (1, 2, 4)
FOLDER = Path(__file__).parent


def random_rows(rows: slice, *, columns: int, kind: int, bound: int | None = None) -> NDArray[Any]:
    """Return rows of a random array that does not depend on the number of ranks.

    kind: seed that makes arrays differ. bound: the values are integers below `bound`; None: normally distributed float32.
    """
    blocks = []
    for seed in range(rows.start // ROWS_PER_SEED, -(-rows.stop // ROWS_PER_SEED)):
        rng, shape = np.random.default_rng((kind, seed)), (ROWS_PER_SEED, columns)
        blocks.append(rng.standard_normal(shape, np.float32) if bound is None else rng.integers(0, bound, shape))
    first_row = rows.start // ROWS_PER_SEED * ROWS_PER_SEED
    return np.concatenate(blocks)[rows.start - first_row : rows.stop - first_row]


def queries_of_rows(rows: slice, *, num_items: int) -> Queries:
    """Return the queries of these rows."""
    num_queries = rows.stop - rows.start
    seen, targets = (
        JaggedArray.from_lengths(
            np.full(num_queries, length), random_rows(rows, columns=length, kind=kind, bound=num_items).reshape(-1)
        )
        for kind, length in ((2, NUM_SEEN), (3, NUM_TARGETS))
    )
    query_BD = torch.from_numpy(random_rows(rows, columns=DIM, kind=0))
    return Queries(query_BD, is_known_B=np.ones(num_queries, np.bool_), seen=seen, targets=targets)


def measure_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Rank this rank's queries, and save the top lists and the positions. Without a world size, rank in one process."""
    process = Process(options.rank, options.world_size or 1, torch.device("cpu"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // process.world_size))
    rows, top_only = rows_of_rank(options.queries, process), options.top_only
    if options.world_size:
        rendezvous_url = f"file://{options.folder}/store"
        dist.init_process_group("gloo", init_method=rendezvous_url, rank=process.rank, world_size=process.world_size)
        dist.barrier()

    def rank() -> None:
        queries, items = queries_of_rows(rows, num_items=options.items), EncodedRows(options.items, dim=DIM, process=process)
        items.add(items.rows.start, 0, torch.from_numpy(random_rows(items.rows, columns=DIM, kind=1)))
        ranking: PartOfRanking | Ranking
        if options.world_size:
            candidates = np.arange(options.items)
            ranking = rank_collectively(
                queries, items=items, candidate_rows=candidates, k=K, top_only=top_only, process=process
            )
        else:
            ranking = rank_catalogue(queries, item_vector_ID=items.vector_RD, k=K, top_only=top_only)
        np.save(Path(options.folder) / f"top-{process.rank}.npy", ranking.top_BK)
        np.save(Path(options.folder) / f"positions-{process.rank}.npy", ranking.position_T)

    start_cpu_s = time.process_time()
    measurement = measure_work(rank) | {"cpu_s": time.process_time() - start_cpu_s}
    if options.world_size:
        dist.destroy_process_group()
    return measurement


def measure_ranks(world_size: int, *, options: argparse.Namespace, top_only: bool) -> dict[str, Any]:
    """Return the duration, the CPU time of all ranks, the largest memory of a rank, and a hash of the ranking.

    world_size: number of ranks, or 0 for one process without ranks.
    """
    num_processes = max(1, world_size)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.ranks", "--folder", folder, "--world-size", str(world_size)]
        command += ["--queries", str(options.queries), "--items", str(options.items), *(["--top-only"] if top_only else [])]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(num_processes)
        ]
        try:
            outputs = [process.communicate()[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert not any(process.returncode for process in processes), "a rank failed"
        measurements = [json.loads(output.splitlines()[-1]) for output in outputs]
        digest = hashlib.sha256()
        for content in ("top", "positions"):
            for rank in range(num_processes):
                digest.update(np.load(Path(folder) / f"{content}-{rank}.npy").tobytes())
    return {
        "world_size": world_size,
        "seconds": max(measurement["seconds"] for measurement in measurements),
        "cpu_s": sum(measurement["cpu_s"] for measurement in measurements),
        "rank_bytes": max(measurement["peak_anon_bytes"] - measurement["start_anon_bytes"] for measurement in measurements),
        "sha256": digest.hexdigest(),
    }


def to_markdown(results: dict[str, Any]) -> str:
    """Return the report."""
    lines = [
        "# Exact ranking on several ranks",
        "",
        f"Measured on {results['date']} on {results['cores']} cores by `make bench-ranks` with torch {results['torch']} and",
        f"numpy {results['numpy']}: {results['queries']:,} users, {results['items']:,} items, vectors of {DIM} numbers,",
        f"top lists of {K} items.",
        "",
        "All contestants use all cores of the machine and compute the same ranking, bit by bit. The memory is the peak of a",
        "rank, with its vectors and without the libraries. The CPU time is the total of all ranks and cores. The load average",
        f"at the start was {results['load']:.1f}; while other programs run, CPU times are more reliable than durations.",
    ]
    for title, runs in results["runs"].items():
        lines += ["", f"## {title}", "", "| ranks | duration, s | CPU time, s | memory of a rank, MB |", "|" + "---:|" * 4]
        lines += [
            f"| {run['world_size'] or 'one process'} | {run['seconds']:.0f} | {run['cpu_s']:.0f} "
            f"| {run['rank_bytes'] / 1e6:,.0f} |"
            for run in runs
        ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write ranks.json and ranks.md. With --folder, measure one rank and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=200_000)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--top-only", action="store_true", help="measure only Recall@100, without the positions of all targets")
    parser.add_argument("--rank", type=int, default=0, help="rank of the process that --folder measures")
    parser.add_argument("--world-size", type=int, default=0, help="number of ranks; 0 for one process without ranks")
    parser.add_argument("--folder", help="folder for the ranking of one rank")
    options = parser.parse_args(arguments)
    if options.folder:
        sys.stdout.write(json.dumps(measure_rank(options)) + "\n")
        return
    load, runs_by_title = os.getloadavg()[0], {}
    for title, top_only in (("Top lists", True), ("Top lists and positions of all targets", False)):
        if options.top_only and not top_only:
            continue
        runs = [measure_ranks(world_size, options=options, top_only=top_only) for world_size in (0, *WORLD_SIZES)]
        assert len({run["sha256"] for run in runs}) == 1, f"the contestants disagree: {runs}"
        runs_by_title[title] = runs
    results = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cores": len(os.sched_getaffinity(0)),
        "torch": installed_versions()["torch"],
        "numpy": np.__version__,
        "load": load,
        "queries": options.queries,
        "items": options.items,
        "runs": runs_by_title,
    }
    (FOLDER / "ranks.json").write_text(json.dumps(results, indent=1) + "\n")
    (FOLDER / "ranks.md").write_text(to_markdown(results))


if __name__ == "__main__":
    main()
