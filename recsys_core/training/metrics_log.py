"""metrics.jsonl: loss, throughput, step times, memory, validation metrics; and optional traces by torch.profiler.

Rank 0 writes metrics.jsonl; the launching process reads it.

Shapes: R rows and D columns of a shard.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys_core.dataset.batch import Batch
from recsys_core.disk import write_text
from recsys_core.errors import StageError
from recsys_core.launching.rank import Process
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.training.config import ProfileConfig
from recsys_core.training.job import Progress
from recsys_core.training.model.dense_parallel import local_part

logger = logging.getLogger(__name__)
FLOAT32_BYTES = 4
PROFILER_WARMUP_STEPS = 2


class MetricsLog:
    """Writer of metrics.jsonl: means over the ranks and the steps since the previous line.

    On a CPU every step is timed. On a GPU only the first step of each line is timed, because timing waits for the device.

    Args:
        num_completed_steps: number of steps before this attempt. Lines of later steps are removed, because this attempt repeats
            the steps.
    """

    def __init__(self, path: Path, *, spec: ModelSpec, process: Process, total_steps: int, num_completed_steps: int) -> None:
        self._path, self._process, self._total_steps = path, process, total_steps
        self._tables, self._os_process = list(spec.tables.values()), psutil.Process()
        self._is_gpu, self._is_step_timed = process.device.type == "cuda", False
        self._loss_sum_and_num_steps = torch.zeros(2, dtype=torch.float64, device=process.device)
        self._num_attempt_samples = 0
        self._attempt_start_time = time.perf_counter()
        self._start_line(self._attempt_start_time)
        self.last_loss = float("nan")
        if process.is_main:
            self._remove_lines_after(num_completed_steps)

    def _start_line(self, start_time: float) -> None:
        """Reset the totals of a line. `_loader_wait_s` is the part of `_timed_steps_s` spent waiting for the loader."""
        self._line_start_time, self._num_line_samples, self._embedding_bytes = start_time, 0, 0
        self._num_timed_steps, self._timed_steps_s, self._loader_wait_s = 0, 0.0, 0.0
        self._loss_sum_and_num_steps.zero_()

    def _remove_lines_after(self, step: int) -> None:
        lines = self._path.read_text().splitlines(keepends=True) if self._path.is_file() else []
        lines = [line for line in lines if line.endswith("\n") and Progress.model_validate_json(line).step <= step]
        # The new file has another inode. MetricsTail detects this and reads the new file from its beginning.
        write_text(self._path, "".join(lines))
        if lines:
            self.last_loss = Progress.model_validate_json(lines[-1]).loss

    def measured_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches. Measure the wait for each batch, and the bytes of embedding rows that the batch looks up."""
        while True:
            start_time = time.perf_counter()
            batch = next(batches, None)
            self._loader_wait_s += (time.perf_counter() - start_time) if self._is_step_timed else 0.0
            if batch is None:
                return
            self._embedding_bytes += self._lookup_bytes(batch)
            yield batch

    def _lookup_bytes(self, batch: Batch) -> int:
        num_values_by_feature: dict[tuple[str, str], int] = {
            (batch_key, feature): num_values
            for batch_key, lookups in batch.sparse.items()
            for feature, num_values in zip(lookups.keys(), lookups.length_per_key(), strict=True)
        }
        num_floats = sum(num_values_by_feature.get((table.batch_key, table.feature), 0) * table.dim for table in self._tables)
        return num_floats * FLOAT32_BYTES

    @contextmanager
    def timed_step(self) -> Iterator[None]:
        """Time the block as one step. On a GPU only the first step of a line is timed."""
        self._is_step_timed = not self._is_gpu or self._num_timed_steps == 0
        start_time = self._now()
        yield
        if self._is_step_timed:
            self._num_timed_steps += 1
            self._timed_steps_s += self._now() - start_time
        self._is_step_timed = False

    def _now(self) -> float:
        if self._is_gpu and self._is_step_timed:
            torch.cuda.synchronize()
        return time.perf_counter()

    def add_step(self, loss: Tensor, *, num_samples: int) -> None:
        """Add a step to the totals of the line. num_samples: number of examples on all ranks."""
        self._loss_sum_and_num_steps[0] += loss
        self._loss_sum_and_num_steps[1] += 1
        self._num_line_samples += num_samples

    def write_line(
        self,
        step: int,
        *,
        epoch: int,
        learning_rate: float,
        trained_share_by_table: dict[str, float],
        validation: dict[str, float],
    ) -> None:
        """Collective. Append a line, and reset the totals.

        Args:
            trained_share_by_table: for each gradually unfrozen table, the share of its rows that the epoch trains.
            validation: validation metrics; empty except after an epoch.
        """
        ms_per_step = 1000 * self._timed_steps_s / max(self._num_timed_steps, 1)
        loader_wait_ms_per_step = 1000 * self._loader_wait_s / max(self._num_timed_steps, 1)
        times_and_bytes = torch.tensor([ms_per_step, loader_wait_ms_per_step, self._embedding_bytes], dtype=torch.float64)
        totals = torch.cat([self._loss_sum_and_num_steps, times_and_bytes.to(self._process.device)])
        dist.all_reduce(totals)
        loss_sum, num_steps, total_step_ms, total_loader_wait_ms, total_embedding_bytes = totals.tolist()
        peak_hbm_bytes = torch.cuda.max_memory_allocated(self._process.device) if self._is_gpu else 0
        memory_bytes = torch.tensor([self._os_process.memory_info().rss, peak_hbm_bytes])
        dist.all_reduce(memory_bytes, op=dist.ReduceOp.MAX)
        if num_steps:
            self.last_loss = loss_sum / num_steps
        end_time = time.perf_counter()
        elapsed_s, world_size = end_time - self._line_start_time, self._process.world_size
        progress = Progress(
            step=step,
            total_steps=self._total_steps,
            epoch=epoch,
            loss=self.last_loss,
            learning_rate=learning_rate,
            samples_per_s=self._num_line_samples / elapsed_s,
            ms_per_step={"step": total_step_ms / world_size, "data": total_loader_wait_ms / world_size},
            embedding_bytes_per_s=total_embedding_bytes / elapsed_s,
            memory_bytes={
                name: int(num_bytes) for name, num_bytes in zip(("rss", "hbm"), memory_bytes, strict=True) if num_bytes
            },
            unfrozen=trained_share_by_table,
            validation=validation,
        )
        if self._process.is_main:
            with self._path.open("a") as file:
                file.write(progress.model_dump_json() + "\n")
        self._num_attempt_samples += self._num_line_samples
        self._start_line(end_time)

    @property
    def samples_per_s(self) -> float:
        """Mean throughput of this attempt; the time includes checkpoints and validation."""
        return self._num_attempt_samples / (time.perf_counter() - self._attempt_start_time)


