"""Sharded checkpoints with torch.distributed.checkpoint: written in the background, verified by sha256, committed by a rename.

torch.distributed.checkpoint (DCP) has no checksums, and it unpickles the file .metadata. A checkpoint is therefore read only
after the checksums in its manifest are verified. A checkpoint holds the weights, the optimizer state and the step. It needs
no random state and no position in the data, because both are functions of (seed, step, rank).

Shapes: R rows of a table, S column shards of the saved table.
"""

import logging
import shutil
import time
from collections.abc import Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
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
from recsys_core.launching.heartbeat import HeartbeatWriter
from recsys_core.launching.heartbeat import heartbeat as heartbeat_thread
from recsys_core.launching.rank import Process
from recsys_core.manifests import (
    FileRecord,
    Manifest,
    commit_folder,
    load_manifest,
    read_unchecked_manifest,
    record_files,
    require_no_link,
)
from recsys_core.training.model.averaging import WeightAverage
from recsys_core.training.model.dense_parallel import local_part

logger = logging.getLogger(__name__)
HEARTBEAT_INTERVAL_S = 1.0
MAX_SHOWN_DIFFERENCES = 5
TRAINED_WEIGHTS = "trained"
"""Checkpoint key of the trained weights. It exists only if the training averages its weights; `model` then has the average."""


class BestValidation(Frozen):
    """The best validation so far, and the step after which it was measured."""

    step: int
    metrics: dict[str, float]


