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

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import UNPOOLED, Feature, FeatureStore
from recsys_core.dataset.layout import EventArrays, array_file, memory_map
from recsys_core.dataset.loader import ExampleSource, RankShare, TrainLoader

NUM_EVENTS, NUM_USERS, NUM_ITEMS = 20_000_000, 1_000_000, 200_000
BATCH_SIZES = (1_024, 8_192)
MEASURED_S, WARM_UP_BATCHES = 3.0, 20
CONTENT_BY_CASE = {
    "two ids": (0, ()),
    "history of 20": (20, ()),
    "history of 20, six features": (
        20,
        ("user.segment", "user.interests", "item.brand", "item.price", "item.tags", "context.device"),
    ),
}
"""Maximum length of a history, and features in addition to the ids, by name of the case."""
SHAPE_BY_FEATURE = {
    "user.segment": (NUM_USERS, 0), "user.interests": (NUM_USERS, 5), "item.brand": (NUM_ITEMS, 0),
    "item.price": (NUM_ITEMS, 0), "item.tags": (NUM_ITEMS, 4), "context.device": (NUM_EVENTS, 0),
}  # fmt: skip
"""Number of users, items or events, and mean length of a list (0 for single values), by feature. item.tags has weights."""
_CONTEXT = multiprocessing.get_context("spawn")


def write_store(folder: Path) -> None:
    """Write random events and features in the format of the ingest stages."""
    rng = np.random.default_rng(0)
    num_events_U = rng.multinomial(NUM_EVENTS, rng.dirichlet(np.full(NUM_USERS, 2.0))).astype(np.int64)
    user_offset = np.concatenate([[0], np.cumsum(num_events_U)])
    event_item = (NUM_ITEMS * rng.random(NUM_EVENTS) ** 3).astype(np.int32)  # skewed popularity
    array_by_name = {
        "user_offset": user_offset,
        "train_end": user_offset[1:],
        "validation_end": user_offset[1:],
        "event_item": event_item,
        "train_user": np.repeat(np.arange(NUM_USERS, dtype=np.int32), num_events_U),
        "item_count": np.bincount(event_item, minlength=NUM_ITEMS),
        "vector_row": np.full(NUM_ITEMS, -1),
    }
    for feature_name, (num_owners, mean_length) in SHAPE_BY_FEATURE.items():
        num_values = num_owners
        if mean_length:
            array_by_name[f"{feature_name}.offset"] = np.concatenate(
                [[0], np.cumsum(rng.integers(0, 2 * mean_length + 1, num_owners))]
            )
            num_values = int(array_by_name[f"{feature_name}.offset"][-1])
        array_by_name[f"{feature_name}.row"] = rng.integers(0, 1_000, num_values, dtype=np.int32)
    array_by_name["item.tags.weight"] = rng.random(len(array_by_name["item.tags.row"]), dtype=np.float32)
    for name, array in array_by_name.items():
        np.save(folder / f"{name}.npy", array)


def open_store(folder: Path) -> tuple[EventStore, FeatureStore]:
    """Open the store that `write_store` wrote into `folder`, with memory-mapped arrays."""
    array_names = ("user_offset", "train_end", "validation_end", "event_item", "train_user", "item_count", "vector_row")
    arrays = EventArrays(**{name: memory_map(folder / array_file(name)) for name in array_names})
    store = EventStore(arrays, is_ordered=True)

    def feature_array(feature_name: str, name: str) -> Any:
        path = folder / f"{feature_name}.{name}.npy"
        return memory_map(path) if path.is_file() else None

    return store, FeatureStore(
        {
            feature_name: Feature(
                table_rows=feature_array(feature_name, "row"),
                offset=feature_array(feature_name, "offset"),
                weights=feature_array(feature_name, "weight"),
            )
            for feature_name in SHAPE_BY_FEATURE
        }
    )


def _loader(folder: Path, case_name: str, *, batch_size: int, rank: int, world_size: int) -> TrainLoader:
    store, features = open_store(folder)
    max_history, feature_names = CONTENT_BY_CASE[case_name]
    assembler = Assembler(
        user_batch_key=None if max_history else UNPOOLED,
        features=FeatureStore({name: features.feature_by_key[name] for name in feature_names}) if feature_names else None,
    )
    examples = ExampleSource(store, assembler, max_history=max_history)
    return TrainLoader(examples, batch_size=batch_size, rank_share=RankShare(rank, world_size), seed=1)


def _load_batches(
    folder: Path, case_name: str, batch_size: int, rank: int, world_size: int, start_barrier: Any, results: Any
) -> None:
    """Load batches for MEASURED_S in one rank, and put the samples per second into the queue `results`."""
    torch.set_num_threads(1)
    loader = _loader(folder, case_name, batch_size=batch_size, rank=rank, world_size=world_size)
    batches = (batch for epoch in range(1_000) for batch in loader.epoch(epoch))
    for _ in range(WARM_UP_BATCHES):
        next(batches)
    start_barrier.wait()
    start_s, num_samples = time.perf_counter(), 0
    while time.perf_counter() - start_s < MEASURED_S:
        num_samples += next(batches).batch_size
    results.put(num_samples / (time.perf_counter() - start_s))
    batches.close()


def measure_speed(folder: Path, case_name: str, *, batch_size: int, num_processes: int) -> float:
    """Return the samples per second of the slowest of several concurrent processes."""
    start_barrier, results = _CONTEXT.Barrier(num_processes), _CONTEXT.Queue()
    processes = [
        _CONTEXT.Process(
            target=_load_batches, args=(folder, case_name, batch_size, rank, num_processes, start_barrier, results)
        )
        for rank in range(num_processes)
    ]
    return float(min(_run_processes(processes, results)))


def _run_processes(processes: list[Any], results: Any) -> list[Any]:
    """Run the processes to their end. Return the values that they put into the queue `results`."""
    for process in processes:
        process.start()
    queued_values: list[Any] = []
    while len(queued_values) < len(processes):
        try:
            queued_values.append(results.get(timeout=1))
        except queue.Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
                raise
    for process in processes:
        process.join()
    return queued_values


def measure() -> dict[str, Any]:
    """Return the samples per second of each case, batch size and number of processes."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_store(folder)
        speeds = [
            {
                "case": case_name,
                "batch_size": batch_size,
                "processes": num_processes,
                "samples_per_s": measure_speed(folder, case_name, batch_size=batch_size, num_processes=num_processes),
            }
            for case_name in CONTENT_BY_CASE
            for batch_size in BATCH_SIZES
            for num_processes in (1, 2)
        ]
    return {"speeds": speeds}


def to_markdown(results: dict[str, Any]) -> str:
    """Return the table."""
    lines = [
        f"The table has the samples per second that each process loads from a log of {NUM_EVENTS:,} events. A process has one",
        "loading thread. The processes do not train a model.",
        "",
        "| content of a sample | batch size | samples/s with 1 process | samples/s of each of 2 processes |",
        "|:---|---:|---:|---:|",
    ]
    speed_by_case = {
        (result["case"], result["batch_size"], result["processes"]): result["samples_per_s"] for result in results["speeds"]
    }
    for case_name, batch_size in dict.fromkeys((case_name, batch_size) for case_name, batch_size, _ in speed_by_case):
        speed_of_one, speed_of_two = (speed_by_case[case_name, batch_size, num_processes] for num_processes in (1, 2))
        lines.append(f"| {case_name} | {batch_size:,} | {speed_of_one:,.0f} | {speed_of_two:,.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown(measure()))
