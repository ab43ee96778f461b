"""Who is compared: TorchRec's retrieval example, and our trainer fed in several ways, each with its ranks."""

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
from recsys_core.data.assembly import Assembler
from recsys_core.data.batch import Batch
from recsys_core.data.events import EventStore
from recsys_core.data.interactions.config import GivenSplit, InteractionsConfig
from recsys_core.data.interactions.ingest import ingest_interactions
from recsys_core.data.loader import TrainLoader
from recsys_core.manifests import Dataset, InteractionsManifest, require_manifest
from recsys_core.models.config import HistoryConfig, TowerConfig, TwoTowerConfig
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.table_config import TableConfig
from recsys_core.patches import cpu_features, lookups
from recsys_core.patches import rank as rank_patches
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, ShardingKind, TableConstraint
from recsys_core.sharding.planner import plan_sharding
from recsys_core.sharding.sharders import UNPOOLED_SHARDING_TYPES
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job_spec import Progress, TrainJob
from recsys_core.training.loop import METRICS_NAME, Training, make_loader
from recsys_core.training.process_group import Process
from recsys_core.training.sharded_model import first_model

ROWS, DIM, LAYERS = 1 << 20, 64, (128, 64)
EVENTS = 3 << 20
WARM_UP, WINDOW, WINDOWS = 20, 20, 3
"""Steps that are not counted, steps that are timed together, and how often, where sharding types are measured."""
BEST_KIND: ShardingKind = "table_wise"
"""Of both tables in the comparison: what the example's planner chooses too."""
EXAMPLE, PREPARED, OURS, MADE = "example", "example, its ranks prepared as ours", "ours, fp32", "ours, made beforehand"
CONTESTANTS = (EXAMPLE, PREPARED, OURS, MADE, "ours, bf16")
CPU_FEATURES = "cpu features"
REPLACED = {
    "bags of one": (lookups, "patch_cpu_kernels"),
    "freed memory": (rank_patches, "keep_freed_memory"),
    "own cores": (rank_patches, "keep_to_own_cores"),
    "batch work": (rank_patches, "run_as_batch_work"),
}
PATCHES = (CPU_FEATURES, *REPLACED)
"""Those that make a step faster; REPLACED: the function that is left out where the patch is."""
Paced = Callable[[Iterable[Any]], Iterator[Any]]
_CONTEXT = multiprocessing.get_context("spawn")


def without(patch: str) -> str:
    """Name of the contestant that is ours, fp32 but for `patch`."""
    return f"ours, without {patch}"


class Run(NamedTuple):
    """One contestant. kind: of the user table (a bag of one where it has to be), and of the item table where it can have it."""

    name: str
    batch_size: int
    ranks: int = 2
    kind: ShardingKind = BEST_KIND
    warm_up: int = WARM_UP
    window: int = WINDOW
    windows: int = WINDOWS

    @property
    def steps(self) -> int:
        """All."""
        return self.warm_up + self.windows * self.window


def write_log(folder: Path) -> InteractionsManifest:
    """Pairs drawn alike from all users and items, each of which occurs, as parquet; and what the ingest makes of them."""
    rng = np.random.default_rng(0)
    more = EVENTS - ROWS
    user = np.concatenate([rng.permutation(ROWS), rng.integers(0, ROWS, more)])
    item = np.concatenate([rng.permutation(ROWS), rng.integers(0, ROWS, more)])
    table = pa.table({"user_id": user, "item_id": item})
    pq.write_table(table, folder / "log.parquet")
    pq.write_table(table.slice(0, 1_000), folder / "test.parquet")  # asked for by the split, never looked at
    split = GivenSplit(test=(str(folder / "test.parquet"),), validation_share=0.0)
    config = InteractionsConfig(paths=(str(folder / "log.parquet"),), split=split)
    return ingest_interactions(config, embeddings=None, folder=folder / "interactions")


class Steps:
    """An epoch of as many batches as are wanted: from the loader, or made beforehand."""

    def __init__(self, loader: TrainLoader, *, steps: int, made: bool, paced: Paced | None) -> None:
        self._loader, self._steps, self._paced = loader, steps, paced
        self.epoch_samples = steps * loader.batch_samples(0)
        self._made = [loader.make(0, step) for step in range(min(steps, len(loader)))] if made else None

    def __len__(self) -> int:
        return self._steps

    def batch_samples(self, batch: int) -> int:
        """Queries of each batch: every epoch's last one is whole too."""
        return self._loader.batch_samples(0)

    def epoch(self, epoch: int, *, start_batch: int) -> Iterator[Batch]:
        """The batches."""
        batches = chain.from_iterable(self._epochs())
        yield from islice(batches, self._steps) if self._paced is None else self._paced(batches)

    def _epochs(self) -> Iterator[Iterable[Batch]]:
        for epoch in count():
            yield self._loader.epoch(epoch) if self._made is None else self._made


