"""Towers sharded over the ranks (FSDP2) compared with replicas (DDP): the same steps, checkpoints and layers."""

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
from recsys_core.launching.rank import Process
from recsys_core.models.config import TowerConfig
from recsys_core.models.history_config import HistoryConfig, RecencyHistory
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.tables.table_config import DenseOptimizer, TableConfig
from recsys_core.models.task import RetrievalHead
from recsys_core.training.checkpoint import Checkpointer, checkpoint_name, restore
from recsys_core.training.config import TrainingConfig
from recsys_core.training.dense_parallel import gather_tensors, local_part, require_shardable_layers
from recsys_core.training.job import WarmStart
from recsys_core.training.metrics_log import raise_if_not_finite
from recsys_core.training.optimizers import LearningRates, make_optimizer
from recsys_core.training.setup import TrainingSetup
from recsys_core.training.train import train as train_stage
from recsys_core.training.warm.warm_start import load_champion_weights
from tests.gloo import run_ranks
from tests.recsys_core.training.small_model import make_batch, sharded_model, small_spec

NUM_STEPS, NUM_NEGATIVES = 6, 5
LOSS = LossConfig(num_negatives=NUM_NEGATIVES)
KINDS = {"user": "data_parallel", "user.groups": "table_wise", "user.age": "data_parallel"}
"""Sharding types of tables; the others are row_wise."""
ROUNDING = {"fp32": 2e-4, "bf16": 1e-2}
ADAM = DenseOptimizer(learning_rate=0.01, weight_decay=0.01, warmup_steps=2)


def spec_of(history: HistoryConfig | None = None) -> ModelSpec:
    """Return a model with every kind of dense parameter. Its layers have too few rows for the last of four ranks."""
    forms = {"user.groups": "list", "user.age": "number", "item.price": "number"}
    spec = small_spec(forms=forms, tables={"user.age": TableConfig(dim=4), "item": TableConfig(dim=12)})
    towers = {
        "query": TowerConfig(layers=(13, 6, 8), skip_connection=True, layer_norm=True),
        "candidate": TowerConfig(layers=(5, 8)),
        "history": history or spec.config.history,
        "learn_temperature": True,
    }
    return spec.model_copy(update={"config": spec.config.model_copy(update=towers)})


class Setup(NamedTuple):
    model: DistributedModelParallel
    optimizer: CombinedOptimizer

    @property
    def head(self) -> RetrievalHead:
        head: RetrievalHead = self.model.module.head
        return head


