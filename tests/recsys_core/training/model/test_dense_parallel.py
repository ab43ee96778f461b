"""Towers that are sharded over the ranks (FSDP2), compared with replicated towers (DDP)."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from recsys_core.errors import InputError, StageError
from recsys_core.launching.heartbeat import HeartbeatWriter
from recsys_core.models.config import TowerConfig
from recsys_core.models.history_config import HistoryConfig, RecencyHistory
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.tables.table_config import DenseOptimizer, TableConfig
from recsys_core.models.task import RetrievalHead
from recsys_core.training.checkpoint import Checkpointer, checkpoint_name, restore
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job import WarmStart
from recsys_core.training.metrics_log import raise_if_not_finite
from recsys_core.training.model.dense_parallel import gather_tensors, local_part, require_shardable_layers
from recsys_core.training.model.optimizers import LearningRates, make_optimizer
from recsys_core.training.setup import TrainingSetup
from recsys_core.training.train import train as train_stage
from recsys_core.training.warm.warm_start import load_champion_weights
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.small_model import make_batch, sharded_model, small_spec

NUM_STEPS, NUM_NEGATIVES = 6, 5
LOSS = LossConfig(num_negatives=NUM_NEGATIVES)
SHARDING_TYPE_BY_TABLE = {"user": "data_parallel", "user.groups": "table_wise", "user.age": "data_parallel"}
"""The other tables are row_wise."""
TOLERANCE_BY_PRECISION = {"fp32": 2e-4, "bf16": 1e-2}
ADAM = DenseOptimizer(learning_rate=0.01, weight_decay=0.01, warmup_steps=2)


def spec_of(history: HistoryConfig | None = None) -> ModelSpec:
    """Return a spec with every kind of dense parameter. On four ranks, the last rank has no row of some layers."""
    forms = {"user.groups": "list", "user.age": "number", "item.price": "number"}
    spec = small_spec(forms=forms, tables={"user.age": TableConfig(dim=4), "item": TableConfig(dim=12)})
    config_changes = {
        "query": TowerConfig(layers=(13, 6, 8), skip_connection=True, layer_norm=True),
        "candidate": TowerConfig(layers=(5, 8)),
        "history": history or spec.config.history,
        "learn_temperature": True,
    }
    return spec.model_copy(update={"config": spec.config.model_copy(update=config_changes)})


class ShardedTraining(NamedTuple):
    """The model and the optimizer of one rank."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer

    @property
    def head(self) -> RetrievalHead:
        head: RetrievalHead = self.model.module.head
        return head


def start_training(rank: int, spec: ModelSpec, **settings: Any) -> ShardedTraining:
    """Return a new training, and assert that exactly the layers of the towers are sharded."""
    config = TrainingConfig(seed=1, **{"dense_optimizer": ADAM} | settings)
    sharding_type_by_table = {name: SHARDING_TYPE_BY_TABLE.get(name, "row_wise") for name in spec.tables}
    model, _ = sharded_model(
        spec, sharding_type_by_table=sharding_type_by_table, training=config, loss=LOSS, process=cpu_process(rank)
    )
    training = ShardedTraining(model, make_optimizer(model, spec=spec, config=config))
    training.head.uses_bf16 = config.precision == "bf16"
    sharded_names = {name for name, parameter in training.head.named_parameters() if isinstance(parameter, DTensor)}
    tower_names = {name for name, _ in training.head.named_parameters() if "tower." in name or "item.projection." in name}
    assert sharded_names == (tower_names if config.dense_parallel == "sharded" else set())
    # The weights and the start vector of the pooling, and the temperature, belong to no tower.
    assert len(training.head.state_dict()) == len(tower_names) + 3
    return training


def train(training: ShardedTraining, rank: int, spec: ModelSpec, *, steps: range, **settings: Any) -> list[float]:
    """Train `steps` and return their losses on this rank."""
    config = TrainingConfig(**{"dense_optimizer": ADAM} | settings)
    learning_rates = LearningRates(training.optimizer, spec=spec, config=config, total_steps=NUM_STEPS)
    batches = iter([make_batch(spec, ranks=[rank], step=step, num_queries=6, num_negatives=NUM_NEGATIVES) for step in steps])
    pipeline = TrainPipelineSparseDist(training.model, training.optimizer, torch.device("cpu"))
    losses = []
    for step in steps:
        learning_rates.set_step(step)
        losses.append(pipeline.progress(batches).item())
    if steps:
        assert len(pipeline._pipelined_modules) == len(training.model.module.embedding_tables)
        pipeline.detach()
    return losses


def dense_state(training: ShardedTraining) -> dict[str, np.ndarray]:
    """Return the weights and optimizer states that TorchRec does not shard, by name. All ranks must call this function."""
    tensor_by_name, _ = flatten_state_dict({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()})
    return {
        name: tensor.detach().numpy().copy()
        for name, tensor in gather_tensors(
            {name: tensor for name, tensor in tensor_by_name.items() if not isinstance(tensor, ShardedTensor)}
        )
    }


