"""Checkpoints that are restored on another number of ranks and with another sharding, and damaged checkpoints."""

import itertools
import logging
import random
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from recsys_core.errors import InputError, StageError
from recsys_core.launching.heartbeat import HeartbeatWriter
from recsys_core.manifests import load_manifest, stage_folder
from recsys_core.manifests.stage_folder import MARKER_NAME
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer
from recsys_core.training import checkpoint as checkpoint_module
from recsys_core.training.checkpoint import (
    BestValidation,
    Checkpointer,
    CheckpointManifest,
    checkpoint_name,
    latest_checkpoint,
    restore,
)
from recsys_core.training.config import TrainingConfig
from recsys_core.training.model.optimizers import accumulator_shards, make_optimizer
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.small_model import make_batch, sharded_model, small_spec

NUM_RANKS_BY_SHARDING_TYPE = {"row_wise": 2, "table_wise": 3, "column_wise": 4}
"""Number of ranks that save a checkpoint, by the sharding type of all tables."""
NUM_STEPS = 3
TRAINING = TrainingConfig(seed=1)
LOSS = LossConfig(num_negatives=5)
BEST_VALIDATION = BestValidation(step=2, metrics={"ndcg@10": 0.5})


def spec_of(*, has_brands: bool = True) -> ModelSpec:
    """Return a spec whose tables are wide enough for column shards. Only the accumulators of `item` are not row-wise."""
    adagrad = TableOptimizer(kind="adagrad")
    forms = {"user.groups": "list"} | ({"item.brand": "single"} if has_brands else {})
    return small_spec(dim=256, forms=forms, tables={"item": TableConfig(optimizer=adagrad)})