def process_of(rank: int) -> Process:
    return Process(rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu"))


def make(rank: int, spec: ModelSpec, **settings: Any) -> Setup:
    training = TrainingConfig(seed=1, **{"dense_optimizer": ADAM} | settings)
    kinds = {name: KINDS.get(name, "row_wise") for name in spec.tables}
    model, _ = sharded_model(spec, kinds=kinds, training=training, loss=LOSS, process=process_of(rank))
    setup = Setup(model, make_optimizer(model, spec=spec, config=training))
    setup.head.uses_bf16 = training.precision == "bf16"
    sharded = {name for name, value in setup.head.named_parameters() if isinstance(value, DTensor)}
    towers = {name for name, _ in setup.head.named_parameters() if "tower." in name or "item.projection." in name}
    assert sharded == (towers if training.dense_parallel == "sharded" else set())
    assert len(setup.head.state_dict()) == len(towers) + 3, "but for the pooling's weights and its start, and the temperature"
    return setup


def train(setup: Setup, rank: int, spec: ModelSpec, *, steps: range, **settings: Any) -> list[float]:
    """Train and return the losses of this rank."""
    training = TrainingConfig(**{"dense_optimizer": ADAM} | settings)
    rates = LearningRates(setup.optimizer, spec=spec, config=training, total_steps=NUM_STEPS)
    batches = iter([make_batch(spec, ranks=[rank], step=step, queries=6, negatives=NUM_NEGATIVES) for step in steps])
    pipeline = TrainPipelineSparseDist(setup.model, setup.optimizer, torch.device("cpu"))
    losses = []
    for step in steps:
        rates.set_step(step)
        losses.append(pipeline.progress(batches).item())
    if steps:
        assert len(pipeline._pipelined_modules) == len(setup.model.module.embedding_tables)
        pipeline.detach()
    return losses


def dense_state(setup: Setup) -> dict[str, np.ndarray]:
    """Return the weights and optimizer states that TorchRec does not shard, by their names in a checkpoint. Collective."""
    flat, _ = flatten_state_dict({"model": setup.model.state_dict(), "optimizer": setup.optimizer.state_dict()})
    return {
        name: value.detach().numpy().copy()
        for name, value in gather_tensors({name: value for name, value in flat.items() if not isinstance(value, ShardedTensor)})
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "adam": {},
    "adam, clipped": {"dense_optimizer": ADAM.model_copy(update={"gradient_clip_norm": 0.02})},
    "adagrad": {"dense_optimizer": DenseOptimizer(kind="adagrad", learning_rate=0.05, gradient_clip_norm=0.02)},
    "sgd": {"dense_optimizer": DenseOptimizer(kind="sgd", learning_rate=0.5, weight_decay=0.01)},
    "bf16": {"precision": "bf16"},
}


def local_tables(setup: Setup, name: str) -> list[np.ndarray]:
    return [shard.weight_RD.numpy() for shard in table_shards(setup.model.state_dict(), table=name)]


def step_both(rank: int, names: list[str], spec: ModelSpec) -> None:
    for case in names:
        settings = SETTINGS[case]
        replicated, sharded = (make(rank, spec, dense_parallel=mode, **settings) for mode in ("replicated", "sharded"))
        initial_state = dense_state(replicated)
        expected, sharded_losses = (
            train(setup, rank, spec, steps=range(NUM_STEPS), **settings) for setup in (replicated, sharded)
        )
        rounding = ROUNDING[settings.get("precision", "fp32")]
        np.testing.assert_allclose(sharded_losses, expected, rtol=rounding, err_msg=f"{case}: losses")
        expected, actual = dense_state(replicated), dense_state(sharded)
        assert actual.keys() == expected.keys()
        for name in spec.tables:
            for place, shards in enumerate(zip(*(local_tables(setup, name) for setup in (replicated, sharded)), strict=True)):
                expected[f"{name} {place}"], actual[f"{name} {place}"] = shards
        for name, value in expected.items():
            # Adam turns the rounding of a gradient near zero into a part of a whole step, so a parameter may differ by a part
            # of a step, and a tensor by a part of its largest number. A second moment is a square, which doubles the error.
            smallest_scale = 0.0 if name.startswith("optimizer.") else ADAM.learning_rate
            atol = rounding * np.abs(value).max(initial=smallest_scale) * (2 if name.endswith("exp_avg_sq") else 1)
            np.testing.assert_allclose(actual[name], value, rtol=0, atol=atol, err_msg=f"{case}: {name}")
        assert all((expected[name] != value).any() for name, value in initial_state.items()), f"{case}: something did not move"
        num_local_values = torch.tensor(
            [local_part(value).numel() for value in sharded.head.parameters() if isinstance(value, DTensor)]
        )
        dist.all_reduce(num_local_values)
        assert num_local_values.tolist() == [value.numel() for value in sharded.head.parameters() if isinstance(value, DTensor)]


@pytest.mark.parametrize(("world_size", "names"), [(1, ["adam"]), (2, list(SETTINGS)), (4, ["adam, clipped"])])
def test_steps_with_sharded_layers_are_those_with_replicated_ones(world_size, names):
    run_ranks(step_both, world_size=world_size, arguments=(names, spec_of()))


def encode_both(rank: int) -> None:
    spec = spec_of(RecencyHistory(length=4, item_representation="candidate_tower"))
    vectors_by_mode: list[list[torch.Tensor]] = []
    for mode in ("replicated", "sharded"):
        setup = make(rank, spec, dense_parallel=mode)
        task, batch = setup.model.module, make_batch(spec, ranks=[rank], step=9, queries=6, negatives=NUM_NEGATIVES)
        vectors_by_mode.append([])
        for steps in (range(0), range(2)):  # an export has not stepped the model, a validation has
            train(setup, rank, spec, steps=steps)
            with torch.no_grad():
                vectors_by_mode[-1] += [*task.eval().encode_items(batch), task.encode_queries(batch)]
            task.train()
    for expected, value in zip(*vectors_by_mode, strict=True):
        torch.testing.assert_close(value, expected)
    assert not torch.equal(vectors_by_mode[0][1], vectors_by_mode[0][4])


def test_layers_are_gathered_for_vectors_before_the_first_step_and_between_steps():
    run_ranks(encode_both, world_size=2)


def saved_name(mode: str, ranks: int) -> str:
    return f"{mode}-{ranks}"


def save_one(rank: int, mode: str, folder: Path) -> None:
    spec = spec_of()
    setup = make(rank, spec, dense_parallel=mode)
    train(setup, rank, spec, steps=range(2))
    process = process_of(rank)
    target = folder / saved_name(mode, process.world_size)
    saver = Checkpointer(
        target,
        fingerprint="f",
        attempt_number=1,
        keep_checkpoints=1,
        text_by_extra_file={},
        heartbeat=HeartbeatWriter(folder / "heartbeat", is_main=process.is_main),
        process=process,
    )
    saver.save(setup.model, setup.optimizer, step=2, best=None)
    expected = dense_state(setup)
    train(setup, rank, spec, steps=range(2, 4))  # while the checkpoint is being written
    saver.finish()
    if rank == 0:
        np.savez(folder / f"{saved_name(mode, process.world_size)}.npz", **expected)


SAVED = [("sharded", 4), ("replicated", 2)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for mode, ranks in SAVED:
        run_ranks(save_one, world_size=ranks, arguments=(mode, folder))
    return folder


def load_all(rank: int, folder: Path) -> None:
    spec = spec_of()
    for mode in ("replicated", "sharded"):
        for source in (saved_name(*source) for source in SAVED):
            setup = make(rank, spec, dense_parallel=mode)
            restore(setup.model, setup.optimizer, checkpoint=folder / source / checkpoint_name(2))
            restored, expected = dense_state(setup), dict(np.load(folder / f"{source}.npz"))
            assert restored.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_array_equal(restored[name], value, err_msg=f"{source} -> {mode}: {name}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_checkpoint_loads_sharded_and_replicated_on_any_number_of_ranks(saved, world_size):
    run_ranks(load_all, world_size=world_size, arguments=(saved,))


def fill_warm(rank: int, folder: Path) -> None:
    setup = make(rank, spec_of(), dense_parallel="sharded")
    layers = {name: torch.rand(value.shape) for name, value in setup.head.named_parameters()}
    dist.broadcast_object_list(shared_layers := [layers])
    if rank == 0:
        save_file(shared_layers[0], folder / "dense.safetensors")
    dist.barrier()
    load_champion_weights(setup.model, warm_start=WarmStart(run_id="champion", export_folder=folder, prepared_folder=folder))
    loaded = dict(gather_tensors(setup.head.state_dict()))
    assert loaded.keys() == shared_layers[0].keys()
    for name, value in shared_layers[0].items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)


def test_the_layers_of_the_champion_are_loaded_into_sharded_layers(tmp_path):
    run_ranks(fill_warm, world_size=4, arguments=(tmp_path,))


def refuse_alone(rank: int) -> None:
    setup = make(rank, spec := spec_of(), dense_parallel="sharded")
    weight = dict(setup.head.named_parameters())["query.tower.layers.0.weight"]
    if rank == 1:  # the other one does not come: it waits for this rank's part in the next step
        with torch.no_grad():
            local_part(weight)[0, 0] = torch.nan
        with pytest.raises(StageError, match=r"rank 1: .* \(layers head\.query\.tower\.layers\.0\.weight are not finite\)"):
            raise_if_not_finite(torch.tensor(torch.nan), step=3, epoch=1, model=setup.model, spec=spec, rank=rank)


def test_one_rank_alone_reports_which_of_its_layers_are_not_finite():
    run_ranks(refuse_alone, world_size=2, timeout_s=30)


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
