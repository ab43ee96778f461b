"""Contestants of the training benchmark: TorchRec's retrieval example and nightjar's trainer, each with its ranks."""

import multiprocessing
import os
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, count, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import distributed as dist

from benchmarks import torchrec_loop
from benchmarks.turns import Turns
from recsys_core.dataset.batch import Assembler, Batch
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.loader import TrainLoader
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.launching import rank as rank_process
from recsys_core.launching.rank import Process
from recsys_core.manifests import Dataset, InteractionsManifest, require_manifest
from recsys_core.models.config import TowerConfig, TwoTowerConfig
from recsys_core.models.history_config import MeanHistory
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableConfig
from recsys_core.patches import cpu_features, lookups
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, ShardingType, TableConstraint
from recsys_core.sharding.constraints import UNPOOLED_SHARDING_TYPES
from recsys_core.sharding.planner import plan_sharding
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job import METRICS_FILE, Progress, TrainJob
from recsys_core.training.loop import Trainer, make_loader
from recsys_core.training.model.sharded_model import initial_model

NUM_ROWS, DIM, LAYERS = 1 << 20, 64, (128, 64)
"""Rows of each of the two tables, their width, and the widths of the layers of each tower."""
NUM_EVENTS = 3 << 20
WARM_UP_STEPS, WINDOW_STEPS, NUM_WINDOWS = 20, 20, 3
"""For the comparison of sharding types: steps before the measurement, steps per timed window, number of windows."""
BEST_TYPE: ShardingType = "table_wise"
"""Sharding type of both tables when contestants are compared. TorchRec's planner chooses it for the example too."""
EXAMPLE, PREPARED_EXAMPLE, OURS, OURS_PREPARED = "example", "example, prepared ranks", "ours, fp32", "ours, prepared batches"
CONTESTANTS = (EXAMPLE, PREPARED_EXAMPLE, OURS, OURS_PREPARED, "ours, bf16")
CPU_FEATURES = "cpu features"
FUNCTION_BY_PATCH = {
    "unpooled lookups": (lookups, "patch_cpu_kernels"),
    "core pinning": (rank_process, "pin_to_core_share"),
    "batch scheduling": (rank_process, "use_batch_scheduling"),
}
PATCH_NAMES = (CPU_FEATURES, *FUNCTION_BY_PATCH)
"""Patches that make a step faster. FUNCTION_BY_PATCH has the module and the function of each patch. A no-op replaces this
function in the measurement without the patch."""
Pace = Callable[[Iterable[Any]], Iterator[Any]]
"""Function that yields the given batches during the turns of its contestant; see Turns.pace."""
_CONTEXT = multiprocessing.get_context("spawn")


def name_without(patch: str) -> str:
    """Return the name of the contestant `ours, fp32` without `patch`."""
    return f"ours, without {patch}"


class Contestant(NamedTuple):
    """One contestant with its settings.

    sharding_type: sharding type of the user table. The item table has the same type if unpooled tables support it.
    """

    name: str
    batch_size: int
    num_ranks: int = 2
    sharding_type: ShardingType = BEST_TYPE
    warm_up_steps: int = WARM_UP_STEPS
    window_steps: int = WINDOW_STEPS
    num_windows: int = NUM_WINDOWS

    @property
    def num_steps(self) -> int:
        """Number of steps, including the warm-up."""
        return self.warm_up_steps + self.num_windows * self.window_steps


def write_log(folder: Path) -> InteractionsManifest:
    """Write and ingest a parquet log of random pairs in which every user and every item occurs."""
    rng = np.random.default_rng(0)
    num_random_events = NUM_EVENTS - NUM_ROWS
    user_ids = np.concatenate([rng.permutation(NUM_ROWS), rng.integers(0, NUM_ROWS, num_random_events)])
    item_ids = np.concatenate([rng.permutation(NUM_ROWS), rng.integers(0, NUM_ROWS, num_random_events)])
    table = pa.table({"user_id": user_ids, "item_id": item_ids})
    pq.write_table(table, folder / "log.parquet")
    pq.write_table(table.slice(0, 1_000), folder / "test.parquet")  # the split requires a test file
    split = FileSplit(test_paths=(str(folder / "test.parquet"),), validation_share=0.0)
    config = InteractionsConfig(paths=(str(folder / "log.parquet"),), split=split)
    return ingest_interactions(config, embeddings=None, folder=folder / "interactions")


