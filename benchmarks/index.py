"""Benchmark of the index kinds: recall, queries per second, build time, memory and size with a million items.

    make bench-index          # writes benchmarks/index.json and index.md
    python -m benchmarks.index --items 20000 --queries 200 --rounds 1

Each index is built in a separate process. Then all indexes search the same queries in turns with one thread, so that a change
in the speed of the machine affects all of them.

The vectors resemble the vectors of a trained model. There are 300 random directions and 10,000 groups of items, whose sizes
follow a power law. The centre of a group is one of the directions plus noise, and an item is the centre of its group plus
noise. A query is the sum of an item and half of another item, like a user with two interests. All vectors have norm 1.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring import measure_work, run_in_new_process
from recsys_core.retrieval.compressed import IvfPq, IvfSq8, OpqPq, PqFastScan
from recsys_core.retrieval.index import build_index
from recsys_core.retrieval.ivf import IvfFlat
from recsys_core.retrieval.kinds import AnyIndexKind, Flat, Hnsw
from recsys_core.retrieval.measure import MeasuredQueries, faiss_threads, recall_per_query, tune
from recsys_core.retrieval.search import search
from recsys_core.units import MIB

NUM_ITEMS, NUM_QUERIES, DIM, K, RECALL_TARGET = 1_000_000, 500, 64, 100, 0.95
NUM_DIRECTIONS, NUM_GROUPS = 300, 10_000
FIRST_INDEX = "IVF-PQ, L2"
"""Name of the index with which the project began."""
KINDS: dict[str, AnyIndexKind] = {
    "flat": Flat(),
    "ivf_flat": IvfFlat(),
    "ivf_sq8": IvfSq8(),
    "ivf_pq": IvfPq(),
    "ivf_pq, rescored": IvfPq(pq_m=16, rescore=None),
    "opq_pq": OpqPq(pq_m=16),
    "pq_fastscan": PqFastScan(),
    "hnsw": Hnsw(hnsw_m=16, ef_construction=64),
}
FOLDER = Path(__file__).parent


def random_vectors(num_items: int, *, num_queries: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return item vectors and query vectors of norm 1, as the module docstring describes them."""
    rng = np.random.default_rng(0)
    direction_RD = rng.standard_normal((NUM_DIRECTIONS, DIM), np.float32)
    centre_RD = direction_RD[rng.integers(NUM_DIRECTIONS, size=NUM_GROUPS)]
    centre_RD += 0.7 * rng.standard_normal((NUM_GROUPS, DIM), np.float32)
    share_R = 1 / np.sqrt(np.arange(1, NUM_GROUPS + 1))
    item_vector_ID = centre_RD[rng.choice(NUM_GROUPS, size=num_items, p=share_R / share_R.sum())]
    item_vector_ID += 0.5 * rng.standard_normal(item_vector_ID.shape, np.float32)
    item_vector_ID /= np.linalg.norm(item_vector_ID, axis=1, keepdims=True)
    first_B, second_B = rng.integers(num_items, size=(2, num_queries))
    query_BD = item_vector_ID[first_B] + 0.5 * item_vector_ID[second_B]
    return item_vector_ID, query_BD / np.linalg.norm(query_BD, axis=1, keepdims=True)


def write_vectors(folder: Path, *, num_items: int, num_queries: int) -> None:
    """Write item_vectors.npy and query_vectors.npy."""
    for side, vector_RD in zip(("item", "query"), random_vectors(num_items, num_queries=num_queries), strict=True):
        np.save(folder / f"{side}_vectors.npy", vector_RD)


