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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
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
                    runs[way].append(_in_fresh_process(way, folder / f"{layout}.parquet"))
            found[layout] = {
                way: {
                    "seconds": [round(run["seconds"], 2) for run in made],
                    "peak_anon_bytes": max(int(run["peak_anon_bytes"]) for run in made),
                    "start_anon_bytes": max(int(run["start_anon_bytes"]) for run in made),
                }
                for way, made in runs.items()
            }
    return found


def to_markdown(found: dict[str, Any]) -> str:
    """One line per layout and way."""
    lines = [
        f"{found['rows']:,} x {found['dim']} float32, {found['cores']} cores; median, and all runs in brackets.",
        "",
        "| layout | way | seconds | times faster | peak anonymous MB | of these before the start |",
        "|:---|:---|---:|---:|---:|---:|",
    ]
    for layout, ways in LAYOUTS.items():
        slowest = median(found[layout][ways[0]]["seconds"])
        for way in ways:
            made = found[layout][way]
            seconds = median(made["seconds"])
            runs = ", ".join(f"{value:.2f}" for value in sorted(made["seconds"]))
            memory = " | ".join(f"{made[key] / 1e6:,.0f}" for key in ("peak_anon_bytes", "start_anon_bytes"))
            lines.append(f"| {layout} | {way} | {seconds:.2f} ({runs}) | {slowest / seconds:.1f} | {memory} |")
    return "\n".join(lines) + "\n"


def _in_fresh_process(way: str, file: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.ingest_embeddings", way, str(file)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _anon_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def _measured(work: Callable[[], object]) -> dict[str, float]:
    start_bytes = _anon_bytes()
    peak, over = [start_bytes], threading.Event()

    def sample() -> None:
        while not over.wait(0.005):
            peak.append(_anon_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    started = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - started
    over.set()
    sampler.join()
    del kept
    return {"seconds": seconds, "peak_anon_bytes": max(peak), "start_anon_bytes": start_bytes}


def _pandas_way(file: Path, *, block: bool) -> Callable[[], object]:
    import pandas as pd
    import torch

    def work() -> object:
        frame = pd.read_parquet(file)
        ids = frame["item_id"].to_numpy()
        if "vector" in frame:
            vectors = np.stack(frame["vector"].to_numpy())
        else:
            names = [name for name in frame if name.startswith(PREFIX)]
            vectors = frame[names].to_numpy() if block else np.stack([frame[name].to_numpy() for name in names], axis=1)
        return ids, torch.from_numpy(np.ascontiguousarray(vectors)).share_memory_()

    return work


def _nightjar_way(file: Path, folder: Path) -> Callable[[], object]:
    from recsys_core.data.vectors.config import EmbeddingsConfig
    from recsys_core.data.vectors.ingest import ingest_embeddings

    layout = {"vector_column": "vector"} if file.stem == "list" else {"dimension_prefix": PREFIX}
    config = EmbeddingsConfig(paths=(str(file),), **layout)
    return lambda: ingest_embeddings((config,), folder=folder / "stage")


def main() -> None:
    if len(sys.argv) == 3:
        way, file = sys.argv[1], Path(sys.argv[2])
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            work = _nightjar_way(file, Path(folder)) if way == "nightjar" else _pandas_way(file, block=way == "pandas_block")
            sys.stdout.write(json.dumps(_measured(work)) + "\n")
        return
    found = measure()
    sys.stdout.write(to_markdown(found) + "\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