SETTINGS_BY_CASE: dict[str, dict[str, Any]] = {
    "adam": {},
    "adam, clipped": {"dense_optimizer": ADAM.model_copy(update={"gradient_clip_norm": 0.02})},
    "adagrad": {"dense_optimizer": DenseOptimizer(kind="adagrad", learning_rate=0.05, gradient_clip_norm=0.02)},
    "sgd": {"dense_optimizer": DenseOptimizer(kind="sgd", learning_rate=0.5, weight_decay=0.01)},
    "bf16": {"precision": "bf16"},
}


def local_shards(training: ShardedTraining, table: str) -> list[np.ndarray]:
    return [shard.weight_RD.numpy() for shard in table_shards(training.model.state_dict(), table=table)]


def compare_steps(rank: int, case_names: list[str], spec: ModelSpec) -> None:
    """Assert that training steps with sharded and with replicated layers have the same losses, weights and tables."""
    for case_name in case_names:
        settings = SETTINGS_BY_CASE[case_name]
        replicated_training, sharded_training = (
            start_training(rank, spec, dense_parallel=mode, **settings) for mode in ("replicated", "sharded")
        )
        initial_state = dense_state(replicated_training)
        expected_losses, losses = (
            train(training, rank, spec, steps=range(NUM_STEPS), **settings)
            for training in (replicated_training, sharded_training)
        )
        tolerance = TOLERANCE_BY_PRECISION[settings.get("precision", "fp32")]
        np.testing.assert_allclose(losses, expected_losses, rtol=tolerance, err_msg=f"{case_name}: losses")
        expected_state, sharded_state = dense_state(replicated_training), dense_state(sharded_training)
        assert sharded_state.keys() == expected_state.keys()
        for name in spec.tables:
            shard_pairs = zip(local_shards(replicated_training, name), local_shards(sharded_training, name), strict=True)
            for index, (expected_shard, shard) in enumerate(shard_pairs):
                expected_state[f"{name} {index}"], sharded_state[f"{name} {index}"] = expected_shard, shard
        for name, expected_array in expected_state.items():
            # Adam divides a gradient by its magnitude, which enlarges the rounding errors of gradients near zero. The tolerance
            # is therefore relative to the learning rate or to the largest weight of the tensor, whichever is larger.
            smallest_scale = 0.0 if name.startswith("optimizer.") else ADAM.learning_rate
            scale = np.abs(expected_array).max(initial=smallest_scale)
            atol = tolerance * scale * (2 if name.endswith("exp_avg_sq") else 1)  # squaring doubles a relative error
            np.testing.assert_allclose(sharded_state[name], expected_array, rtol=0, atol=atol, err_msg=f"{case_name}: {name}")
        assert all((expected_state[name] != initial_array).any() for name, initial_array in initial_state.items()), (
            f"{case_name}: a tensor was not trained"
        )
        num_local_values = torch.tensor(
            [
                local_part(parameter).numel()
                for parameter in sharded_training.head.parameters()
                if isinstance(parameter, DTensor)
            ]
        )
        dist.all_reduce(num_local_values)
        assert num_local_values.tolist() == [
            parameter.numel() for parameter in sharded_training.head.parameters() if isinstance(parameter, DTensor)
        ]


@pytest.mark.parametrize(("world_size", "case_names"), [(1, ["adam"]), (2, list(SETTINGS_BY_CASE)), (4, ["adam, clipped"])])
def test_steps_with_sharded_layers_equal_steps_with_replicated_layers(world_size, case_names):
    run_ranks(compare_steps, world_size=world_size, arguments=(case_names, spec_of()))


def compare_vectors(rank: int) -> None:
    """Assert that sharded and replicated layers encode the same vectors before and after training steps."""
    spec = spec_of(RecencyHistory(length=4, item_representation="candidate_tower"))
    vectors_of_each_mode: list[list[torch.Tensor]] = []
    for mode in ("replicated", "sharded"):
        training = start_training(rank, spec, dense_parallel=mode)
        task, batch = training.model.module, make_batch(spec, ranks=[rank], step=9, num_queries=6, num_negatives=NUM_NEGATIVES)
        vectors_of_each_mode.append([])
        for steps in (range(0), range(2)):  # an export encodes vectors before any step, a validation after some steps
            train(training, rank, spec, steps=steps)
            with torch.no_grad():
                vectors_of_each_mode[-1] += [*task.eval().encode_items(batch), task.encode_queries(batch)]
            task.train()
    replicated_vectors, sharded_vectors = vectors_of_each_mode
    for expected_vectors, vectors in zip(replicated_vectors, sharded_vectors, strict=True):
        torch.testing.assert_close(vectors, expected_vectors)
    assert not torch.equal(replicated_vectors[1], replicated_vectors[4])  # item vectors before and after the steps


def test_sharded_and_replicated_layers_encode_the_same_vectors_before_and_after_steps():
    run_ranks(compare_vectors, world_size=2)