class CheckpointManifest(Manifest):
    """A checkpoint after `step` steps. Its folder also holds job.json and plan.json of the training.

    best: the best validation up to this step; None before the first validation.
    """

    stage: ClassVar[str] = "checkpoint"
    step: int
    world_size: int
    best: BestValidation | None


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` steps; names sort by step."""
    return f"step-{step:09d}"


class Checkpointer:
    """Writes checkpoints to `<folder>/step-<step>`, one at a time, while training continues. Every method is collective.

    Args:
        attempt_number: part of the temporary folder's name, so that two attempts never share a temporary folder.
        keep_checkpoints: number of newest checkpoints that are kept, in addition to the best one.
        text_by_extra_file: text of each file that is added to the checkpoints, by file name.
        heartbeat: heartbeats of the training. The checkpointer touches the heartbeat file while it hashes a checkpoint,
            because after the last step nothing else touches the file.

    Raises InputError if `folder` is a link, because old checkpoints are removed from it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        attempt_number: int,
        keep_checkpoints: int,
        text_by_extra_file: dict[str, str],
        heartbeat: HeartbeatWriter,
        process: Process,
    ) -> None:
        require_no_link(folder)
        self._folder, self._fingerprint, self._attempt_number = folder, fingerprint, attempt_number
        self._keep_checkpoints, self._text_by_extra_file = keep_checkpoints, text_by_extra_file
        self._heartbeat, self._process = heartbeat, process
        # In the default process group, messages of the background thread and of the training would mix.
        process_group = dist.new_group(backend="gloo")
        assert isinstance(process_group, dist.ProcessGroup)  # every rank is a member
        self._process_group = process_group
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._commit_future: Future[None] | None = None
        if process.is_main:
            for stale_folder in folder.glob("step-*.tmp-*"):
                shutil.rmtree(stale_folder, ignore_errors=True)

    def save(
        self,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        *,
        step: int,
        best: BestValidation | None,
        average: WeightAverage | None = None,
    ) -> None:
        """Copy the state and return. On each rank, a background thread writes and hashes the rank's files; rank 0 commits them.

        Args:
            average: average of the weights, which is saved as the model. The weights are saved too, for a resumed training.

        Raises InputError if the disk is too small, or the error with which the previous save failed.
        """
        self.finish()
        state = _checkpoint_state(model, optimizer, average=average)
        checkpoint_folder = self._folder / checkpoint_name(step)
        staging_folder = checkpoint_folder.with_name(f"{checkpoint_folder.name}.tmp-{self._attempt_number}")
        self._require_free_space(state, staging_folder=staging_folder)
        start_time = self._heartbeat.begin("checkpoint")
        write_future = async_save(
            state, checkpoint_id=staging_folder, process_group=self._process_group, async_stager=BlockingAsyncStager()
        )
        self._commit_future = self._executor.submit(
            self._commit, cast("Future[None]", write_future), staging_folder, checkpoint_folder, step, best, start_time
        )

    def finish(self) -> None:
        """Wait until the last save is committed; raise its error, if any."""
        if self._commit_future is not None:
            self._heartbeat.begin("checkpoint")
            commit_future, self._commit_future = self._commit_future, None
            with explain_disk_full(self._folder):
                commit_future.result()

    def _commit(
        self,
        write_future: "Future[None]",
        staging_folder: Path,
        checkpoint_folder: Path,
        step: int,
        best: BestValidation | None,
        start_time: float,
    ) -> None:
        write_future.result()  # on rank 0, the future completes when all ranks have written their files and .metadata exists
        with heartbeat_thread(self._heartbeat.path.touch, interval_s=HEARTBEAT_INTERVAL_S):
            records = self._gather_records(staging_folder)
        if not self._process.is_main:
            return
        for file_name, text in self._text_by_extra_file.items():
            (staging_folder / file_name).write_text(text)
        # An existing checkpoint of this step is damaged or belongs to other settings: otherwise the training would have resumed
        # from it.
        shutil.rmtree(checkpoint_folder, ignore_errors=True)
        with heartbeat_thread(self._heartbeat.path.touch, interval_s=HEARTBEAT_INTERVAL_S):
            commit_folder(
                staging_folder,
                checkpoint_folder,
                CheckpointManifest,
                records=records,
                fingerprint=self._fingerprint,
                seconds=time.perf_counter() - start_time,
                step=step,
                world_size=self._process.world_size,
                best=best,
            )
        self._heartbeat.end("checkpoint", start_time=start_time)
        # A checkpoint of a later step is damaged or belongs to other settings too. It is not counted, so that it does not
        # displace this checkpoint.
        counted_folders = [folder for folder in _committed_folders(self._folder) if folder.name <= checkpoint_folder.name]
        num_old_folders = max(0, len(counted_folders) - self._keep_checkpoints)
        # A training that resumes from a kept checkpoint also needs the best checkpoint up to that step. The best checkpoint is
        # a kept checkpoint, or was already the best when the oldest kept checkpoint was written.
        oldest_manifest = read_unchecked_manifest(counted_folders[num_old_folders], CheckpointManifest)
        best_validations = (best, None if oldest_manifest is None else oldest_manifest.best)
        best_folder_names = {checkpoint_name(validation.step) for validation in best_validations if validation is not None}
        for old_folder in counted_folders[:num_old_folders]:
            if old_folder.name not in best_folder_names:
                shutil.rmtree(old_folder)

    def _gather_records(self, staging_folder: Path) -> dict[str, FileRecord]:
        """Collective. Hash and sync the files of this rank; return the records of all ranks on rank 0.

        One host alone would take long to read the files of all hosts, and could not sync them.
        """
        rank_record_by_name = record_files(staging_folder.glob(f"__{self._process.rank}_*.distcp"), folder=staging_folder)
        records_by_rank: list[dict[str, FileRecord]] = [{} for _ in range(self._process.world_size)]
        dist.gather_object(rank_record_by_name, records_by_rank if self._process.is_main else None, group=self._process_group)
        record_by_name = {name: record for rank_records in records_by_rank for name, record in rank_records.items()}
        for name, record in record_by_name.items() if self._process.is_main else ():
            path = staging_folder / name
            num_bytes = path.stat().st_size if path.is_file() else None
            if num_bytes != record.size_bytes:
                raise StageError(
                    f"{path}: another rank wrote {record.size_bytes:,} bytes, but here the file "
                    f"{'has not been found' if num_bytes is None else f'has {num_bytes:,} bytes'}; mount the same storage "
                    "under this path on all hosts"
                )
        return record_by_name

    def _require_free_space(self, state: dict[str, Any], *, staging_folder: Path) -> None:
        """Raise InputError if the disk is too small. Without this check, DCP raises `inline_container unexpected pos`."""
        value_by_key, _ = flatten_state_dict(state)
        checkpoint_bytes = torch.tensor(sum(_local_bytes(value) for value in value_by_key.values()))
        dist.all_reduce(checkpoint_bytes, group=self._process_group)
        if self._process.is_main:
            self._folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._folder).free < checkpoint_bytes:
                raise disk_full_error(staging_folder, reason=f"a checkpoint takes {checkpoint_bytes.item() / 2**30:,.3f} GiB")


def _local_bytes(value: object) -> int:
    """Return the number of bytes that this rank writes for an entry of a state dict."""
    tensors = [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
    return sum(local_part(tensor).nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def _committed_folders(folder: Path) -> list[Path]:
    """Return the folders of the complete checkpoints, sorted by step, without links to other folders."""
    return sorted(path for path in folder.glob("step-*[0-9]") if ".tmp-" not in path.name and not path.is_symlink())


def latest_checkpoint(folder: Path, *, fingerprint: str) -> CheckpointManifest | None:
    """Return the newest undamaged checkpoint with this fingerprint whose best checkpoint is undamaged too.

    Without the best checkpoint, a resumed training could not return its result. Log a warning for each damaged checkpoint.

    Raises InputError if `folder` is a link.
    """
    require_no_link(folder)

    @cache
    def verified_manifest(folder_name: str) -> CheckpointManifest | None:
        manifest = load_manifest(folder / folder_name, CheckpointManifest)
        if manifest is None:
            logger.warning(
                "%s: a file is missing or differs from its checksum; falling back to the previous checkpoint",
                folder / folder_name,
            )
        return manifest

    for checkpoint_folder in reversed(_committed_folders(folder)):
        manifest = verified_manifest(checkpoint_folder.name)
        if manifest is None or manifest.fingerprint != fingerprint:
            continue
        if manifest.best is None or verified_manifest(checkpoint_name(manifest.best.step)) is not None:
            return manifest
    return None


def _checkpoint_state(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, *, average: WeightAverage | None
) -> dict[str, Any]:
    """Return the entries of a checkpoint; see `TRAINED_WEIGHTS` for the entries with an average."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return state if average is None else state | {"model": average.state, TRAINED_WEIGHTS: state["model"]}


def restore(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, *, checkpoint: Path, average: WeightAverage | None = None
) -> None:
    """Collective. Load weights and optimizer state into this rank's shards.

    The number of ranks and the sharding may have changed since the checkpoint was saved.

    Row-wise Adagrad has one accumulator per row and column shard. If a table is now split into another number of column shards,
    each shard gets the accumulator of the whole row: the mean over the saved column shards, weighted by their widths.

    Args:
        average: receives the saved average if a resumed training averages its weights; the model then gets the trained weights.
            With None, the model gets the weights of the key `model`; see `TRAINED_WEIGHTS`.

    Raises StageError if the checkpoint belongs to another model; the message names the entries and both shapes.
    """
    for _, child_optimizer in optimizer.optimizers:
        if isinstance(child_optimizer, KeyedOptimizer) and not isinstance(child_optimizer, CombinedOptimizer):
            child_optimizer.init_state()  # DCP silently skips state that does not exist yet
    state = _checkpoint_state(model, optimizer, average=average)
    value_by_key, _ = flatten_state_dict(state)
    saved_metadata_by_key: dict[str, Any] = {
        key: metadata
        for key, metadata in FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items()
        if average is not None or not key.startswith(f"{TRAINED_WEIGHTS}.")
    }
    weight_key_by_accumulator = {
        key: _weight_key(key, value_by_key)
        for key, value in value_by_key.items()
        if isinstance(value, ShardedTensor) and len(value.size()) == 1  # an accumulator per row
    }
    _require_same_entries(
        value_by_key, saved_metadata_by_key, resizable_keys=weight_key_by_accumulator.keys(), checkpoint=checkpoint
    )
    resized_keys = [key for key in weight_key_by_accumulator if value_by_key[key].size() != saved_metadata_by_key[key].size]
    load({key: value for key, value in value_by_key.items() if key not in resized_keys}, checkpoint_id=checkpoint)
    saved_accumulator_by_key = {key: torch.empty(saved_metadata_by_key[key].size) for key in resized_keys}
    load(dict(saved_accumulator_by_key), checkpoint_id=checkpoint)
    for key, saved_accumulator in saved_accumulator_by_key.items():
        weight_key = weight_key_by_accumulator[key]
        saved_accumulator_SR = saved_accumulator.view(-1, value_by_key[weight_key].size(0))
        _fill_accumulators(
            value_by_key[key],
            saved_accumulator_SR=saved_accumulator_SR,
            saved_weight_metadata=saved_metadata_by_key[weight_key],
        )
    model.load_state_dict(state["model"] if average is None else state[TRAINED_WEIGHTS])
    optimizer.load_state_dict(state["optimizer"])


def _weight_key(accumulator_key: str, value_by_key: Mapping[str, Any]) -> str:
    """Return the key of the weight to which an accumulator belongs.

    The accumulator optimizer.state.<weight>.<table>.momentum1 belongs to model.<weight>.
    """
    return next(
        candidate_key
        for candidate_key in value_by_key
        if candidate_key.startswith("model.") and f".{candidate_key.removeprefix('model.')}." in accumulator_key
    )


def _fill_accumulators(
    accumulator: ShardedTensor, *, saved_accumulator_SR: Tensor, saved_weight_metadata: TensorStorageMetadata
) -> None:
    """Fill this rank's shards of `accumulator` with the mean of each row over the saved column shards; see `restore`."""
    width_by_first_column = dict(sorted((int(chunk.offsets[1]), int(chunk.sizes[1])) for chunk in saved_weight_metadata.chunks))
    width_S = torch.tensor(list(width_by_first_column.values()), dtype=saved_accumulator_SR.dtype)
    width_share_S = width_S / width_S.sum()
    accumulator_R = width_share_S @ saved_accumulator_SR
    for shard in accumulator.local_shards():
        # TorchRec concatenates the row-wise state of all column shards, so the offset may be beyond the rows of the table.
        first_row = shard.metadata.shard_offsets[0] % len(accumulator_R)
        shard.tensor.copy_(accumulator_R[first_row : first_row + len(shard.tensor)])


def _require_same_entries(
    value_by_key: Mapping[str, Any], saved_metadata_by_key: Mapping[str, Any], *, resizable_keys: Set[str], checkpoint: Path
) -> None:
    """Collective. Raise StageError if model and checkpoint have different entries, or weights of different shapes.

    resizable_keys: keys of entries whose shapes may differ.
    """
    # The shapes come from all ranks, because a rank without a shard of a table has no optimizer state for the table.
    local_shape_by_key = {key: list(value.size()) if hasattr(value, "size") else [] for key, value in value_by_key.items()}
    shapes_by_rank: list[dict[str, list[int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shapes_by_rank, local_shape_by_key)
    shape_by_key = {key: shape for rank_shape_by_key in shapes_by_rank for key, shape in rank_shape_by_key.items()}
    differences = [f"no {key} in the checkpoint" for key in sorted(set(shape_by_key) - set(saved_metadata_by_key))]
    differences += [f"no {key} in the model" for key in sorted(set(saved_metadata_by_key) - set(shape_by_key))]
    for key in sorted(set(shape_by_key) & set(saved_metadata_by_key) - resizable_keys):
        saved_metadata = saved_metadata_by_key[key]
        saved_shape = list(saved_metadata.size) if isinstance(saved_metadata, TensorStorageMetadata) else []
        if saved_shape != shape_by_key[key] and not key.startswith("optimizer."):
            differences.append(f"{key} is {saved_shape} in the checkpoint, {shape_by_key[key]} in the model")
    if not differences:
        return
    num_hidden_differences = len(differences) - MAX_SHOWN_DIFFERENCES
    difference_list = "; ".join(differences[:MAX_SHOWN_DIFFERENCES]) + (
        f"; and {num_hidden_differences} more" if num_hidden_differences > 0 else ""
    )
    raise StageError(
        f"{checkpoint}: the checkpoint belongs to another model or another kind of sharding: {difference_list}; "
        "remove the folder to train from scratch"
    )