class MetricsTail:
    """Reader that follows metrics.jsonl and passes each step to `on_progress` once, even if a later attempt repeats it."""

    def __init__(self, path: Path, on_progress: Callable[[Progress], None]) -> None:
        self._path, self._on_progress = path, on_progress
        self._inode = self._offset_bytes = self._last_step = 0

    def relay(self) -> None:
        """Pass on the complete lines that were written since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:  # a new attempt has replaced the file
                self._inode, self._offset_bytes = inode, 0
            file.seek(self._offset_bytes)
            unread_content = file.read()
        complete_lines = unread_content[: unread_content.rfind(b"\n") + 1]
        self._offset_bytes += len(complete_lines)
        for line in complete_lines.splitlines():
            progress = Progress.model_validate_json(line)
            if progress.step > self._last_step:
                self._last_step = progress.step
                self._on_progress(progress)


def make_profiler(config: ProfileConfig | None, *, num_steps: int, folder: Path, process: Process) -> profile | None:
    """Return a profiler that writes rank-<r>.json.gz (chrome://tracing, Perfetto) to `folder`; None if it would record no step.

    The profiler is a context manager; call its step() after each training step.

    Args:
        config: None: no profile.
        num_steps: largest number of steps of this attempt. If it is too small for a recording, a warning is logged.
    """
    if config is None:
        return None
    num_skipped_steps = config.after_steps + PROFILER_WARMUP_STEPS
    if num_steps <= num_skipped_steps:
        logger.warning(
            "training.profile records no step: the recording starts after step %d, but at most %d steps are left; lower "
            "training.profile.after_steps",
            num_skipped_steps,
            num_steps,
        )
        return None
    folder.mkdir(parents=True, exist_ok=True)
    trace_path = folder / f"rank-{process.rank}.json.gz"
    return profile(
        activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if process.device.type == "cuda" else []),
        schedule=schedule(wait=config.after_steps, warmup=PROFILER_WARMUP_STEPS, active=config.steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace_path)),
    )


def raise_if_not_finite(
    loss: Tensor, *, step: int, epoch: int, model: DistributedModelParallel, spec: ModelSpec, rank: int
) -> None:
    """Raise StageError if the loss of a step is not finite. The message names the tables and layers that are not finite."""
    if math.isfinite(loss.item()):
        return
    tensor_by_name = model.state_dict()
    problems, non_finite_tables = [], []
    for table_name in spec.tables:
        for shard in table_shards(tensor_by_name, table=table_name):
            non_finite_rows = torch.nonzero(~torch.isfinite(shard.weight_RD).all(dim=1))
            if len(non_finite_rows):
                first_row = shard.first_row + int(non_finite_rows[0])
                problems.append(
                    f"table {table_name}: {len(non_finite_rows)} rows of this rank are not finite, the first is row {first_row}"
                )
                non_finite_tables.append(table_name)
                break
    # Only this rank's part of each layer is checked: a collective gather would hang if another rank did not take part.
    layer_names = [
        parameter_name
        for parameter_name, parameter in model.named_parameters()
        if ".head." in f".{parameter_name}" and not torch.isfinite(local_part(parameter)).all()
    ]
    if layer_names:
        problems.append(f"layers {', '.join(layer_names)} are not finite")
    problems_text = "; ".join(problems) or "tables and layers are finite"
    suspected_tables = non_finite_tables or [table_name for table_name, table in spec.tables.items() if not table.is_frozen]
    table_settings = list(dict.fromkeys(spec.optimizer_setting(table_name) for table_name in suspected_tables))
    rate_settings_text = " or ".join([*table_settings, "training.dense_optimizer"])
    clip_settings_text = " or ".join(
        [*(f"{setting}.gradient_clip_value" for setting in table_settings), "training.dense_optimizer.gradient_clip_norm"]
    )
    raise StageError(
        f"step {step}, epoch {epoch}, rank {rank}: the loss is {loss.item()} ({problems_text}); "
        f"lower the learning_rate of {rate_settings_text}, set {clip_settings_text}, or raise model.temperature"
    )
