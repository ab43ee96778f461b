"""Benchmark of the loader: batches per second in one process and in two concurrent processes.

    python -m benchmarks.loader          # prints the table; `make bench-ingest` includes it

The loader reads a store of 20,000,000 events in a temporary folder while no training runs. benchmarks/train.py measures the
effect of the loader on the training step.
"""

import multiprocessing
import queue
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys_core.data.assembly import Assembler
from recsys_core.data.batch_keys import UNPOOLED
from recsys_core.data.events import EventStore, memory_map
from recsys_core.data.features.store import Feature, FeatureStore
from recsys_core.data.loader import TrainLoader

EVENTS, USERS, ITEMS = 20_000_000, 1_000_000, 200_000
BATCH_SIZES = (1_024, 8_192)
SECONDS, WARM_UP_BATCHES = 3.0, 20
CASES = {
    "two ids": (0, ()),
    "history of 20": (20, ()),
    "history of 20, six features": (
        20,
        ("user.segment", "user.interests", "item.brand", "item.price", "item.tags", "context.device"),
    ),
}
"""Case -> (maximum length of a history, features in addition to the ids)."""
FEATURES = {
    "user.segment": (USERS, 0), "user.interests": (USERS, 5), "item.brand": (ITEMS, 0), "item.price": (ITEMS, 0),
    "item.tags": (ITEMS, 4), "context.device": (EVENTS, 0),
}  # fmt: skip
"""Feature -> (number of users, items or events; mean length of a list, or 0 for single values). item.tags is weighted."""
_CONTEXT = multiprocessing.get_context("spawn")


def write_store(folder: Path) -> None:
    """Write random events and features in the format of the ingest stages."""
    rng = np.random.default_rng(0)
    length = rng.multinomial(EVENTS, rng.dirichlet(np.full(USERS, 2.0))).astype(np.int64)
    offset = np.concatenate([[0], np.cumsum(length)])
    item = (ITEMS * rng.random(EVENTS) ** 3).astype(np.int32)  # skewed popularity
    arrays = {
        "user_offset": offset,
        "train_end": offset[1:],
        "validation_end": offset[1:],
        "event_item": item,
        "train_user": np.repeat(np.arange(USERS, dtype=np.int32), length),
        "item_count": np.bincount(item, minlength=ITEMS),
        "vector_row": np.full(ITEMS, -1),
    }
    for key, (num_owners, mean_length) in FEATURES.items():
        num_values = num_owners
        if mean_length:
            arrays[f"{key}.offset"] = np.concatenate([[0], np.cumsum(rng.integers(0, 2 * mean_length + 1, num_owners))])
            num_values = int(arrays[f"{key}.offset"][-1])
        arrays[f"{key}.row"] = rng.integers(0, 1_000, num_values, dtype=np.int32)
    arrays["item.tags.weight"] = rng.random(len(arrays["item.tags.row"]), dtype=np.float32)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def open_store(folder: Path) -> tuple[EventStore, FeatureStore]:
    """Map the arrays of write_store in `folder`."""
    names = ("user_offset", "train_end", "validation_end", "event_item", "train_user", "item_count", "vector_row")
    store = EventStore(is_ordered=True, **{name: memory_map(folder / f"{name}.npy") for name in names})

    def feature_array(key: str, name: str) -> Any:
        path = folder / f"{key}.{name}.npy"
        return memory_map(path) if path.is_file() else None

    return store, FeatureStore(
        {
            key: Feature(
                table_rows=feature_array(key, "row"), offset=feature_array(key, "offset"), weights=feature_array(key, "weight")
            )
            for key in FEATURES
        }
    )


def _loader(folder: Path, case: str, *, batch_size: int, rank: int, world_size: int) -> TrainLoader:
    store, features = open_store(folder)
    max_history, feature_names = CASES[case]
    return TrainLoader(
        store,
        assembler=Assembler(
            user_batch_key=None if max_history else UNPOOLED,
            features=FeatureStore({name: features.feature_by_key[name] for name in feature_names}) if feature_names else None,
        ),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        seed=1,
        max_history=max_history,
    )


def _load(folder: Path, case: str, batch_size: int, rank: int, world_size: int, start_barrier: Any, results: Any) -> None:
    """Load batches for SECONDS in one rank, and put the samples per second into the queue `results`."""
    torch.set_num_threads(1)
    loader = _loader(folder, case, batch_size=batch_size, rank=rank, world_size=world_size)
    batches = (batch for epoch in range(1_000) for batch in loader.epoch(epoch))
    for _ in range(WARM_UP_BATCHES):
        next(batches)
    start_barrier.wait()
    start_s, samples = time.perf_counter(), 0
    while time.perf_counter() - start_s < SECONDS:
        samples += next(batches).batch_size
    results.put(samples / (time.perf_counter() - start_s))
    batches.close()


def measure_speed(folder: Path, case: str, *, batch_size: int, num_processes: int) -> float:
    """Return the samples per second of the slowest of several concurrent processes."""
    start_barrier, results = _CONTEXT.Barrier(num_processes), _CONTEXT.Queue()
    processes = [
        _CONTEXT.Process(target=_load, args=(folder, case, batch_size, rank, num_processes, start_barrier, results))
        for rank in range(num_processes)
    ]
    return float(min(_run_processes(processes, results)))


def _run_processes(processes: list[Any], results: Any) -> list[Any]:
    """Run the processes to their end; return the values that they put into the queue `results`."""
    for process in processes:
        process.start()
    values: list[Any] = []
    while len(values) < len(processes):
        try:
            values.append(results.get(timeout=1))
        except queue.Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
                raise
    for process in processes:
        process.join()
    return values


def measure() -> dict[str, Any]:
    """Return the samples per second of each case, batch size and number of processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_store(folder)
        speeds = [
            {
                "case": case,
                "batch_size": batch_size,
                "processes": processes,
                "samples_per_s": measure_speed(folder, case, batch_size=batch_size, num_processes=processes),
            }
            for case in CASES
            for batch_size in BATCH_SIZES
            for processes in (1, 2)
        ]
    return {"speeds": speeds}


def to_markdown(results: dict[str, Any]) -> str:
    """Return the table."""
    lines = [
        f"The table has the samples per second that each process loads from a log of {EVENTS:,} events. A process has one",
        "loading thread. The processes do not train a model.",
        "",
        "| content of a sample | batch size | samples/s with 1 process | samples/s of each of 2 processes |",
        "|:---|---:|---:|---:|",
    ]
    speeds = {(row["case"], row["batch_size"], row["processes"]): row["samples_per_s"] for row in results["speeds"]}
    for case, batch_size in dict.fromkeys((case, batch_size) for case, batch_size, _ in speeds):
        one, two = (speeds[case, batch_size, processes] for processes in (1, 2))
        lines.append(f"| {case} | {batch_size:,} | {one:,.0f} | {two:,.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown(measure()))
