"""Pretrained vectors from parquet to memory that ranks share: nightjar's stage beside pandas, stack and share_memory_.

    python -m benchmarks.ingest_embeddings            # prints the table, and the figures as JSON on the last line

`pandas` reads, stacks (rows, or single columns) and shares; `pandas_block` takes a wide frame's block as it is and puts it into
row order, which is quicker than stacking.
Each measurement is a process of its own; the two ways alternate. Seconds are without imports. Ours is the whole stage: checks,
hashes, fsync and rename, after which every rank maps the matrix; the pandas way ends with the tensor in shared memory.
Anonymous memory is RssAnon of /proc/self/status, sampled every 5 ms, interpreter and libraries included; pages of the mapped
matrix and of shared memory are not in it.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import cells, in_fresh_process, measured, summary

LAYOUTS = {"list": ("pandas", "nightjar"), "wide": ("pandas", "pandas_block", "nightjar")}
"""The ways for each layout, the one that the others are held against first."""
PREFIX = "dim_"


def write_vectors(folder: Path, *, rows: int, dim: int) -> None:
    """list.parquet and wide.parquet with the same random float32 vectors, ids shuffled, as pyarrow writes them by default."""
    random = np.random.default_rng(0)
    vectors = random.standard_normal((rows, dim), dtype=np.float32)
    ids = random.permutation(rows)
    offsets = pa.array(np.arange(0, rows * dim + 1, dim, dtype=np.int32))
    column = pa.ListArray.from_arrays(offsets, pa.array(vectors.ravel()))
    pq.write_table(pa.table({"item_id": ids, "vector": column}), folder / "list.parquet")
    single = {f"{PREFIX}{index}": np.ascontiguousarray(vectors[:, index]) for index in range(dim)}
    pq.write_table(pa.table({"item_id": ids, **single}), folder / "wide.parquet")


def measure(*, rows: int = 1_000_000, dim: int = 128, repeats: int = 3) -> dict[str, Any]:
    """layout -> way -> seconds (of each run) and peak_anon_bytes (the largest); plus the sizes."""
    found: dict[str, Any] = {"rows": rows, "dim": dim, "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_vectors(folder, rows=rows, dim=dim)
        for layout, ways in LAYOUTS.items():
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for _ in range(repeats):
                for way in ways:
                    runs[way].append(in_fresh_process("benchmarks.ingest_embeddings", way, str(folder / f"{layout}.parquet")))
            found[layout] = {way: summary(made) for way, made in runs.items()}
    return found


def to_markdown(found: dict[str, Any]) -> str:
    """One line per layout and way."""
    lines = [
        f"{found['rows']:,} x {found['dim']} float32 in one file; median, and all runs in brackets.",
        "",
        "| layout | way | seconds | times faster than pandas | peak anonymous MB | of these before the start |",
        "|:---|:---|---:|---:|---:|---:|",
    ]
    for layout, ways in LAYOUTS.items():
        for way in ways:
            made = found[layout][way]
            row = [layout, way, *cells(made, against=[found[layout][ways[0]]]), f"{made['start_anon_bytes'] / 1e6:,.0f}"]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _pandas_way(file: Path, *, block: bool) -> Callable[[], object]:
    import pandas as pd
    import torch

    def work() -> object:
        frame = pd.read_parquet(file)
        ids = frame["item_id"].to_numpy()
        if "vector" in frame:
            vectors = np.stack(list(frame["vector"].to_numpy()))
        else:
            names = [name for name in frame if str(name).startswith(PREFIX)]
            vectors = frame[names].to_numpy() if block else np.stack([frame[name].to_numpy() for name in names], axis=1)
        return ids, torch.from_numpy(np.ascontiguousarray(vectors)).share_memory_()  # type: ignore[no-untyped-call]

    return work


def _nightjar_way(file: Path, folder: Path) -> Callable[[], object]:
    from recsys_core.data.embeddings.config import EmbeddingsConfig
    from recsys_core.data.embeddings.ingest import ingest_embeddings

    layout = {"vector_column": "vector"} if file.stem == "list" else {"dimension_prefix": PREFIX}
    config = EmbeddingsConfig(paths=(str(file),), **layout)
    return lambda: ingest_embeddings((config,), folder=folder / "stage")


def main() -> None:
    if len(sys.argv) == 3:
        way, file = sys.argv[1], Path(sys.argv[2])
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            work = _nightjar_way(file, Path(folder)) if way == "nightjar" else _pandas_way(file, block=way == "pandas_block")
            sys.stdout.write(json.dumps(measured(work)) + "\n")
        return
    found = measure()
    sys.stdout.write(to_markdown(found) + "\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
