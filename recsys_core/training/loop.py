"""The training loop of one rank."""

import math
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from recsys_core.data.batch import Batch
from recsys_core.data.events import EventStore
from recsys_core.data.loader import TrainLoader
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import EmbeddingsManifest, InteractionsManifest, require_manifest
from recsys_core.models.two_tower import query_features
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.checkpoint import checkpoint_name, latest_checkpoint, restore, save_checkpoint
from recsys_core.training.distributed import blank_users, build_model, load_pretrained
from recsys_core.training.job import Progress, TrainJob, TrainResult
from recsys_core.training.optimizers import Warmup, make_optimizer
from recsys_core.training.process import Process

RESULT_NAME = "result.json"
METRICS_NAME = "metrics.jsonl"
CHECKPOINTS_NAME = "checkpoints"


def run_training(job: TrainJob, *, process: Process) -> None:
    """Trains from the newest checkpoint of `job` (or from scratch) to the last step; rank 0 writes result.json."""
    config = job.training
    interactions = require_manifest(job.interactions, InteractionsManifest, verify=False)
    store = EventStore.open(interactions)
    loader = TrainLoader(
        store,
        batch_size=config.batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=config.seed,
        max_history=job.spec.config.max_history,
        features=query_features(job.spec.config),
        uniform_negatives=job.loss.uniform_negatives,
    )
    if len(loader) == 0:
        raise InputError(
            f"{interactions.train_events} training events for {process.world_size} ranks: fewer than one each; "
            "use fewer processes or more data"
        )
    model = _first_model(job, store=store, interactions=interactions, process=process)
    optimizer = make_optimizer(model, config=config)
    warmup = Warmup(optimizer, steps=config.warmup_steps)
    checkpoints = job.work / CHECKPOINTS_NAME
    checkpoint = latest_checkpoint(checkpoints, fingerprint=job.fingerprint)
    first_step = checkpoint.step if checkpoint is not None else 0
    if checkpoint is not None:
        restore(model, optimizer, checkpoint=checkpoint.folder)

    total_steps = config.epochs * len(loader)
    meter = _Meter(job.work / METRICS_NAME, process=process, total_steps=total_steps, first_step=first_step)
    pipeline = TrainPipelineSparseDist(model, optimizer, process.device)
    batches = _batches(loader, first_step=first_step, epochs=config.epochs)
    model.train()
    for step in range(first_step, total_steps):
        scale = warmup.set_step(step)
        # Dropout as a function of (seed, step, rank): nothing to save, and a resumed run draws the same.
        torch.manual_seed((config.seed * 1_000_003 + step) * 4_099 + process.rank)
        meter.add(pipeline.progress(batches), samples=loader.batch_samples(step % len(loader)) * process.world_size)
        done = step + 1
        saves = done % config.checkpoint_every_steps == 0 or done == total_steps
        if done % config.log_every_steps == 0 or saves:
            meter.log(done, epoch=step // len(loader) + 1, learning_rate=scale * config.table_learning_rate)
        if saves:
            save_checkpoint(
                model,
                optimizer,
                folder=checkpoints,
                step=done,
                fingerprint=job.fingerprint,
                keep=config.keep_checkpoints,
                process=process,
            )
    if process.leads:
        result = TrainResult(
            steps=total_steps,
            epochs=config.epochs,
            examples=config.epochs * loader.epoch_samples * process.world_size,
            final_loss=meter.last_loss,
            samples_per_s=meter.samples_per_s,
            world_size=process.world_size,
            checkpoint=checkpoint_name(total_steps),
        )
        (job.work / RESULT_NAME).write_text(result.model_dump_json())


def _first_model(
    job: TrainJob, *, store: EventStore, interactions: InteractionsManifest, process: Process
) -> DistributedModelParallel:
    """The sharded model before its first step: random rows, pretrained ones over them, zeros for users we know nothing of."""
    model = build_model(
        job.spec,
        loss=job.loss,
        item_count_I=store.item_count,
        plan=PlanFile.read(job.plan),
        process=process,
        table_learning_rate=job.training.table_learning_rate,
        seed=job.training.seed,
    )
    vector_rows: dict[str, NDArray[np.int64]] = {}
    if job.embeddings is not None:
        embeddings = require_manifest(job.embeddings, EmbeddingsManifest, verify=False)
        vector_rows = _vector_rows(embeddings, interactions=interactions, tables=job.spec.tables)
        load_pretrained(model, embeddings=embeddings, vector_rows=vector_rows, config=job.pretrained)
    if job.spec.config.user_id:
        known = store.train_end > store.user_offset[:-1]
        blank_users(model, known=known | (vector_rows["user"] >= 0) if "user" in vector_rows else known)
    return model


def _vector_rows(
    embeddings: EmbeddingsManifest, *, interactions: InteractionsManifest, tables: Collection[str]
) -> dict[str, NDArray[np.int64]]:
    """For each table of the model that has vectors: where in them each of its rows finds its own, -1 for nowhere."""
    files = {"item": "vector_row.npy", "user": "user_vector_row.npy"}
    return {
        table: np.load(interactions.path(file))
        for table, file in files.items()
        if table in embeddings.tables and table in tables and file in interactions.files
    }


def _batches(loader: TrainLoader, *, first_step: int, epochs: int) -> Iterator[Batch]:
    """All batches from `first_step` on; the pipeline reads ahead across the ends of epochs."""
    first_epoch, first_batch = divmod(first_step, len(loader))
    for epoch in range(first_epoch, epochs):
        yield from loader.epoch(epoch, start_batch=first_batch if epoch == first_epoch else 0)


class _Meter:
    """Mean loss over ranks and steps since the last line, and throughput; rank 0 appends to metrics.jsonl."""

    def __init__(self, path: Path, *, process: Process, total_steps: int, first_step: int) -> None:
        self._path, self._process, self._total_steps = path, process, total_steps
        self._loss = torch.zeros(2, dtype=torch.float64, device=process.device)
        self._samples = self._all_samples = 0
        self._since = self._started = time.perf_counter()
        self.last_loss = float("nan")
        if process.leads:  # lines after the checkpoint are written again
            lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
            kept = [line for line in lines if line.endswith("\n") and Progress.model_validate_json(line).step <= first_step]
            replacement = path.with_name(path.name + ".new")
            replacement.write_text("".join(kept))
            replacement.replace(path)  # whoever follows the file sees another inode, never a line that changes under it
            if kept:
                self.last_loss = Progress.model_validate_json(kept[-1]).loss

    def add(self, loss: Tensor, *, samples: int) -> None:
        """Counts one step; `samples` over all ranks."""
        self._loss[0] += loss
        self._loss[1] += 1
        self._samples += samples

    def log(self, step: int, *, epoch: int, learning_rate: float) -> None:
        """Collective. Appends a line and starts a new window."""
        dist.all_reduce(self._loss)
        self.last_loss = (self._loss[0] / self._loss[1]).item()
        if not math.isfinite(self.last_loss):
            raise StageError(
                f"step {step}, epoch {epoch}: the loss is {self.last_loss}; lower training.table_learning_rate or "
                "training.dense_learning_rate, or raise model.temperature"
            )
        now = time.perf_counter()
        line = Progress(
            step=step,
            total_steps=self._total_steps,
            epoch=epoch,
            loss=self.last_loss,
            learning_rate=learning_rate,
            samples_per_s=self._samples / (now - self._since),
        )
        if self._process.leads:
            with self._path.open("a") as file:
                file.write(line.model_dump_json() + "\n")
        self._all_samples += self._samples
        self._samples, self._since = 0, now
        self._loss.zero_()

    @property
    def samples_per_s(self) -> float:
        """Over all that this process trained, checkpoints included."""
        return self._all_samples / (time.perf_counter() - self._started)