def save_checkpoint(rank: int, mode: str, folder: Path) -> None:
    """Save a checkpoint while the training continues, and write the saved state into `<mode>.npz`."""
    spec = spec_of()
    training = start_training(rank, spec, dense_parallel=mode)
    train(training, rank, spec, steps=range(2))
    process = cpu_process(rank)
    saver = Checkpointer(
        folder / mode,
        fingerprint="f",
        attempt_number=1,
        keep_checkpoints=1,
        text_by_extra_file={},
        heartbeat=HeartbeatWriter(folder / "heartbeat", is_main=process.is_main),
        process=process,
    )
    saver.save(training.model, training.optimizer, step=2, best=None)
    saved_state = dense_state(training)
    train(training, rank, spec, steps=range(2, 4))  # while the checkpoint is being written
    saver.finish()
    if rank == 0:
        np.savez(folder / f"{mode}.npz", **saved_state)


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for mode, world_size in (("sharded", 4), ("replicated", 2)):
        run_ranks(save_checkpoint, world_size=world_size, arguments=(mode, folder))
    return folder


def restore_checkpoints(rank: int, folder: Path) -> None:
    """Assert that both modes restore the checkpoints of both modes without a change."""
    spec = spec_of()
    for saved_mode, mode in itertools.product(("replicated", "sharded"), repeat=2):
        training = start_training(rank, spec, dense_parallel=mode)
        restore(training.model, training.optimizer, checkpoint=folder / saved_mode / checkpoint_name(2))
        restored_state, saved_state = dense_state(training), dict(np.load(folder / f"{saved_mode}.npz"))
        assert restored_state.keys() == saved_state.keys()
        for name, saved_array in saved_state.items():
            np.testing.assert_array_equal(restored_state[name], saved_array, err_msg=f"{saved_mode} -> {mode}: {name}")


@pytest.mark.parametrize("world_size", [1, 3])
def test_sharded_and_replicated_checkpoints_are_restored_in_both_modes(saved_folder, world_size):
    run_ranks(restore_checkpoints, world_size=world_size, arguments=(saved_folder,))


def load_champion_layers(rank: int, folder: Path) -> None:
    """Assert that sharded layers get the weights of a champion's replicated layers."""
    training = start_training(rank, spec_of(), dense_parallel="sharded")
    broadcast_layers = [{name: torch.rand(champion_layer.shape) for name, champion_layer in training.head.named_parameters()}]
    dist.broadcast_object_list(broadcast_layers)  # all ranks get the random layers of rank 0
    (champion_parameters,) = broadcast_layers
    if rank == 0:
        save_file(champion_parameters, folder / "dense.safetensors")
    dist.barrier()
    load_champion_weights(training.model, warm_start=WarmStart(run_id="champion", export_folder=folder, prepared_folder=folder))
    loaded_layers = dict(gather_tensors(training.head.state_dict()))
    assert loaded_layers.keys() == champion_parameters.keys()
    for name, champion_layer in champion_parameters.items():
        torch.testing.assert_close(loaded_layers[name], champion_layer, rtol=0, atol=0)


def test_the_layers_of_the_champion_are_loaded_into_sharded_layers(tmp_path):
    run_ranks(load_champion_layers, world_size=4, arguments=(tmp_path,))


def raise_on_rank_1(rank: int) -> None:
    """Assert that rank 1 names a layer with a NaN while rank 0 takes part in no collective."""
    spec = spec_of()
    training = start_training(rank, spec, dense_parallel="sharded")
    weight = dict(training.head.named_parameters())["query.tower.layers.0.weight"]
    if rank == 1:  # the loss of rank 0 is finite, so it takes part in no collective here
        with torch.no_grad():
            local_part(weight)[0, 0] = torch.nan
        with pytest.raises(StageError, match=r"rank 1: .* \(layers head\.query\.tower\.layers\.0\.weight are not finite\)"):
            raise_if_not_finite(torch.tensor(torch.nan), step=3, epoch=1, model=training.model, spec=spec, rank=rank)


def test_a_rank_reports_its_layers_that_are_not_finite():
    run_ranks(raise_on_rank_1, world_size=2, timeout_s=30)


def test_sharding_towers_without_layers_is_rejected_before_the_launch(tmp_path):
    spec = small_spec(forms={})
    no_layers = TowerConfig(layers=())
    config = spec.config.model_copy(update={"query": no_layers, "candidate": no_layers})
    spec_without_layers = spec.model_copy(update={"config": config})
    require_shardable_layers("sharded", spec=spec)
    require_shardable_layers("auto", spec=spec_without_layers)
    with pytest.raises(InputError, match=r"is sharded, .*layers are \[\], .* or set training.dense_parallel to auto"):
        train_stage(
            TrainingSetup(spec_without_layers, TrainingConfig(dense_parallel="sharded"), LOSS),
            dataset=None,
            plan=None,
            folder=tmp_path / "train",
            on_progress=print,
        )
    assert not list(tmp_path.iterdir())
