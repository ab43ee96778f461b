"""Benchmark of the ingest of pretrained vectors, from parquet to memory shared by all ranks, compared with pandas.

    python -m benchmarks.ingest_embeddings            # prints the table, and the numbers as JSON on the last line

- `pandas` reads the file, stacks rows or columns, and moves the tensor to shared memory.
- `pandas_block` copies the block of a wide data frame. This is faster than stacking its columns.
- `nightjar` is the complete stage: checks, hashes, fsync and rename. Afterwards every rank maps the matrix.

Each measurement is a separate process, and the methods alternate. Import time is excluded. Anonymous memory is RssAnon of
/proc/self/status, sampled every 5 ms. It includes the interpreter and libraries, but not mapped files and shared memory.
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

from benchmarks.measuring import measure_work, run_in_new_process, summary, table_cells

LAYOUTS = {"list": ("pandas", "nightjar"), "wide": ("pandas", "pandas_block", "nightjar")}
"""Methods for each layout of the file; the first one is the reference."""
PREFIX = "dim_"


def write_vectors(folder: Path, *, rows: int, dim: int) -> None:
    """Write the same random float32 vectors with shuffled ids as list.parquet and wide.parquet."""
    random = np.random.default_rng(0)
    vectors = random.standard_normal((rows, dim), dtype=np.float32)
    ids = random.permutation(rows)
    offsets = pa.array(np.arange(0, rows * dim + 1, dim, dtype=np.int32))
    column = pa.ListArray.from_arrays(offsets, pa.array(vectors.ravel()))
    pq.write_table(pa.table({"item_id": ids, "vector": column}), folder / "list.parquet")
    vector_columns = {f"{PREFIX}{index}": np.ascontiguousarray(vectors[:, index]) for index in range(dim)}
    pq.write_table(pa.table({"item_id": ids, **vector_columns}), folder / "wide.parquet")


def measure(*, rows: int = 1_000_000, dim: int = 128, repeats: int = 3) -> dict[str, Any]:
    """Return the sizes, and for each layout and method the seconds of all runs and the anonymous memory."""
    results: dict[str, Any] = {"rows": rows, "dim": dim, "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_vectors(folder, rows=rows, dim=dim)
        for layout, methods in LAYOUTS.items():
            runs: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
            for _ in range(repeats):
                for method in methods:
                    runs[method].append(
                        run_in_new_process("benchmarks.ingest_embeddings", method, str(folder / f"{layout}.parquet"))
                    )
            results[layout] = {method: summary(measurements) for method, measurements in runs.items()}
    return results


def to_markdown(results: dict[str, Any]) -> str:
    """Return one table line per layout and method."""
    lines = [
        f"The file has {results['rows']:,} vectors of {results['dim']} float32 numbers. In the layout `list` they are in one",
        "column of lists. In the layout `wide` there is one column per dimension. `pandas` stacks the columns, and",
        "`pandas_block` copies the block of memory in which pandas stores them. The table has the median",
        "of the seconds, with all runs in brackets. Anonymous memory is memory that is not backed by a file.",
        "",
        "| layout | method | seconds | speed-up over pandas | largest anonymous memory, MB "
        "| anonymous memory at the start, MB |",
        "|:---|:---|---:|---:|---:|---:|",
    ]
    for layout, methods in LAYOUTS.items():
        for method in methods:
            result, reference = results[layout][method], results[layout][methods[0]]
            row = [layout, method, *table_cells(result, references=[reference]), f"{result['start_anon_bytes'] / 1e6:,.0f}"]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _pandas_work(file: Path, *, block: bool) -> Callable[[], object]:
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


def _nightjar_work(file: Path, folder: Path) -> Callable[[], object]:
    from recsys_core.data.embeddings.config import EmbeddingsConfig
    from recsys_core.data.embeddings.ingest import ingest_embeddings

    layout = {"vector_column": "vector"} if file.stem == "list" else {"dimension_prefix": PREFIX}
    config = EmbeddingsConfig(paths=(str(file),), **layout)
    return lambda: ingest_embeddings((config,), folder=folder / "stage")


def main() -> None:
    """Measure the method that the arguments name, or all methods without arguments."""
    if len(sys.argv) == 3:
        method, file = sys.argv[1], Path(sys.argv[2])
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            work = (
                _nightjar_work(file, Path(folder))
                if method == "nightjar"
                else _pandas_work(file, block=method == "pandas_block")
            )
            sys.stdout.write(json.dumps(measure_work(work)) + "\n")
        return
    results = measure()
    sys.stdout.write(to_markdown(results) + "\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
