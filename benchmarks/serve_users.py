"""Part of benchmarks/serve.py: load time, memory and lookup latency of packages with 100,000 and with 10 million users.

    python -m benchmarks.serve --users          # about 3 minutes; replaces this part of serve.json and serve.md

A run creates a package with a small catalogue. Then generated users with 20 events each replace the users of the package.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.measuring import anonymous_bytes, run_in_new_process
from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.dataset.layout import allocate_npy
from recsys_core.manifests import record_file
from recsys_core.serving.contents import open_contents, read_package
from recsys_core.serving.description import (
    DESCRIPTION_NAME,
    GOLDEN_NAME,
    USERS_CHECKSUMS_NAME,
    USERS_NAME,
    PackageDescription,
)
from recsys_core.serving.golden import verify_golden, write_golden
from recsys_core.serving.retriever import Retriever
from recsys_core.serving.users.mapped_file import write_block_checksums
from recsys_core.serving.users.user_table import write_users

NUM_USERS = (100_000, 10_000_000)
EVENTS_PER_USER, CHUNK_USERS, NUM_LOOKUPS, K = 20, 1_000_000, 2_000, 10
USER_ID_FACTOR = 1_000_003
"""User ids are multiples of this number, so that they are not equal to the rows."""


def write_package(package: Path, folder: Path, *, num_users: int) -> None:
    """Copy a package to `folder` with generated users in place of its own."""
    shutil.copytree(package, folder)
    description = PackageDescription.model_validate_json((folder / DESCRIPTION_NAME).read_bytes())
    (folder / DESCRIPTION_NAME).unlink()
    events_path = folder / "events.npy"
    event_item = allocate_npy(events_path, dtype=np.int32, shape=(num_users * EVENTS_PER_USER,))
    rng = np.random.default_rng(num_users)
    for start in range(0, len(event_item), CHUNK_USERS * EVENTS_PER_USER):
        chunk = event_item[start : start + CHUNK_USERS * EVENTS_PER_USER]
        chunk[:] = rng.integers(0, description.model.num_items, len(chunk), dtype=np.int32)
    write_users(
        folder / USERS_NAME,
        user_ids=pa.array(np.arange(num_users) * USER_ID_FACTOR),
        user_offset=np.arange(num_users + 1) * EVENTS_PER_USER,
        event_item=event_item,
        features=FeatureStore({}),
    )
    events_path.unlink()
    write_block_checksums(folder / USERS_NAME, folder / USERS_CHECKSUMS_NAME)
    description = description.model_copy(update={"model": description.model.model_copy(update={"num_users": num_users})})
    write_golden(Retriever(open_contents(folder, description), version=""), folder / GOLDEN_NAME)
    files = {path.name: record_file(path) for path in sorted(folder.iterdir())}
    (folder / DESCRIPTION_NAME).write_text(description.model_copy(update={"files": files}).model_dump_json())


def measure_package(folder: Path) -> dict[str, Any]:
    """Load a package, and look up random users twice, with one thread. Return load time, memory and latencies."""
    import faiss
    import torch

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    sha256 = hashlib.sha256((folder / DESCRIPTION_NAME).read_bytes()).hexdigest()
    anon_bytes, private_bytes = anonymous_bytes(), psutil.Process().memory_full_info().uss
    start_s = time.perf_counter()
    contents = read_package(folder, sha256=sha256)
    retriever = Retriever(contents, version="")
    verify_golden(retriever, folder / GOLDEN_NAME)  # as in Retriever.load
    load_s = time.perf_counter() - start_s
    result: dict[str, Any] = {
        "load_s": load_s,
        "load_anon_mib": (anonymous_bytes() - anon_bytes) / 2**20,
        "load_private_mib": (psutil.Process().memory_full_info().uss - private_bytes) / 2**20,
        "users_mib": sum((folder / name).stat().st_size for name in (USERS_NAME, USERS_CHECKSUMS_NAME)) / 2**20,
    }
    num_users = len(retriever.user_ids)
    user_ids = USER_ID_FACTOR * np.random.default_rng(0).choice(num_users, 2 * NUM_LOOKUPS, replace=False)
    lookup_ids, recommend_ids = np.split(user_ids, 2)
    for _ in range(50):
        retriever.recommend([-1], K)
    for when in ("first", "again"):
        result[when] = {
            "lookup": _latencies(lambda user_id: contents.users.histories(contents.users.ids.rows([user_id])), lookup_ids),
            "recommend": _latencies(lambda user_id: retriever.recommend([user_id], K), recommend_ids),
        }
    result["used_anon_mib"] = (anonymous_bytes() - anon_bytes) / 2**20
    result["used_private_mib"] = (psutil.Process().memory_full_info().uss - private_bytes) / 2**20
    return result


def _latencies(call: Callable[[int], object], user_ids: NDArray[np.int64]) -> dict[str, float]:
    """Return the latency in milliseconds at the 50th and the 99th percentile."""
    seconds = []
    for user_id in user_ids.tolist():
        start_s = time.perf_counter()
        call(user_id)
        seconds.append(time.perf_counter() - start_s)
    return {f"p{percent}_ms": 1_000 * float(np.percentile(seconds, percent)) for percent in (50, 99)}


def measure_users(package: Path) -> dict[str, Any]:
    """Measure the package with each number of users in a separate process. Return the results by number of users."""
    results = {}
    for num_users in NUM_USERS:
        with tempfile.TemporaryDirectory(prefix="bench-serve-users-") as folder_name:
            folder = Path(folder_name) / "package"
            write_package(package, folder, num_users=num_users)
            results[str(num_users)] = run_in_new_process("benchmarks.serve_users", str(folder))
            results[str(num_users)]["load_average"] = os.getloadavg()[0]
    return results


def to_markdown(results: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    lines = [
        "",
        "## Number of users",
        "",
        f"The package of a small catalogue, with generated users of {EVENTS_PER_USER} events each. In one process with one",
        f"thread, {NUM_LOOKUPS:,} random users are looked up for the first time, which verifies their blocks of the file, and",
        "then again. The files are in the page cache. Anonymous memory is what the process allocates. Private memory also",
        "counts mapped pages that no other process has mapped. Linux maps up to 2 MiB around a byte that is read, and can drop",
        "these pages at any time.",
        "",
        f"| | {' | '.join(f'{int(num_users):,} users' for num_users in results)} |",
        f"|:---|{'---:|' * len(results)}",
    ]
    rows = {
        "file with the users, MiB": lambda row: f"{row['users_mib']:,.0f}",
        "`Retriever.load`, s": lambda row: f"{row['load_s']:.2f}",
        "its anonymous memory, MiB": lambda row: f"{row['load_anon_mib']:.0f}",
        "its private memory, MiB": lambda row: f"{row['load_private_mib']:.0f}",
        "anonymous memory after the lookups, MiB": lambda row: f"{row['used_anon_mib']:.0f}",
        "private memory after the lookups, MiB": lambda row: f"{row['used_private_mib']:.0f}",
    } | {
        f"{label}, {when}, p50 / p99, ms": lambda row, name=name, kind=kind: (
            f"{row[name][kind]['p50_ms']:.2f} / {row[name][kind]['p99_ms']:.2f}"
        )
        for kind, label in (("lookup", "lookup of one user"), ("recommend", "recommendation for one user"))
        for name, when in (("first", "first time"), ("again", "again"))
    }
    rows["load average of the machine"] = lambda row: f"{row['load_average']:.1f}"
    lines += [f"| {label} | {' | '.join(cell(row) for row in results.values())} |" for label, cell in rows.items()]
    return lines


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure_package(Path(sys.argv[1]))) + "\n")