def build(name: str, folder: Path) -> dict[str, Any]:
    """Build an index from the memory-mapped vectors and write it. Return duration, anonymous memory and file size."""
    item_vector_ID = np.load(folder / "item_vectors.npy", mmap_mode="r")
    path = index_path(folder, name)

    def work() -> None:
        if name == FIRST_INDEX:
            index = faiss.IndexIVFPQ(faiss.IndexFlatL2(DIM), DIM, 100, 8, 8)
            index.train(item_vector_ID[:: max(1, len(item_vector_ID) // 65_536)])
            index.add(item_vector_ID)
        else:
            index = build_index(KINDS[name].fitted(*item_vector_ID.shape), item_vector_ID)
        faiss.write_index(index, str(path))

    measurement = measure_work(work)
    return {
        "build_s": measurement["seconds"],
        "peak_bytes": measurement["peak_anon_bytes"] - measurement["start_anon_bytes"],
        "bytes": path.stat().st_size,
    }


def index_path(folder: Path, name: str) -> Path:
    """Return the path of an index file."""
    return folder / f"{name.replace(', ', '-')}.faiss"


def compare(folder: Path, *, rounds: int) -> dict[str, dict[str, Any]]:
    """Build and tune all indexes, and measure them in turns. Return one row per index."""
    item_vector_ID, query_RD = (np.load(folder / f"{side}_vectors.npy", mmap_mode="r") for side in ("item", "query"))
    rows: dict[str, dict[str, Any]] = {
        name: run_in_new_process("benchmarks.index", "--build", name, "--folder", str(folder)) for name in (*KINDS, FIRST_INDEX)
    }
    index_by_name = {name: faiss.read_index(str(index_path(folder, name))) for name in rows}
    tuning, test = (
        MeasuredQueries.with_exact_results(
            np.ascontiguousarray(query_BD), exact_index=index_by_name["flat"], item_vector_ID=item_vector_ID, depth=K
        )
        for query_BD in np.split(query_RD, 2)
    )
    kind_by_name: dict[str, AnyIndexKind] = {}
    for name, kind in KINDS.items():
        fitted_kind = kind.fitted(*item_vector_ID.shape)
        kind_by_name[name], _ = tune(fitted_kind, index_by_name[name], tuning, recall_target=RECALL_TARGET)
        rows[name]["parameters"] = kind_by_name[name].model_dump(exclude={"kind"})
    rows[FIRST_INDEX]["parameters"] = {"nlist": 100, "nprobe": 8, "pq_m": 8, "pq_nbits": 8}

    for row in rows.values():
        row["queries_per_s"] = []
    with faiss_threads(1):
        for _ in range(rounds):
            for name, index in index_by_name.items():
                start_s = time.perf_counter()
                if name == FIRST_INDEX:
                    _, row_BK = index.search(test.query_BD, K, params=IvfFlat(nprobe=8).search_parameters(K))
                else:
                    _, row_BK = search(index, test.query_BD, kind=kind_by_name[name], depth=K)
                rows[name]["queries_per_s"].append(len(test.query_BD) / (time.perf_counter() - start_s))
                recall_B = recall_per_query(
                    row_BK, exact_row_BK=test.exact_row_BK, query_BD=test.query_BD, item_vector_ID=item_vector_ID
                )
                rows[name]["recall"] = float(recall_B.mean())
    return rows


def to_markdown(results: dict[str, Any]) -> str:
    """Return the report."""
    rows = results["rows"]
    lines = [
        "# Index kinds",
        "",
        f"Measured on {results['date']} by `make bench-index` with FAISS {results['faiss']}: {results['items']:,} items,",
        f"vectors of {DIM} numbers, {results['queries']:,} queries in one batch, one thread. Recall is the share of the exact",
        f"best {K} items. The search settings (`nprobe`, `rescore`, `ef_search`) are the fastest values that",
        f"reach a recall of {RECALL_TARGET:g} on other queries, or the values with the highest recall. All indexes search in",
        "turns.",
        f"The table has the median of {results['rounds']} turns, and the median of the ratios to `flat` in the same turn. The",
        "vectors are synthetic; the docstring of `benchmarks/index.py` describes them. The build memory is anonymous memory,",
        "and includes the index. The last row is the configuration that this project began with.",
        "",
        f"| index | recall@{K} | queries/s | times flat | build, s | build memory, MiB | file, MiB | settings |",
        "|:---|---:|---:|---:|---:|---:|---:|:---|",
    ]
    for name, row in rows.items():
        ratio = median(
            speed / flat_speed for speed, flat_speed in zip(row["queries_per_s"], rows["flat"]["queries_per_s"], strict=True)
        )
        settings = ", ".join(f"{setting} {value}" for setting, value in row["parameters"].items()) or "none"
        lines.append(
            f"| {name} | {row['recall']:.4f} | {median(row['queries_per_s']):,.0f} | {ratio:,.1f} | {row['build_s']:,.0f} "
            f"| {row['peak_bytes'] / MIB:,.0f} | {row['bytes'] / MIB:,.0f} | {settings} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write index.json and index.md. With --build, build one index and print its measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=NUM_ITEMS)
    parser.add_argument(
        "--queries", type=int, default=NUM_QUERIES, help="number of queries for the tuning; the test has as many"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--build", choices=(*KINDS, FIRST_INDEX), help="build one index in --folder")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    if options.build:
        sys.stdout.write(json.dumps(build(options.build, options.folder)) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_vectors(Path(folder), num_items=options.items, num_queries=2 * options.queries)
        rows = compare(Path(folder), rounds=options.rounds)
    results = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "faiss": faiss.__version__,
        "items": options.items,
        "queries": options.queries,
        "rounds": options.rounds,
        "rows": rows,
    }
    (FOLDER / "index.json").write_text(json.dumps(results, indent=1) + "\n")
    (FOLDER / "index.md").write_text(to_markdown(results))


if __name__ == "__main__":
    main()
