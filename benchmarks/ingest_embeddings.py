"""Benchmark of the ingest of pretrained vectors, from parquet to memory shared by all ranks, compared with pandas.

    python -m benchmarks.ingest_embeddings            # prints the table, and the numbers as JSON on the last line

- `pandas` reads the file, stacks rows or columns, and moves the tensor to shared memory.
- `pandas_block` copies the block of a wide data frame. This is faster than stacking its columns.
- `nightjar` is the complete stage: checks, hashes, fsync and rename. Afterwards every rank maps the matrix.

Each measurement runs in a separate process, and the methods alternate. The time of imports is excluded. Anonymous memory is
RssAnon of /proc/self/status, sampled every 5 ms. It includes the interpreter and libraries, but not mapped files and shared
memory.
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

from benchmarks.measuring import measure_work, run_in_new_process, summarise_runs, table_cells

METHODS_BY_LAYOUT = {"list": ("pandas", "nightjar"), "wide": ("pandas", "pandas_block", "nightjar")}
"""Methods for each layout of the file. The first method is the reference."""
DIMENSION_PREFIX = "dim_"


def write_vectors(folder: Path, *, num_rows: int, dim: int) -> None:
    """Write the same random float32 vectors with shuffled ids as list.parquet and wide.parquet."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((num_rows, dim), dtype=np.float32)
    ids = rng.permutation(num_rows)
    offsets = pa.array(np.arange(0, num_rows * dim + 1, dim, dtype=np.int32))
    vector_lists = pa.ListArray.from_arrays(offsets, pa.array(vectors.ravel()))
    pq.write_table(pa.table({"item_id": ids, "vector": vector_lists}), folder / "list.parquet")
    vector_columns = {f"{DIMENSION_PREFIX}{index}": np.ascontiguousarray(vectors[:, index]) for index in range(dim)}
    pq.write_table(pa.table({"item_id": ids, **vector_columns}), folder / "wide.parquet")


def measure(*, num_rows: int = 1_000_000, dim: int = 128, repeats: int = 3) -> dict[str, Any]:
    """Return the sizes, and for each layout and method the seconds of all runs and the anonymous memory."""
    results: dict[str, Any] = {"rows": num_rows, "dim": dim, "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_vectors(folder, num_rows=num_rows, dim=dim)
        for layout, methods in METHODS_BY_LAYOUT.items():
            runs_by_method: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
            for _ in range(repeats):
                for method in methods:
                    runs_by_method[method].append(
                        run_in_new_process("benchmarks.ingest_embeddings", method, str(folder / f"{layout}.parquet"))
                    )
            results[layout] = {method: summarise_runs(measurements) for method, measurements in runs_by_method.items()}
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
    for layout, methods in METHODS_BY_LAYOUT.items():
        for method in methods:
            method_result, pandas_result = results[layout][method], results[layout][methods[0]]
            cells = [
                layout,
                method,
                *table_cells(method_result, references=[pandas_result]),
                f"{method_result['start_anon_bytes'] / 1e6:,.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _pandas_work(parquet_path: Path, *, copies_block: bool) -> Callable[[], object]:
    import pandas as pd
    import torch

    def work() -> object:
        frame = pd.read_parquet(parquet_path)
        ids = frame["item_id"].to_numpy()
        if "vector" in frame:
            vectors = np.stack(list(frame["vector"].to_numpy()))
        else:
            column_names = [column_name for column_name in frame if str(column_name).startswith(DIMENSION_PREFIX)]
            vectors = (
                frame[column_names].to_numpy()
                if copies_block
                else np.stack([frame[column_name].to_numpy() for column_name in column_names], axis=1)
            )
        return ids, torch.from_numpy(np.ascontiguousarray(vectors)).share_memory_()  # type: ignore[no-untyped-call]

    return work


def _nightjar_work(parquet_path: Path, folder: Path) -> Callable[[], object]:
    from recsys_core.ingest.vectors.config import EmbeddingsConfig
    from recsys_core.ingest.vectors.ingest import ingest_embeddings

    column_settings = {"vector_column": "vector"} if parquet_path.stem == "list" else {"dimension_prefix": DIMENSION_PREFIX}
    config = EmbeddingsConfig(paths=(str(parquet_path),), **column_settings)
    return lambda: ingest_embeddings((config,), folder=folder / "stage")


def main() -> None:
    """Measure the method that the arguments name, or all methods without arguments."""
    if len(sys.argv) == 3:
        method, parquet_path = sys.argv[1], Path(sys.argv[2])
        with tempfile.TemporaryDirectory(dir=parquet_path.parent) as folder:
            work = (
                _nightjar_work(parquet_path, Path(folder))
                if method == "nightjar"
                else _pandas_work(parquet_path, copies_block=method == "pandas_block")
            )
            sys.stdout.write(json.dumps(measure_work(work)) + "\n")
        return
    results = measure()
    sys.stdout.write(to_markdown(results) + "\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
