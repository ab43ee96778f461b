"""What training is like: loss, throughput, times, memory, validation metrics, line by line in metrics.jsonl."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys_core.atomic import write_text
from recsys_core.errors import StageError
from recsys_core.models.embedding_tables import table_shards
from recsys_core.models.spec import ModelSpec
from recsys_core.training.dense_parallel import local
from recsys_core.training.job_spec import Progress
from recsys_core.training.process_group import Process
from recsys_core.training.step_timer import StepTimes


class Meter:
    """Mean loss over ranks and steps since the last line, and throughput; rank 0 appends to metrics.jsonl."""

    def __init__(self, path: Path, *, process: Process, total_steps: int, first_step: int) -> None:
        self._path, self._process, self._total_steps = path, process, total_steps
        self._loss = torch.zeros(2, dtype=torch.float64, device=process.device)
        self._self = psutil.Process()
        self._samples = self._all_samples = 0
        self._since = self._started = time.perf_counter()
        self.last_loss = float("nan")
        self.validation: dict[str, float] = {}
        if process.is_main:  # lines after the checkpoint are written again
            lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
            kept = [line for line in lines if line.endswith("\n") and Progress.model_validate_json(line).step <= first_step]
            write_text(path, "".join(kept))  # a reader of the file keeps the old inode, so no line changes while it is read
            if kept:
                self.last_loss = Progress.model_validate_json(kept[-1]).loss

    def add(self, loss: Tensor, *, samples: int) -> None:
        """Counts one step; `samples` over all ranks."""
        self._loss[0] += loss
        self._loss[1] += 1
        self._samples += samples

    def log(
        self,
        step: int,
        *,
        epoch: int,
        learning_rate: float,
        times: StepTimes,
        unfrozen: dict[str, float],
        validation: dict[str, float] | None = None,
    ) -> None:
        """Collective. Appends a line and starts a new window. times: of this rank's steps in it."""
        milliseconds = times.milliseconds()
        sums = torch.tensor([*milliseconds.values(), times.embedding_bytes], dtype=torch.float64)
        sums = torch.cat([self._loss, sums.to(self._loss.device)])
        dist.all_reduce(sums)
        (loss, steps), sums = sums[:2].tolist(), sums[2:].cpu()
        memory = torch.tensor([self._self.memory_info().rss, self._peak_hbm()])
        dist.all_reduce(memory, op=dist.ReduceOp.MAX)
        if steps:
            self.last_loss = loss / steps
        now = time.perf_counter()
        line = Progress(
            step=step,
            total_steps=self._total_steps,
            epoch=epoch,
            loss=self.last_loss,
            learning_rate=learning_rate,
            samples_per_s=self._samples / (now - self._since),
            ms_per_step={name: ms / self._process.world_size for name, ms in zip(milliseconds, sums.tolist(), strict=False)},
            embedding_bytes_per_s=sums[-1].item() / (now - self._since),
            memory_bytes={name: int(size) for name, size in zip(("rss", "hbm"), memory, strict=True) if size},
            unfrozen=unfrozen,
            validation=validation or {},
        )
        if self._process.is_main:
            with self._path.open("a") as file:
                file.write(line.model_dump_json() + "\n")
        self._all_samples += self._samples
        self._samples, self._since = 0, now
        self._loss.zero_()

    def _peak_hbm(self) -> int:
        return torch.cuda.max_memory_allocated(self._process.device) if self._process.device.type == "cuda" else 0

    @property
    def samples_per_s(self) -> float:
        """Over all that this process trained, checkpoints and validation included."""
        return self._all_samples / (time.perf_counter() - self._started)


def refuse_nan(loss: Tensor, *, step: int, epoch: int, model: DistributedModelParallel, spec: ModelSpec, rank: int) -> None:
    """StageError if the loss of a step is not finite: names the step, and the tables and layers that no longer are."""
    if math.isfinite(loss.item()):
        return
    state = model.state_dict()
    told = []
    for table in spec.tables:
        for shard in table_shards(state, table=table):
            bad = torch.nonzero(~torch.isfinite(shard.weight_RD).all(dim=1))
            if len(bad):
                told.append(f"table {table}: {len(bad)} rows here are not finite, the first is row {shard.row + int(bad[0])}")
                break
    # Of this rank's part: the other ranks are not here to put the layers together.
    layers = [
        name for name, value in model.named_parameters() if ".head." in f".{name}" and not torch.isfinite(local(value)).all()
    ]
    if layers:
        told.append(f"layers {', '.join(layers)}")
    where = "; ".join(told) or "tables and layers are finite"
    raise StageError(
        f"step {step}, epoch {epoch}, rank {rank}: the loss is {loss.item()} ({where}); "
        "lower the learning_rate of training.table_optimizer or training.dense_optimizer, set their clip, or raise "
        "model.temperature"
    )


class MetricsTail:
    """Follows metrics.jsonl; a step that a later attempt repeats is relayed once."""

    def __init__(self, path: Path, on_progress: Callable[[Progress], None]) -> None:
        self._path, self._on_progress = path, on_progress
        self._inode = self._offset = self._last_step = 0

    def relay(self) -> None:
        """Passes on the complete lines not passed on yet."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:  # a new attempt put a file in its place that ends at its checkpoint
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            progress = Progress.model_validate_json(line)
            if progress.step > self._last_step:
                self._last_step = progress.step
                self._on_progress(progress)