class ShardedTraining(NamedTuple):
    """The model and the optimizer of one rank."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer


def start_training(rank: int, sharding_type: str, *, spec: ModelSpec, num_steps: int = 0) -> ShardedTraining:
    """Return a training after its first `num_steps` steps."""
    model, _ = sharded_model(
        spec,
        sharding_type_by_table=dict.fromkeys(spec.tables, sharding_type),
        training=TRAINING,
        loss=LOSS,
        process=cpu_process(rank),
    )
    training = ShardedTraining(model, make_optimizer(model, spec=spec, config=TRAINING))
    train(training, rank, spec=spec, steps=range(num_steps))
    return training


def train(training: ShardedTraining, rank: int, *, spec: ModelSpec, steps: range) -> None:
    """Execute the training steps `steps`."""
    batches = iter([make_batch(spec, ranks=[rank], step=step, num_queries=6, num_negatives=5) for step in steps])
    pipeline = TrainPipelineSparseDist(training.model, training.optimizer, torch.device("cpu"))
    for _ in steps:
        pipeline.progress(batches)
    if steps:
        pipeline.detach()


def checkpointer(rank: int, folder: Path, **settings: Any) -> Checkpointer:
    """Return a checkpointer that keeps nine checkpoints, unless `settings` say otherwise."""
    process = cpu_process(rank)
    heartbeat = HeartbeatWriter(folder.with_name("heartbeat"), is_main=process.is_main)
    defaults = {"keep_checkpoints": 9, "text_by_extra_file": {"job.json": "{}"}, "heartbeat": heartbeat}
    return Checkpointer(folder, fingerprint="f", attempt_number=1, process=process, **defaults | settings)


def whole_state(training: ShardedTraining, spec: ModelSpec) -> dict[str, np.ndarray]:
    """Return the whole tables and accumulators, gathered from all ranks, and all unsharded tensors by name."""
    array_by_name: dict[str, np.ndarray] = {}
    shards_by_name: dict[str, list[Any]] = {}
    model_state = training.model.state_dict()
    for name in spec.tables:
        shards_by_name[name] = [
            (shard.first_row, shard.first_column, shard.weight_RD.numpy()) for shard in table_shards(model_state, table=name)
        ]
        shards_by_name[f"{name} accumulator"] = accumulator_shards(training.optimizer, spec=spec, table=name)
    shards_of_ranks: list[dict[str, list[Any]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(shards_of_ranks, shards_by_name)
    for name, table in spec.tables.items():
        array_by_name[name] = np.full((table.num_rows, table.dim), np.nan, np.float32)
        is_rowwise = table.settings.optimizer is None
        array_by_name[f"{name} accumulator"] = np.zeros(
            table.num_rows if is_rowwise else (table.num_rows, table.dim), np.float32
        )
        for shards_of_rank in shards_of_ranks:
            for row, column, weight_RC in shards_of_rank[name]:
                array_by_name[name][row : row + len(weight_RC), column : column + weight_RC.shape[1]] = weight_RC
            for shard in shards_of_rank[f"{name} accumulator"]:
                row, column, values_RC = shard.table_contribution(is_rowwise=is_rowwise, dim=table.dim)
                accumulator = array_by_name[f"{name} accumulator"].reshape(table.num_rows, -1)
                accumulator[row : row + len(values_RC), column : column + values_RC.shape[1]] += values_RC.numpy()
    tensor_by_name, _ = flatten_state_dict({"model": model_state, "optimizer": training.optimizer.state_dict()})
    return array_by_name | {
        name: np.array(tensor) for name, tensor in tensor_by_name.items() if not isinstance(tensor, ShardedTensor)
    }


def save_checkpoint(rank: int, sharding_type: str, folder: Path) -> None:
    """Save a checkpoint while the training continues, and write the saved state into `<sharding_type>.npz`."""
    spec = spec_of()
    training = start_training(rank, sharding_type, spec=spec, num_steps=NUM_STEPS)
    saver = checkpointer(rank, folder / sharding_type)
    saver.save(training.model, training.optimizer, step=NUM_STEPS, best=BEST_VALIDATION)
    saved_state = whole_state(training, spec)
    train(training, rank, spec=spec, steps=range(NUM_STEPS, NUM_STEPS + 2))  # while the checkpoint is being written
    saver.finish()
    if rank == 0:
        np.savez(folder / f"{sharding_type}.npz", **saved_state)


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory) -> Path:
    """The folder with a checkpoint of each sharding type, and its state in `<sharding_type>.npz`."""
    folder = tmp_path_factory.mktemp("saved")
    for sharding_type, world_size in NUM_RANKS_BY_SHARDING_TYPE.items():
        run_ranks(save_checkpoint, world_size=world_size, arguments=(sharding_type, folder))
    return folder


def restore_checkpoints(rank: int, folder: Path) -> None:
    """Assert that the checkpoint of each sharding type is restored with each sharding type."""
    spec = spec_of()
    for saved_sharding_type, sharding_type in itertools.product(NUM_RANKS_BY_SHARDING_TYPE, repeat=2):
        training = start_training(rank, sharding_type, spec=spec)
        restore(training.model, training.optimizer, checkpoint=folder / saved_sharding_type / checkpoint_name(NUM_STEPS))
        restored_state, saved_state = whole_state(training, spec), dict(np.load(folder / f"{saved_sharding_type}.npz"))
        assert restored_state.keys() == saved_state.keys()
        assert any("exp_avg_sq" in name for name in restored_state) and any(name.endswith("step") for name in restored_state)
        for name, saved_array in saved_state.items():
            # A saved accumulator is a rounded sum over the column shards of its row.
            rtol = 1e-6 if name.endswith(" accumulator") else 0.0
            np.testing.assert_allclose(
                restored_state[name], saved_array, rtol=rtol, err_msg=f"{saved_sharding_type} -> {sharding_type}: {name}"
            )


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_is_restored_on_another_number_of_ranks_and_with_another_sharding(saved_folder, world_size):
    run_ranks(restore_checkpoints, world_size=world_size, arguments=(saved_folder,))


def assert_restore_fails(rank: int, checkpoint_folder: Path, spec: ModelSpec, message: str) -> None:
    training = start_training(rank, "row_wise", spec=spec)
    with pytest.raises(StageError, match=message):
        restore(training.model, training.optimizer, checkpoint=checkpoint_folder)


def test_the_error_about_a_checkpoint_of_another_model_names_tables_and_shapes(saved_folder):
    checkpoint_folder = saved_folder / "row_wise" / checkpoint_name(NUM_STEPS)
    spec = spec_of()
    larger_table = spec.tables["user"].model_copy(update={"num_rows": spec.tables["user"].num_rows + 1})
    spec_with_more_users = spec.model_copy(update={"tables": spec.tables | {"user": larger_table}})
    message = r"user.weight is \[50, 256\] in the checkpoint, \[51, 256\] in the model"
    run_ranks(assert_restore_fails, world_size=2, arguments=(checkpoint_folder, spec_with_more_users, message))
    message = r"no model\.\S+item__brand\.weight in the model"
    run_ranks(assert_restore_fails, world_size=2, arguments=(checkpoint_folder, spec_of(has_brands=False), message))


def test_each_of_120_flipped_bits_is_detected_and_the_previous_checkpoint_is_used(saved_folder, tmp_path, caplog):
    for step in (NUM_STEPS - 1, NUM_STEPS):
        shutil.copytree(saved_folder / "table_wise" / checkpoint_name(NUM_STEPS), tmp_path / checkpoint_name(step))
    newest_folder = tmp_path / checkpoint_name(NUM_STEPS)
    checkpoint_paths = sorted(path for path in newest_folder.rglob("*") if path.is_file() and path.name != MARKER_NAME)
    assert {"manifest.json", ".metadata", "job.json"} <= {path.name for path in checkpoint_paths}
    generator = random.Random(0)
    for _ in range(120):
        path = generator.choice(checkpoint_paths)
        byte_index, bit = generator.randrange(path.stat().st_size), generator.randrange(8)
        file_bytes = bytearray(path.read_bytes())
        file_bytes[byte_index] ^= 1 << bit
        path.write_bytes(file_bytes)
        with caplog.at_level(logging.WARNING):
            checkpoint = latest_checkpoint(tmp_path, fingerprint="f")
        assert checkpoint is not None and checkpoint.folder.name == checkpoint_name(NUM_STEPS - 1), (
            f"{path.name}, byte {byte_index}, bit {bit}"
        )
        assert caplog.messages == [
            f"{newest_folder}: a file is missing or differs from its checksum; falling back to the previous checkpoint"
        ]
        caplog.clear()
        file_bytes[byte_index] ^= 1 << bit
        path.write_bytes(file_bytes)
    checkpoint = latest_checkpoint(tmp_path, fingerprint="f")
    assert checkpoint is not None and checkpoint.folder == newest_folder and checkpoint.best == BEST_VALIDATION


@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "damaged"])
def test_a_checkpoint_is_not_resumed_from_if_the_best_checkpoint_is_lost(saved_folder, tmp_path, is_missing):
    for step in (BEST_VALIDATION.step, NUM_STEPS):
        shutil.copytree(saved_folder / "row_wise" / checkpoint_name(NUM_STEPS), tmp_path / checkpoint_name(step))
    best_folder = tmp_path / checkpoint_name(BEST_VALIDATION.step)
    checkpoint = latest_checkpoint(tmp_path, fingerprint="f")
    assert checkpoint is not None and checkpoint.folder.name == checkpoint_name(NUM_STEPS)
    shutil.rmtree(best_folder) if is_missing else (best_folder / ".metadata").write_bytes(b"")
    assert latest_checkpoint(tmp_path, fingerprint="f") is None


def test_a_checkpoint_that_is_half_written_or_has_another_fingerprint_is_ignored(saved_folder, tmp_path):
    saved_checkpoint = saved_folder / "row_wise" / checkpoint_name(NUM_STEPS)
    shutil.copytree(saved_checkpoint, tmp_path / f"{checkpoint_name(NUM_STEPS)}.tmp-1")
    shutil.copytree(saved_checkpoint, tmp_path / checkpoint_name(7))
    (tmp_path / checkpoint_name(7) / "manifest.json").unlink()
    assert latest_checkpoint(tmp_path, fingerprint="f") is None
    shutil.copytree(saved_checkpoint, tmp_path / checkpoint_name(NUM_STEPS))
    assert latest_checkpoint(tmp_path, fingerprint="another") is None


def save_five_times(rank: int, folder: Path) -> None:
    """Assert that the best and the last two of five checkpoints remain."""
    training = start_training(rank, "row_wise", spec=spec_of())
    saver = checkpointer(rank, folder, keep_checkpoints=2)
    for step, best_step in enumerate((None, 2, 2, 2, 5), 1):
        best_validation = None if best_step is None else BEST_VALIDATION.model_copy(update={"step": best_step})
        saver.save(training.model, training.optimizer, step=step, best=best_validation)
    saver.finish()
    if rank == 0:
        assert sorted(path.name for path in folder.iterdir()) == [checkpoint_name(step) for step in (2, 4, 5)]


def test_the_newest_checkpoints_and_their_best_checkpoints_are_kept(tmp_path):
    run_ranks(save_five_times, world_size=2, arguments=(tmp_path,))


def save_before_a_damaged_checkpoint(rank: int, folder: Path) -> None:
    """Assert that an empty checkpoint folder of a later step is kept and is not counted."""
    training = start_training(rank, "row_wise", spec=spec_of())
    saver = checkpointer(rank, folder, keep_checkpoints=1)
    (folder / checkpoint_name(9)).mkdir(parents=True)
    for step in (1, 2):
        saver.save(training.model, training.optimizer, step=step, best=None)
    saver.finish()
    assert sorted(path.name for path in folder.iterdir()) == [checkpoint_name(2), checkpoint_name(9)]


def test_a_new_checkpoint_is_kept_if_a_checkpoint_of_a_later_step_is_damaged(tmp_path):
    run_ranks(save_before_a_damaged_checkpoint, world_size=1, arguments=(tmp_path,))
    checkpoint = latest_checkpoint(tmp_path, fingerprint="f")
    assert checkpoint is not None and checkpoint.step == 2


def save_next_to_a_link(rank: int, folder: Path, linked_folder: Path) -> None:
    """Assert that a link with the name of an old checkpoint is not removed."""
    training = start_training(rank, "row_wise", spec=spec_of())
    saver = checkpointer(rank, folder, keep_checkpoints=1)
    folder.mkdir()
    (folder / checkpoint_name(1)).symlink_to(linked_folder)
    for step in (2, 3):
        saver.save(training.model, training.optimizer, step=step, best=None)
    saver.finish()
    assert sorted(path.name for path in folder.iterdir()) == [checkpoint_name(1), checkpoint_name(3)]


def save_through_a_link(rank: int, folder: Path) -> None:
    """Assert that no checkpoint is written if the checkpoint folder is a link."""
    training = start_training(rank, "row_wise", spec=spec_of())
    with pytest.raises(InputError, match="checkpoints is a link"):
        saver = checkpointer(rank, folder, keep_checkpoints=1)
        saver.save(training.model, training.optimizer, step=9, best=None)
        saver.finish()


def test_files_behind_a_link_are_not_removed_with_the_old_checkpoints(saved_folder, tmp_path):
    archive_folder = tmp_path / "archive"
    for folder_name in (checkpoint_name(1), checkpoint_name(2), f"{checkpoint_name(3)}.tmp-1"):
        shutil.copytree(saved_folder / "row_wise" / checkpoint_name(NUM_STEPS), archive_folder / folder_name)
    archived_paths = sorted(archive_folder.rglob("*"))
    (tmp_path / "checkpoints").symlink_to(archive_folder)
    run_ranks(save_through_a_link, world_size=1, arguments=(tmp_path / "checkpoints",))
    with pytest.raises(InputError, match="checkpoints is a link"):
        latest_checkpoint(tmp_path / "checkpoints", fingerprint="f")
    run_ranks(save_next_to_a_link, world_size=1, arguments=(tmp_path / "own", archive_folder / checkpoint_name(1)))
    assert sorted(archive_folder.rglob("*")) == archived_paths


def save_on_a_full_disk(rank: int, folder: Path) -> None:
    training = start_training(rank, "row_wise", spec=spec_of())
    shutil.disk_usage = lambda _: shutil._ntuple_diskusage(total=10**6, used=10**6 - 99, free=99)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"a checkpoint takes 0\.\d+ GiB, but the disk has 0.000 GiB free"):
        checkpointer(rank, folder).save(training.model, training.optimizer, step=1, best=None)


def test_a_disk_too_small_for_a_checkpoint_is_reported_before_the_checkpoint_is_written(tmp_path):
    run_ranks(save_on_a_full_disk, world_size=1, arguments=(tmp_path,))
    assert list(tmp_path.iterdir()) == []


def save_with_slow_hashes(rank: int, folder: Path) -> None:
    """Save a checkpoint. The hash of each file is delayed until the heartbeat file has been touched twice."""
    spec = spec_of()
    heartbeat_path = folder / "heartbeat"
    record_file = stage_folder.record_file

    def last_heartbeat_ns() -> int:
        return heartbeat_path.stat().st_mtime_ns if heartbeat_path.exists() else 0

    def record_after_heartbeats(path: Path) -> stage_folder.FileRecord:
        deadline = time.monotonic() + 60
        for _ in range(2):
            previous_heartbeat_ns = last_heartbeat_ns()
            while last_heartbeat_ns() == previous_heartbeat_ns:
                assert time.monotonic() < deadline, "no heartbeat"
                time.sleep(0.05)
        return record_file(path)

    training = start_training(rank, "row_wise", spec=spec, num_steps=1)
    saver = checkpointer(rank, folder / "checkpoints")
    stage_folder.record_file = record_after_heartbeats  # type: ignore[assignment]
    saver.save(training.model, training.optimizer, step=1, best=None)
    saver.finish()
    if rank == 0:
        assert load_manifest(folder / "checkpoints" / checkpoint_name(1), CheckpointManifest, verify=False) is not None


def test_the_heartbeat_continues_while_a_checkpoint_is_hashed(tmp_path: Path) -> None:
    run_ranks(save_with_slow_hashes, world_size=2, arguments=(tmp_path,))


def hash_own_files(rank: int, folder: Path) -> None:
    """Assert that each rank hashes only its own files, and rank 0 also the shared files."""
    hashed_file_names, record_file = [], stage_folder.record_file

    def record_and_remember(path: Path) -> stage_folder.FileRecord:
        hashed_file_names.append(path.name)
        return record_file(path)

    training = start_training(rank, "row_wise", spec=spec_of(), num_steps=1)
    saver = checkpointer(rank, folder / "checkpoints")
    stage_folder.record_file = record_and_remember  # type: ignore[assignment]
    saver.save(training.model, training.optimizer, step=1, best=None)
    saver.finish()
    dist.barrier()
    own_file_names = {path.name for path in (folder / "checkpoints" / checkpoint_name(1)).glob(f"__{rank}_*")}
    assert len(hashed_file_names) == len(set(hashed_file_names)) and own_file_names
    assert set(hashed_file_names) == own_file_names | ({".metadata", "job.json"} if rank == 0 else set())


def test_each_rank_hashes_the_files_that_it_has_written(tmp_path: Path) -> None:
    run_ranks(hash_own_files, world_size=2, arguments=(tmp_path,))
    manifest = load_manifest(tmp_path / "checkpoints" / checkpoint_name(1), CheckpointManifest)  # verifies the checksums
    # The ranks' .distcp files, .metadata and job.json
    assert manifest is not None and {name[:4] for name in manifest.files} == {"__0_", "__1_", ".met", "job."}


def save_to_other_storage(rank: int, folder: Path) -> None:
    """Save a checkpoint. The file of rank 1 is removed before rank 0 looks for it."""
    training = start_training(rank, "row_wise", spec=spec_of(), num_steps=1)
    saver = checkpointer(rank, folder / "checkpoints")
    record_files = checkpoint_module.record_files

    def record_and_remove(paths: Iterable[Path], *, folder: Path) -> dict[str, stage_folder.FileRecord]:
        paths = list(paths)
        records = record_files(paths, folder=folder)
        for path in paths if rank == 1 else ():
            path.unlink()
        return records

    checkpoint_module.record_files = record_and_remove
    saver.save(training.model, training.optimizer, step=1, best=None)
    if rank == 1:
        saver.finish()
        return
    with pytest.raises(
        StageError, match=r"__1_0.distcp: another rank wrote .* bytes, .* not been found; mount the same storage"
    ):
        saver.finish()


def test_the_error_names_a_file_that_another_rank_wrote_and_this_rank_cannot_see(tmp_path: Path) -> None:
    run_ranks(save_to_other_storage, world_size=2, arguments=(tmp_path,))
    assert latest_checkpoint(tmp_path / "checkpoints", fingerprint="f") is None