def ours(run: Run, *, folder: Path, process: Process, paced: Paced | None) -> dict[str, Any]:
    """Samples per second over the counted windows, and the mean of their times."""
    interactions = require_manifest(folder / "interactions", InteractionsManifest, verify=False)
    model = TwoTowerConfig(
        embedding_dim=DIM,
        similarity="dot",
        temperature=1.0,
        user_id=True,
        history=HistoryConfig(length=0, last_item=False),
        query=TowerConfig(layers=LAYERS, skip_connection=False, dropout=0.0),
        candidate=TowerConfig(layers=LAYERS, skip_connection=False, dropout=0.0),
    )
    loss = LossConfig(kind="bce", num_negatives=1)
    pools = run.kind not in UNPOOLED_SHARDING_TYPES
    spec = ModelSpec.of(
        model, dataset=Dataset(interactions), loss=loss, tables={"user": TableConfig(lookup="pooled" if pools else "unpooled")}
    )
    training = TrainingConfig(
        epochs=1,
        batch_size=run.batch_size,
        validation=None,
        log_every_steps=run.window,
        checkpoint_every_steps=10**9,
        precision="bf16" if "bf16" in run.name else "fp32",
    )
    cluster = ClusterConfig(device="cpu", processes_per_node=run.ranks)
    item = "row_wise" if pools else run.kind
    tables = {"user": TableConstraint(sharding_types=(run.kind,)), "item": TableConstraint(sharding_types=(item,))}
    work = folder / run.name
    if process.is_main:
        plan_sharding(
            ShardingConfig(cluster=cluster, tables=tables), model=spec, batch_size=run.batch_size, folder=work / "plan"
        )
    dist.barrier()
    job = TrainJob(
        work=work,
        fingerprint="bench",
        spec=spec,
        loss=loss,
        training=training,
        interactions=interactions.folder,
        embeddings=None,
        features=None,
        plan=work / "plan" / "plan.json",
    )
    store = EventStore.open(interactions)
    loader = make_loader(job, store=store, assembler=Assembler(user=job.spec.user_batch_key, features=None), process=process)
    short: Any = Steps(loader, steps=run.steps, made="made" in run.name, paced=paced)
    sharded = first_model(job, store=store, dataset=Dataset(interactions), process=process)
    trainer = Training(job, model=sharded, loader=short, process=process)
    trainer._save = lambda: None  # type: ignore[method-assign]  # a checkpoint of random rows is of no interest here
    trainer.run()
    if not process.is_main:
        return {}
    lines = [Progress.model_validate_json(line) for line in (work / METRICS_NAME).read_text().splitlines()]
    counted = [line for line in lines if line.step > run.warm_up]
    times = {name: statistics.fmean(line.ms_per_step[name] for line in counted) for name in counted[0].ms_per_step}
    return {"samples_per_s": statistics.harmonic_mean([line.samples_per_s for line in counted]), "ms_per_step": times}


def _rank(run: Run, rank: int, folder: Path, pipe: Connection, is_paced: bool) -> None:
    torch.set_num_threads(1)  # torchrun's own default too
    for patch, (module, function) in REPLACED.items():
        if run.name == without(patch):
            setattr(module, function, lambda *_, **__: None)
    if run.name != EXAMPLE:
        rank_patches.prepare_rank(rank=rank, ranks=run.ranks)
    store = f"file://{folder / run.name}.group"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=run.ranks, timeout=timedelta(minutes=10))
    paced = Turns(pipe, window=run.window, windows=run.windows).paced if is_paced else None
    if run.name.startswith(EXAMPLE):
        assert paced is not None
        os.environ |= {"LOCAL_WORLD_SIZE": str(run.ranks), "LOCAL_RANK": str(rank)}
        torchrec_loop.train(rows=ROWS, dim=DIM, layers=list(LAYERS), batch_size=run.batch_size, paced=paced)
    else:
        process = Process(rank=rank, world_size=run.ranks, device=torch.device("cpu"))
        answer = ours(run, folder=folder, process=process, paced=paced)
        if rank == 0 and not is_paced:
            pipe.send(answer)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def started(run: Run, *, folder: Path, is_paced: bool) -> Iterator[list[Connection]]:
    """The ranks of one contestant, by a pipe to each; they are done when it is left."""
    pipes, ranks = [], []
    if run.name not in (EXAMPLE, without(CPU_FEATURES)):
        os.environ["LD_PRELOAD"] = str(cpu_features.library())  # share_cpu_features() for processes that import torch at once
    for rank in range(run.ranks):
        here, there = _CONTEXT.Pipe()
        ranks.append(_CONTEXT.Process(target=_rank, args=(run, rank, folder, there, is_paced)))
        ranks[-1].start()
        there.close()  # so that a rank's end is seen
        pipes.append(here)
    os.environ.pop("LD_PRELOAD", None)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()  # a rank that still waits for its turn ends
        for process in ranks:
            process.join()
    shutil.rmtree(folder / run.name, ignore_errors=True)
    (folder / f"{run.name}.group").unlink(missing_ok=True)