class OneEpochLoader:
    """Loader of one long epoch with a fixed number of batches. The batches are loaded step by step, or all in advance."""

    def __init__(self, loader: TrainLoader, *, num_steps: int, loads_in_advance: bool, pace: Pace | None) -> None:
        self._loader, self._num_steps, self._pace = loader, num_steps, pace
        self.num_epoch_queries = num_steps * loader.num_batch_queries(0)
        self._batches = [loader.batch(0, step) for step in range(min(num_steps, len(loader)))] if loads_in_advance else None

    def __len__(self) -> int:
        return self._num_steps

    def num_batch_queries(self, index: int) -> int:
        """Return the number of queries of a batch. The last batch of an epoch is full too."""
        return self._loader.num_batch_queries(0)

    def epoch(self, epoch: int, *, start_batch: int) -> Iterator[Batch]:
        """Yield the batches."""
        batches = chain.from_iterable(self._epochs())
        yield from islice(batches, self._num_steps) if self._pace is None else self._pace(batches)

    def _epochs(self) -> Iterator[Iterable[Batch]]:
        for epoch in count():
            yield self._loader.epoch(epoch) if self._batches is None else self._batches


def train_with_nightjar(contestant: Contestant, *, folder: Path, process: Process, pace: Pace | None) -> dict[str, Any]:
    """Train with nightjar's trainer, and return the samples per second and the mean step times of the timed windows."""
    interactions = require_manifest(folder / "interactions", InteractionsManifest, verify=False)
    model_config = TwoTowerConfig(
        embedding_dim=DIM,
        similarity="dot",
        temperature=1.0,
        learn_user_embedding=True,
        history=MeanHistory(length=0, last_item_feature=False),
        query=TowerConfig(layers=LAYERS, skip_connection=False, dropout=0.0),
        candidate=TowerConfig(layers=LAYERS, skip_connection=False, dropout=0.0),
    )
    loss = LossConfig(kind="bce", num_negatives=1)
    is_pooled = contestant.sharding_type not in UNPOOLED_SHARDING_TYPES
    model_spec = ModelSpec.of(
        model_config,
        dataset=Dataset(interactions),
        loss=loss,
        tables={"user": TableConfig(lookup="pooled" if is_pooled else "unpooled")},
    )
    training = TrainingConfig(
        epochs=1,
        batch_size=contestant.batch_size,
        validation=None,
        log_every_steps=contestant.window_steps,
        checkpoint_every_steps=10**9,
        precision="bf16" if "bf16" in contestant.name else "fp32",
    )
    cluster = ClusterConfig(device="cpu", processes_per_node=contestant.num_ranks)
    item_sharding_type = "row_wise" if is_pooled else contestant.sharding_type
    constraint_by_table = {
        "user": TableConstraint(sharding_types=(contestant.sharding_type,)),
        "item": TableConstraint(sharding_types=(item_sharding_type,)),
    }
    work_folder = folder / contestant.name
    if process.is_main:
        plan_sharding(
            ShardingConfig(cluster=cluster, tables=constraint_by_table),
            model=model_spec,
            batch_size=contestant.batch_size,
            folder=work_folder / "plan",
        )
    dist.barrier()
    job = TrainJob(
        work_folder=work_folder,
        fingerprint="bench",
        spec=model_spec,
        loss=loss,
        training=training,
        interactions_folder=interactions.folder,
        embeddings_folder=None,
        features_folder=None,
        plan_path=work_folder / "plan" / "plan.json",
    )
    store = EventStore.open(interactions)
    train_loader = make_loader(
        job, store=store, assembler=Assembler(user_batch_key=job.spec.user_batch_key, features=None), process=process
    )
    one_epoch_loader: Any = OneEpochLoader(
        train_loader, num_steps=contestant.num_steps, loads_in_advance=contestant.name == OURS_PREPARED, pace=pace
    )
    sharded_model = initial_model(job, store=store, dataset=Dataset(interactions), process=process)
    trainer = Trainer(job, model=sharded_model, loader=one_epoch_loader, validator=None, process=process)
    trainer._save = lambda: None  # type: ignore[method-assign]  # no checkpoints in a benchmark
    trainer.train_epoch()
    trainer.end_epoch()
    if not process.is_main:
        return {}
    progress_reports = [Progress.model_validate_json(line) for line in (work_folder / METRICS_FILE).read_text().splitlines()]
    timed_reports = [report for report in progress_reports if report.step > contestant.warm_up_steps]
    mean_ms = {
        name: statistics.fmean(report.ms_per_step[name] for report in timed_reports) for name in timed_reports[0].ms_per_step
    }
    return {
        "samples_per_s": statistics.harmonic_mean([report.samples_per_s for report in timed_reports]),
        "ms_per_step": mean_ms,
    }


