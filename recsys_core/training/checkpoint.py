"""Checkpoints by torch.distributed.checkpoint, committed by rename after a sha256 manifest.

A reader takes only a folder whose manifest verifies: DCP itself has no checksums and unpickles its .metadata.
"""

import shutil
import time
from pathlib import Path
from typing import Any, ClassVar

from torch import distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from recsys_core.config import Frozen
from recsys_core.errors import StageError
from recsys_core.manifests import Manifest, load_manifest, seal
from recsys_core.training.process import Process


class Best(Frozen):
    """The best measurement so far, and the step after which it was taken."""

    step: int
    metrics: dict[str, float]


class CheckpointManifest(Manifest):
    """A checkpoint after `step` steps; with the seed that is also the position in the data."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    world_size: int
    best: Best | None


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` steps; names sort by step."""
    return f"step-{step:09d}"


def save_checkpoint(
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    *,
    folder: Path,
    step: int,
    best: Best | None,
    fingerprint: str,
    keep: int,
    process: Process,
) -> None:
    """Collective. Saves to `<folder>/step-<step>` and removes all but the last `keep` checkpoints and that of `best`."""
    started = time.perf_counter()
    target = folder / checkpoint_name(step)
    staging = target.with_suffix(".tmp")
    if process.leads:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        staging.mkdir(parents=True)
    dist.barrier()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=staging)
    dist.barrier()
    if process.leads:
        seal(
            staging,
            target,
            CheckpointManifest,
            fingerprint=fingerprint,
            seconds=time.perf_counter() - started,
            step=step,
            world_size=process.world_size,
            best=best,
        )
        for old in sorted(folder.glob("step-*[0-9]"))[:-keep]:
            if best is None or old.name != checkpoint_name(best.step):
                shutil.rmtree(old)
    dist.barrier()


def latest_checkpoint(folder: Path, *, fingerprint: str) -> CheckpointManifest | None:
    """The newest checkpoint that verifies and belongs to `fingerprint`."""
    for path in sorted(folder.glob("step-*[0-9]"), reverse=True):
        manifest = load_manifest(path, CheckpointManifest)
        if manifest is not None and manifest.fingerprint == fingerprint:
            return manifest
    return None


def restore(model: DistributedModelParallel, optimizer: CombinedOptimizer, *, checkpoint: Path) -> None:
    """Collective. Loads weights and optimizer state into the model's own shards, whatever sharding they were saved in."""
    for _, part in optimizer.optimizers:
        if isinstance(part, KeyedOptimizer) and not isinstance(part, CombinedOptimizer):
            part.init_state()  # DCP skips, without a word, the state that is not there yet
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    _load(state, checkpoint=checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _load(state: dict[str, Any], *, checkpoint: Path) -> None:
    wanted, _ = flatten_state_dict(state)
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    missing = sorted(set(wanted) - set(saved))
    if missing:
        raise StageError(
            f"{checkpoint}: no {missing[0]!r} in the checkpoint ({len(missing)} of {len(wanted)} entries missing); "
            "it is of another model or sharding; remove it to start anew"
        )
    load(state, checkpoint_id=checkpoint)
