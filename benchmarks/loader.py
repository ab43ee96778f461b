"""How fast the loader makes batches, alone and two at once, and what it costs the training step.

    python -m benchmarks.loader          # prints the tables; `make bench-ingest` puts them into its own

A store of 20,000,000 events lies in a temporary folder. Speeds are what a trainer sees that does nothing but take batches. The
cost is training with the loader against training on the very same batches made beforehand, in turns, in one run.
"""

import multiprocessing
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_core.data.batch import Batch
from recsys_core.data.events import EventStore, mapped
from recsys_core.data.features.store import Feature, FeatureStore
from recsys_core.data.loader import TrainLoader
from recsys_core.models.config import LossConfig, ModelSpec, TwoTowerConfig
from recsys_core.models.two_tower import query_features
from recsys_core.sharding.config import ClusterConfig, ShardingConfig
from recsys_core.sharding.planner import make_plan
from recsys_core.training.config import TrainingConfig
from recsys_core.training.distributed import build_model
from recsys_core.training.optimizers import make_optimizer
from recsys_core.training.process import Process

EVENTS, USERS, ITEMS = 20_000_000, 1_000_000, 200_000
BATCH_SIZES = (1_024, 8_192)
SECONDS, WARM_UP_BATCHES = 3.0, 20
MODELS = {
    "two ids": TwoTowerConfig(user_id=True, max_history=0, last_item=False),
    "history of 20": TwoTowerConfig(max_history=20),
}
"""The first has the quickest step that the towers know (with bce), the second is the default model."""
LOSSES = {
    "two ids": LossConfig(kind="bce", uniform_negatives=64),
    "history of 20": LossConfig(uniform_negatives=512),
}
CASES = {
    "two ids": ("user",),
    "history of 20": ("history",),
    "history of 20, six features": ("history",),
}
"""Beside the item id."""
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


def _loader(
    folder: Path,
    case: str,
    features_of_queries: Sequence[str],
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    negatives: int,
) -> TrainLoader:
    store, features = open_store(folder)
    return TrainLoader(
        store,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        seed=1,
        uniform_negatives=negatives,
        feature_store=features if "features" in case else None,
        features=features_of_queries,
        max_history=20 if "history" in case else 0,
    )


def _alone(folder: Path, case: str, batch_size: int, rank: int, world_size: int, start: Any, answers: Any) -> None:
    """Samples per second of one rank."""
    torch.set_num_threads(1)
    loader = _loader(folder, case, CASES[case], batch_size=batch_size, rank=rank, world_size=world_size, negatives=0)
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
    return min(_answers(ranks, answers))


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


def _fresh(batch: Batch) -> Batch:
    """The same tensors in a new KeyedJaggedTensor: one that has been trained on keeps what it worked out."""
    sparse = batch.sparse
    again = KeyedJaggedTensor(keys=sparse.keys(), values=sparse.values(), lengths=sparse.lengths())
    return replace(batch, sparse=again)


def _train(folder: Path, case: str, batch_size: int, rank: int, world_size: int, answers: Any) -> None:
    """Wall and CPU seconds of each segment with the loader and with its batches made beforehand."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world_size, timeout=timedelta(minutes=10)
    )
    process = Process(rank=rank, world_size=world_size, device=torch.device("cpu"))
    queries = query_features(MODELS[case])
    negatives = LOSSES[case].uniform_negatives
    loader = _loader(folder, case, queries, batch_size=batch_size, rank=rank, world_size=world_size, negatives=negatives)
    spec = ModelSpec(config=MODELS[case], users=USERS, items=ITEMS)
    cluster = ClusterConfig(device="cpu", processes_per_node=world_size)
    settings = TrainingConfig(batch_size=batch_size)
    model = build_model(
        spec,
        loss=LOSSES[case],
        item_count_I=open_store(folder)[0].item_count,
        plan=make_plan(ShardingConfig(cluster=cluster), model=spec, batch_size=batch_size),
        process=process,
        table_learning_rate=settings.table_learning_rate,
        seed=1,
    )
    pipeline = TrainPipelineSparseDist(model, make_optimizer(model, config=settings), process.device)
    steps = max(8, SEGMENT_SAMPLES // batch_size)
    made = [loader.make(0, step) for step in range(steps)]

    def segment(batches: Iterator[Batch], kind: str) -> None:
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(steps):
            pipeline.progress(batches)
        dist.barrier()
        seconds[kind].append(time.perf_counter() - began)
        cpu[kind].append(time.process_time() - worked)

    def all_of(whole: Iterator[Batch]) -> Iterator[Batch]:
        # The pipeline takes three batches ahead: after the segment's own they come from the list, whoever gave the others.
        for _ in range(steps):
            yield next(whole)
        yield from map(_fresh, made[:4])

    seconds: dict[str, list[float]] = {"loader": [], "made": [], "warm-up": []}
    cpu: dict[str, list[float]] = {"loader": [], "made": [], "warm-up": []}
    segment(map(_fresh, made + made[:4]), "warm-up")
    for _ in range(SEGMENTS):
        batches = loader.epoch(0)
        segment(all_of(batches), "loader")
        batches.close()  # type: ignore[attr-defined]
        segment(map(_fresh, made + made[:4]), "made")
    answers.put({"samples": steps * batch_size, "seconds": seconds, "cpu": cpu})
    dist.barrier()
    dist.destroy_process_group()


def measure_training(folder: Path, case: str, *, batch_size: int) -> dict[str, float]:
    """Samples per second and rank with the loader and without, two gloo ranks; the loader's share of the time."""
    answers = _CONTEXT.Queue()
    ranks = [_CONTEXT.Process(target=_train, args=(folder, case, batch_size, rank, 2, answers)) for rank in range(2)]
    found = _answers(ranks, answers)[0]
    (folder / "group").unlink(missing_ok=True)
    loader, made = (statistics.median(found["seconds"][name]) for name in ("loader", "made"))
    cpu_loader, cpu_made = (statistics.median(found["cpu"][name]) for name in ("loader", "made"))
    return {
        "with_loader": found["samples"] / loader,
        "made_beforehand": found["samples"] / made,
        "share": 1 - made / loader,
        "cpu_share": 1 - cpu_made / cpu_loader,
    }


def measure() -> dict[str, Any]:
    """All figures: {"alone": [...], "training": [...]}."""
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
        training = [
            {"case": case, "batch_size": batch_size} | measure_training(folder, case, batch_size=batch_size)
            for case in MODELS
            for batch_size in BATCH_SIZES
        ]
    return {"alone": alone, "training": training}


def to_markdown(results: dict[str, Any]) -> str:
    """Both tables."""
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
    lines += [
        "",
        "Two gloo ranks that train, samples/s and rank, with the loader and on the same batches made beforehand:",
        "",
        "| | batch | with the loader | made beforehand | the loader's share of the time | of the CPU time |",
        "|:---|---:|---:|---:|---:|---:|",
    ]
    for row in results["training"]:
        lines.append(
            f"| {row['case']} | {row['batch_size']:,} | {row['with_loader']:,.0f} | {row['made_beforehand']:,.0f} "
            f"| {row['share']:.1%} | {row['cpu_share']:.1%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown(measure()))