def _run_rank(contestant: Contestant, rank: int, folder: Path, pipe: Connection, takes_turns: bool) -> None:
    torch.set_num_threads(1)  # also torchrun's default
    for patch_name, (module, function_name) in FUNCTION_BY_PATCH.items():
        if contestant.name == name_without(patch_name):
            setattr(module, function_name, lambda *_, **__: None)
    if contestant.name != EXAMPLE:
        rank_process.pin_to_core_share(local_rank=rank, num_local_ranks=contestant.num_ranks)
        rank_process.use_batch_scheduling()
    rendezvous_url = f"file://{folder / contestant.name}.group"
    dist.init_process_group(
        "gloo", init_method=rendezvous_url, rank=rank, world_size=contestant.num_ranks, timeout=timedelta(minutes=10)
    )
    pace = Turns(pipe, window_steps=contestant.window_steps, num_windows=contestant.num_windows).pace if takes_turns else None
    if contestant.name.startswith(EXAMPLE):
        assert pace is not None
        os.environ |= {"LOCAL_WORLD_SIZE": str(contestant.num_ranks), "LOCAL_RANK": str(rank)}
        torchrec_loop.train(num_rows=NUM_ROWS, dim=DIM, layers=list(LAYERS), batch_size=contestant.batch_size, pace=pace)
    else:
        process = Process(rank=rank, world_size=contestant.num_ranks, device=torch.device("cpu"))
        result = train_with_nightjar(contestant, folder=folder, process=process, pace=pace)
        if rank == 0 and not takes_turns:
            pipe.send(result)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def running_ranks(contestant: Contestant, *, folder: Path, takes_turns: bool) -> Iterator[list[Connection]]:
    """Start the ranks of one contestant, yield a pipe to each, and wait on exit until the ranks have ended."""
    pipes, processes = [], []
    if contestant.name not in (EXAMPLE, name_without(CPU_FEATURES)):
        # share_cpu_features() would be too late, because a spawned process imports torch first.
        os.environ["LD_PRELOAD"] = str(cpu_features.libc10_path())
    for rank in range(contestant.num_ranks):
        parent_end, rank_end = _CONTEXT.Pipe()
        processes.append(_CONTEXT.Process(target=_run_rank, args=(contestant, rank, folder, rank_end, takes_turns)))
        processes[-1].start()
        rank_end.close()  # otherwise the end of a rank is not detected
        pipes.append(parent_end)
    os.environ.pop("LD_PRELOAD", None)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()  # ends a rank that waits for its turn
        for process in processes:
            process.join()
    shutil.rmtree(folder / contestant.name, ignore_errors=True)
    (folder / f"{contestant.name}.group").unlink(missing_ok=True)
