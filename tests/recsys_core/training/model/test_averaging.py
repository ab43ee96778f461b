"""The average of the weights over epochs: its values, its exchange with the weights, and a training on two gloo ranks."""

import math

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn

from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.tables.table_config import DenseOptimizer, TableOptimizer
from recsys_core.training.checkpoint import checkpoint_name
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job import CHECKPOINTS_FOLDER
from recsys_core.training.model.averaging import WeightAverage
from recsys_core.training.model.sharded_model import fused_kernels
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.forked_training import (
    checkpoint_of,
    export_in_forks,
    generate_dataset,
    make_experiment,
    train_in_forks,
)
from tests.recsys_core.training.small_model import sharded_model, small_spec


def set_weights(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_the_average_is_the_mean_of_the_first_epochs_and_then_moves_by_a_fixed_share() -> None:
    model = nn.Linear(2, 2)
    average = WeightAverage(model, num_epochs=3)
    averages = []
    for epoch, value in enumerate([6.0, 2.0, 4.0, 10.0, -4.0], start=1):
        set_weights(model, value)
        average.add_epoch(epoch)
        averages.append(average.state["weight"][0, 0].item())
    # From epoch 3 on, the average moves by 2 / (num_epochs + 1) = 1/2 of the difference.
    assert averages == pytest.approx([6, 4, 4, 7, 1.5])


def test_averaged_weights_are_loaded_only_inside_the_block_even_after_an_error() -> None:
    model = nn.Linear(2, 2)
    set_weights(model, 1.0)
    average = WeightAverage(model, num_epochs=2)
    set_weights(model, 5.0)
    with pytest.raises(KeyError), average.in_model():
        assert (model.weight == 1).all() and (model.bias == 1).all()
        raise KeyError
    assert (model.weight == 5).all() and (model.bias == 5).all()
    assert (average.state["weight"] == 1).all()


def assert_caches_are_emptied(rank: int) -> None:
    """Assert on each rank that FBGEMM's caches are emptied whenever the weights of a model are exchanged."""
    spec = small_spec()
    model, _ = sharded_model(
        spec,
        sharding_type_by_table=dict.fromkeys(spec.tables, "row_wise"),
        training=TrainingConfig(),
        loss=LossConfig(),
        process=cpu_process(rank),
    )
    emptied_kernels: list[SplitTableBatchedEmbeddingBagsCodegen] = []
    SplitTableBatchedEmbeddingBagsCodegen.reset_cache_states = lambda kernel: emptied_kernels.append(kernel)
    kernels = list(fused_kernels(model))
    with WeightAverage(model, num_epochs=2).in_model():
        assert kernels and emptied_kernels == kernels
    assert emptied_kernels == 2 * kernels


def test_the_cache_of_every_table_is_emptied_when_the_weights_are_exchanged() -> None:
    run_ranks(assert_caches_are_emptied, world_size=2)


def test_with_averaging_the_export_has_the_mean_of_the_epochs(tmp_path):
    num_epochs = 2
    training = TrainingConfig(
        epochs=num_epochs,
        batch_size=256,
        keep_checkpoints=num_epochs,
        validation=None,
        table_optimizer=TableOptimizer(learning_rate=0.2),
        dense_optimizer=DenseOptimizer(learning_rate=0.01),
    )
    dataset = generate_dataset(tmp_path)
    # Each epoch ends with a checkpoint.
    steps_per_epoch = math.ceil(dataset.interactions.num_train_events / (2 * training.batch_size))  # two ranks
    training = training.model_copy(update={"checkpoint_every_steps": steps_per_epoch})
    experiment = make_experiment(dataset, tmp_path / "plan", training=training)
    training_without_average = train_in_forks(experiment, tmp_path / "without")
    export_of_each_epoch = [
        export_in_forks(
            experiment,
            training_without_average.work_folder / CHECKPOINTS_FOLDER / checkpoint_name(epoch * steps_per_epoch),
            tmp_path / f"epoch {epoch}",
        )
        for epoch in range(1, num_epochs + 1)
    ]
    experiment = experiment._replace(training=training.model_copy(update={"averaged_epochs": 2 * num_epochs - 1}))
    averaged_export = export_in_forks(
        experiment, checkpoint_of(train_in_forks(experiment, tmp_path / "with")), tmp_path / "export"
    )
    weight_names = [name for name in averaged_export if name.startswith("table_") or not name.endswith(".npy")]
    assert "table_item.npy" in weight_names and len(weight_names) > 5
    for name in weight_names:
        np.testing.assert_allclose(
            averaged_export[name],
            np.mean([export[name] for export in export_of_each_epoch], axis=0),
            rtol=1e-4,
            atol=1e-6,
            err_msg=name,
        )
    assert not np.allclose(averaged_export["table_item.npy"], export_of_each_epoch[-1]["table_item.npy"], atol=1e-3)
