"""Checkpoints by torch.distributed.checkpoint, written beside the training, committed by rename after a sha256 manifest.

A reader takes only a folder whose manifest verifies: DCP itself has no checksums and unpickles its .metadata. What is drawn at
random and the order of the data are functions of (seed, step, rank), so the step is all that is kept of them.
"""

import logging
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from recsys_core.config import Frozen
from recsys_core.disk import disk_full_error, explain_disk_full
from recsys_core.errors import StageError
from recsys_core.launching.heartbeat import heartbeat
from recsys_core.manifests import Manifest, load_manifest, seal
from recsys_core.training.dense_parallel import local
from recsys_core.training.process_group import Process
from recsys_core.units import gib

logger = logging.getLogger(__name__)
JOB_COPY, PLAN_COPY = "job.json", "plan.json"
HEARTBEAT_S = 1.0


class Best(Frozen):
    """The best measurement so far, and the step after which it was taken."""

    step: int
    metrics: dict[str, float]


class CheckpointManifest(Manifest):
    """A checkpoint after `step` steps, which with the seed is also the position in the data. job.json and plan.json are what it
    was trained by.
    """

    kind: ClassVar[str] = "checkpoint"
    step: int
    world_size: int
    best: Best | None


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` steps; names sort by step."""
    return f"step-{step:09d}"


class Checkpointer:
    """Saves to `<folder>/step-<step>` while training goes on, one checkpoint at a time; each is whole or not there.

    Every method is collective.

    Args:
        attempt: which launch this is; what a dead one left half-written is never added to.
        keep: checkpoints that stay beside the best one.
        papers: what is written into each checkpoint beside the state, text by file name.
        alive: file that is touched while a checkpoint is hashed: after the last step nothing else gives a sign of life.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        attempt: int,
        keep: int,
        papers: dict[str, str],
        alive: Path,
        process: Process,
    ) -> None:
        self._folder, self._fingerprint, self._attempt, self._keep = folder, fingerprint, attempt, keep
        self._papers, self._alive, self._process = papers, alive, process
        # Threads need a group of their own: on the default one their messages would mix with the training's.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # all ranks are members
        self._group = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        if process.is_main:
            for rubbish in folder.glob("step-*.tmp-*"):
                shutil.rmtree(rubbish, ignore_errors=True)

    def save(self, model: DistributedModelParallel, optimizer: CombinedOptimizer, *, step: int, best: Best | None) -> None:
        """Copies the state and returns; writing, checking and renaming happen in the background.

        Raises InputError where the disk is too small, and whatever ended the save before this one.
        """
        self.finish()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        target = self._folder / checkpoint_name(step)
        staging = target.with_name(f"{target.name}.tmp-{self._attempt}")
        self._check_space(state, staging=staging)
        written = async_save(state, checkpoint_id=staging, process_group=self._group, async_stager=BlockingAsyncStager())
        self._running = self._thread.submit(self._commit, cast("Future[None]", written), staging, target, step, best)

    def finish(self) -> None:
        """Waits until the last save is committed; raises what went wrong with it."""
        if self._running is not None:
            running, self._running = self._running, None
            with explain_disk_full(self._folder):
                running.result()

    def _commit(self, written: "Future[None]", staging: Path, target: Path, step: int, best: Best | None) -> None:
        started = time.perf_counter()
        written.result()  # on rank 0: all ranks have written, and .metadata is there
        if not self._process.is_main:
            return
        for name, text in self._papers.items():
            (staging / name).write_text(text)
        shutil.rmtree(target, ignore_errors=True)  # damaged, or of other settings: else training would not be here again
        with heartbeat(self._alive.touch, interval_s=HEARTBEAT_S):
            seal(
                staging,
                target,
                CheckpointManifest,
                fingerprint=self._fingerprint,
                seconds=time.perf_counter() - started,
                step=step,
                world_size=self._process.world_size,
                best=best,
            )
        for old in sorted(self._folder.glob("step-*[0-9]"))[: -self._keep]:
            if ".tmp-" not in old.name and (best is None or old.name != checkpoint_name(best.step)):
                shutil.rmtree(old)

    def _check_space(self, state: dict[str, Any], *, staging: Path) -> None:
        """A disk that fills up while DCP writes ends in `inline_container unexpected pos`."""
        flat, _ = flatten_state_dict(state)
        size = torch.tensor(sum(_local_bytes(value) for value in flat.values()))
        dist.all_reduce(size, group=self._group)
        if self._process.is_main:
            self._folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._folder).free < size:
                raise disk_full_error(staging, needed=f"a checkpoint takes {gib(int(size.item()), digits=3)}")


def _local_bytes(value: object) -> int:
    """What this rank writes of an entry of a state dict."""
    tensors = [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
    return sum(local(tensor).nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def latest_checkpoint(folder: Path, *, fingerprint: str) -> CheckpointManifest | None:
    """The newest checkpoint that verifies and belongs to `fingerprint`; a warning for each that is passed over."""
    for path in sorted((path for path in folder.glob("step-*[0-9]") if ".tmp-" not in path.name), reverse=True):
        manifest = load_manifest(path, CheckpointManifest)
        if manifest is None:
            logger.warning("%s: a file is missing or not what was written; taking the checkpoint before it", path)
        elif manifest.fingerprint == fingerprint:
            return manifest
    return None


TOLD = 5
"""Differences that an error names."""


def restore(model: DistributedModelParallel, optimizer: CombinedOptimizer, *, checkpoint: Path) -> None:
    """Collective. Loads weights and optimizer state into the model's own shards.

    Row-wise Adagrad keeps a sum per row and column shard. Where a table is now split into another number of columns, each of
    them starts from the sum of the whole row: the mean over its old column shards, by their widths.

    Raises StageError where the checkpoint is of another model: names the entries, and both shapes.
    """
    for _, part in optimizer.optimizers:
        if isinstance(part, KeyedOptimizer) and not isinstance(part, CombinedOptimizer):
            part.init_state()  # DCP skips, without a word, the state that is not there yet
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    wanted, _ = flatten_state_dict(state)
    saved: Mapping[str, Any] = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    sums = {key: _weight_of(key, wanted) for key, value in wanted.items() if _is_sum_per_row(value)}
    _require_same(wanted, saved, apart_from=sums, checkpoint=checkpoint)
    resized = {key: weight for key, weight in sums.items() if wanted[key].size() != saved[key].size}
    load({key: value for key, value in wanted.items() if key not in resized}, checkpoint_id=checkpoint)
    whole = {key: torch.empty(saved[key].size) for key in resized}
    load(dict(whole), checkpoint_id=checkpoint)
    for key, weight in resized.items():
        _fill_sums(wanted[key], sum_CR=whole[key].view(-1, wanted[weight].size(0)), saved=saved[weight])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _is_sum_per_row(value: object) -> bool:
    return isinstance(value, ShardedTensor) and len(value.size()) == 1


def _weight_of(key: str, wanted: Mapping[str, Any]) -> str:
    """optimizer.state.<weight>.<table>.momentum1 -> model.<weight>."""
    return next(name for name in wanted if name.startswith("model.") and f".{name.removeprefix('model.')}." in key)


def _fill_sums(target: ShardedTensor, *, sum_CR: Tensor, saved: TensorStorageMetadata) -> None:
    """Puts the rows' sums into this rank's shards of `target`; TorchRec counts its rows once per column shard."""
    widths = dict(sorted((int(chunk.offsets[1]), int(chunk.sizes[1])) for chunk in saved.chunks))
    share_C = torch.tensor(list(widths.values()), dtype=sum_CR.dtype) / sum(widths.values())
    sum_R = share_C @ sum_CR
    for shard in target.local_shards():
        row = shard.metadata.shard_offsets[0] % len(sum_R)
        shard.tensor.copy_(sum_R[row : row + len(shard.tensor)])


def _require_same(
    wanted: Mapping[str, Any], saved: Mapping[str, Any], *, apart_from: Mapping[str, str], checkpoint: Path
) -> None:
    """The same entries, of the same shapes: of any rank, since one that holds no shard of a table has no state of it."""
    shapes = {key: list(value.size()) for key, value in wanted.items() if hasattr(value, "size")}
    gathered: list[dict[str, list[int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, {key: shapes.get(key, []) for key in wanted})
    here = {key: shape for one in gathered for key, shape in one.items()}
    differences = [f"no {key} in the checkpoint" for key in sorted(set(here) - set(saved))]
    differences += [f"no {key} in the model" for key in sorted(set(saved) - set(here))]
    for key in sorted(set(here) & set(saved) - set(apart_from)):
        shape = list(saved[key].size) if isinstance(saved[key], TensorStorageMetadata) else []
        if shape != here[key] and not key.startswith("optimizer."):
            differences.append(f"{key} is {shape} in the checkpoint, {here[key]} in the model")
    if differences:
        told = "; ".join(differences[:TOLD]) + (f"; and {len(differences) - TOLD} more" if len(differences) > TOLD else "")
        raise StageError(f"{checkpoint}: of another model or another kind of sharding: {told}; remove it to start anew")
