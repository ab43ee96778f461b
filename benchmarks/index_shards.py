"""Benchmark of an index in shards: build time and memory, recall and queries per second with 1, 4 and 16 shards.

    python -m benchmarks.index_shards          # writes benchmarks/index_shards.json
    python -m benchmarks.index_shards --items 20000 --queries 200

The vectors are the same as in `benchmarks.index`. Each index is built in a separate process from memory-mapped vectors.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from benchmarks.index import DIM, RECALL_TARGET, K, write_vectors
from benchmarks.measuring import measure_work, run_in_new_process
from recsys_core.retrieval.compressed import IvfSq8
from recsys_core.retrieval.index import write_index
from recsys_core.retrieval.kinds import AnyIndexKind, Flat, Hnsw
from recsys_core.retrieval.measure import MeasuredQueries, tune
from recsys_core.retrieval.search import map_index
from recsys_core.retrieval.shards import index_paths

KINDS: dict[str, AnyIndexKind] = {"flat": Flat(), "ivf_sq8": IvfSq8(), "hnsw": Hnsw(hnsw_m=16, ef_construction=64)}
NUM_SHARDS = (1, 4, 16)
FOLDER = Path(__file__).parent


def build(name: str, folder: Path, *, num_shards: int) -> dict[str, Any]:
    """Build and write an index. Return the duration, the anonymous memory and the size of its files."""
    item_vector_ID = np.load(folder / "item_vectors.npy", mmap_mode="r")
    kind = KINDS[name].fitted(len(item_vector_ID), DIM)
    paths = index_paths(folder, name, num_shards=num_shards)
    measurement = measure_work(lambda: write_index(kind, item_vector_ID, paths))
    return {
        "build_s": measurement["seconds"],
        "peak_bytes": measurement["peak_anon_bytes"] - measurement["start_anon_bytes"],
        "bytes": sum(path.stat().st_size for path in paths),
    }


def compare(folder: Path) -> list[dict[str, Any]]:
    """Build all indexes, and search them with the fastest settings that reach the target on other queries."""
    item_vector_ID, query_RD = (np.load(folder / f"{side}_vectors.npy", mmap_mode="r") for side in ("item", "query"))
    rows: list[dict[str, Any]] = []
    tuning, test = None, None
    for name, kind in KINDS.items():
        for num_shards in NUM_SHARDS:
            arguments = ("--build", name, "--shards", str(num_shards), "--folder", str(folder))
            row = {"kind": name, "shards": num_shards} | run_in_new_process("benchmarks.index_shards", *arguments)
            index = map_index(index_paths(folder, name, num_shards=num_shards))
            if tuning is None or test is None:
                tuning, test = (
                    MeasuredQueries.with_exact_results(
                        np.ascontiguousarray(query_BD), exact_index=index, item_vector_ID=item_vector_ID, depth=K
                    )
                    for query_BD in np.split(query_RD, 2)
                )
            fitted_kind = kind.fitted(len(item_vector_ID), DIM)
            tuned_kind, _ = tune(fitted_kind, index, tuning, recall_target=RECALL_TARGET)
            recall_B, ms_per_query = test.recall_and_latency(index, tuned_kind)
            row |= {"recall": float(recall_B.mean()), "queries_per_s": 1000 / ms_per_query}
            rows.append(row | {"parameters": tuned_kind.model_dump(exclude={"kind"})})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write index_shards.json. With --build, build one index and print its measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=500, help="number of queries for the tuning; the test has as many")
    parser.add_argument("--build", choices=tuple(KINDS), help="build one index in --folder")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    if options.build:
        measurement = build(options.build, options.folder, num_shards=options.shards)
        sys.stdout.write(json.dumps(measurement) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_vectors(Path(folder), num_items=options.items, num_queries=2 * options.queries)
        rows = compare(Path(folder))
    results = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "faiss": faiss.__version__,
        "cores": os.cpu_count(),
        "items": options.items,
        "queries": options.queries,
        "rows": rows,
    }
    (FOLDER / "index_shards.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
