"""How fast the loader makes batches, alone and two at once.

    python -m benchmarks.loader          # prints the table; `make bench-ingest` puts them into its own

A store of 20,000,000 events lies in a temporary folder. Speeds are what a trainer sees that does nothing but take batches.
What the loader costs a training step is told by benchmarks/train.py.
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
from recsys_core.data.events import EventStore, mapped
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
"""Items of a history at most, and features beside the ids."""
FEATURES = {
    "user.segment": (USERS, 0), "user.interests": (USERS, 5), "item.brand": (ITEMS, 0), "item.price": (ITEMS, 0),
    "item.tags": (ITEMS, 4), "context.device": (EVENTS, 0),
}  # fmt: skip
"""Rows of the side, and for lists the mean length; item.tags is weighted."""
SEGMENTS, SEGMENT_SAMPLES = 4, 100_000
_CONTEXT = multiprocessing.get_context("spawn")


def write_store(folder: Path) -> None:
    """Random events and features, as the ingest stages write them."""
    rng = np.random.default_rng(0)
    length = rng.multinomial(EVENTS, rng.dirichlet(np.full(USERS, 2.0))).astype(np.int64)
    offset = np.concatenate([[0], np.cumsum(length)])
    item = (ITEMS * rng.random(EVENTS) ** 3).astype(np.int32)  # a few items have most of the events
    arrays = {
        "user_offset": offset,
        "train_end": offset[1:],
        "validation_end": offset[1:],
        "event_item": item,
        "train_user": np.repeat(np.arange(USERS, dtype=np.int32), length),
        "item_count": np.bincount(item, minlength=ITEMS),
        "vector_row": np.full(ITEMS, -1),
    }
    for key, (rows, mean) in FEATURES.items():
        values = rows
        if mean:
            arrays[f"{key}.offset"] = np.concatenate([[0], np.cumsum(rng.integers(0, 2 * mean + 1, rows))])
            values = int(arrays[f"{key}.offset"][-1])
        arrays[f"{key}.row"] = rng.integers(0, 1_000, values, dtype=np.int32)
    arrays["item.tags.weight"] = rng.random(len(arrays["item.tags.row"]), dtype=np.float32)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def open_store(folder: Path) -> tuple[EventStore, FeatureStore]:
    """Maps what write_store left in `folder`."""
    names = ("user_offset", "train_end", "validation_end", "event_item", "train_user", "item_count", "vector_row")
    store = EventStore(ordered=True, **{name: mapped(folder / f"{name}.npy") for name in names})

    def part(key: str, name: str) -> Any:
        path = folder / f"{key}.{name}.npy"
        return mapped(path) if path.is_file() else None

    return store, FeatureStore(
        {key: Feature(row=part(key, "row"), offset=part(key, "offset"), weight=part(key, "weight")) for key in FEATURES}
    )


def _loader(folder: Path, case: str, *, batch_size: int, rank: int, world_size: int) -> TrainLoader:
    store, features = open_store(folder)
    history, wanted = CASES[case]
    return TrainLoader(
        store,
        assembler=Assembler(
            user=None if history else UNPOOLED,
            features=FeatureStore({name: features.features[name] for name in wanted}) if wanted else None,
        ),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        seed=1,
        max_history=history,
    )


def _alone(folder: Path, case: str, batch_size: int, rank: int, world_size: int, start: Any, answers: Any) -> None:
    """Samples per second of one rank."""
    torch.set_num_threads(1)
    loader = _loader(folder, case, batch_size=batch_size, rank=rank, world_size=world_size)
    batches = (batch for epoch in range(1_000) for batch in loader.epoch(epoch))
    for _ in range(WARM_UP_BATCHES):
        next(batches)
    start.wait()
    began, samples = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        samples += next(batches).batch_size
    answers.put(samples / (time.perf_counter() - began))
    batches.close()


def measure_alone(folder: Path, case: str, *, batch_size: int, processes: int) -> float:
    """Samples per second and rank, the slowest of `processes` that load at once."""
    start, answers = _CONTEXT.Barrier(processes), _CONTEXT.Queue()
    ranks = [
        _CONTEXT.Process(target=_alone, args=(folder, case, batch_size, rank, processes, start, answers))
        for rank in range(processes)
    ]
    return float(min(_answers(ranks, answers)))


def _answers(ranks: list[Any], answers: Any) -> list[Any]:
    for rank in ranks:
        rank.start()
    found: list[Any] = []
    while len(found) < len(ranks):
        try:
            found.append(answers.get(timeout=1))
        except queue.Empty:
            if any(rank.exitcode for rank in ranks):
                for rank in ranks:
                    rank.kill()
                raise
    for rank in ranks:
        rank.join()
    return found


def measure() -> dict[str, Any]:
    """All figures: {"alone": [...]}."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_store(folder)
        alone = [
            {
                "case": case,
                "batch_size": batch_size,
                "processes": processes,
                "samples_per_s": measure_alone(folder, case, batch_size=batch_size, processes=processes),
            }
            for case in CASES
            for batch_size in BATCH_SIZES
            for processes in (1, 2)
        ]
    return {"alone": alone}


def to_markdown(results: dict[str, Any]) -> str:
    """The table."""
    lines = [
        f"The loader alone, {EVENTS:,} events, one thread per rank, samples/s and rank:",
        "",
        "| | batch | 1 process | 2 at once |",
        "|:---|---:|---:|---:|",
    ]
    speeds = {(row["case"], row["batch_size"], row["processes"]): row["samples_per_s"] for row in results["alone"]}
    for case, batch_size in dict.fromkeys((case, batch_size) for case, batch_size, _ in speeds):
        one, two = (speeds[case, batch_size, processes] for processes in (1, 2))
        lines.append(f"| {case} | {batch_size:,} | {one:,.0f} | {two:,.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown(measure()))
