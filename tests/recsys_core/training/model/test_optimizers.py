"""Weight decay of the layers, Adagrad accumulators of the tables, and names of table parameters."""

import pytest
import torch
from torchrec.distributed.model_parallel import get_unwrapped_module

from recsys_core.manifests import IngestedFeature
from recsys_core.models.config import TowerConfig, TwoTowerConfig
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import DenseOptimizer
from recsys_core.training.config import DenseParallel, TrainingConfig
from recsys_core.training.model.dense_parallel import local_part
from recsys_core.training.model.optimizers import AccumulatorShard, make_optimizer, table_name_of
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.small_model import sharded_model, small_spec

LEARNING_RATE, WEIGHT_DECAY = 0.1, 0.5


def assert_weight_decay_changes_only_matrices(rank: int, kind: str, dense_parallel: DenseParallel) -> None:
    """Assert that an optimizer step without gradients changes only matrices, by the weight decay."""
    spec = small_spec(forms={})
    query_tower = TowerConfig(layers=(12, 8), skip_connection=True, layer_norm=True)
    spec = spec.model_copy(update={"config": spec.config.model_copy(update={"query": query_tower, "learn_temperature": True})})
    dense_optimizer = DenseOptimizer.model_validate(
        {"kind": kind, "learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    )
    config = TrainingConfig(dense_optimizer=dense_optimizer, dense_parallel=dense_parallel)
    model, _ = sharded_model(
        spec,
        sharding_type_by_table=dict.fromkeys(spec.tables, "row_wise"),
        training=config,
        loss=LossConfig(),
        process=cpu_process(rank),
    )
    parameters = dict(get_unwrapped_module(model).head.named_parameters())
    assert {"objective.log_temperature", "query.pooling.attention", "query.tower.layers.1.weight"} <= set(parameters)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(1.0)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)  # so that only weight decay changes the parameter
    make_optimizer(model, spec=spec, config=config).step()
    for name, parameter in parameters.items():
        is_unchanged = torch.equal(local_part(parameter), torch.ones_like(local_part(parameter)))
        assert is_unchanged == (parameter.dim() < 2), name
    matrix = local_part(parameters["query.tower.layers.0.weight"])
    if kind != "adagrad":
        torch.testing.assert_close(matrix, torch.full_like(matrix, 1 - LEARNING_RATE * WEIGHT_DECAY))


@pytest.mark.parametrize("dense_parallel", ["replicated", "sharded"])
@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd"])
def test_weight_decay_changes_only_matrices(kind: str, dense_parallel: DenseParallel) -> None:
    run_ranks(assert_weight_decay_changes_only_matrices, world_size=1, arguments=(kind, dense_parallel))


def test_rowwise_accumulators_of_column_shards_add_up_to_the_mean_over_the_whole_row() -> None:
    first_shard = AccumulatorShard(first_row=1, first_column=0, num_columns=4, values_RC=torch.tensor([[1.0], [2.0]]))
    second_shard = AccumulatorShard(first_row=1, first_column=4, num_columns=12, values_RC=torch.tensor([[5.0], [2.0]]))
    (*first_position, first_values), (*second_position, second_values) = (
        shard.table_contribution(is_rowwise=True, dim=16) for shard in (first_shard, second_shard)
    )
    assert first_position == second_position == [1, 0]
    assert (first_values + second_values).tolist() == [[(1 * 4 + 5 * 12) / 16], [2.0]]


def test_a_shard_with_an_accumulator_per_value_keeps_its_position_in_the_table() -> None:
    shard = AccumulatorShard(first_row=1, first_column=2, num_columns=2, values_RC=torch.tensor([[5.0, 6.0]]))
    row, column, values = shard.table_contribution(is_rowwise=False, dim=4)
    assert (row, column, values.tolist()) == (1, 2, [[5.0, 6.0]])


@pytest.mark.parametrize(
    ("parameter_name", "table_name"),
    [
        ("embedding_tables.item.embeddings.item.weight", "item"),
        ("embedding_tables.item.embeddings.item__brand.weight", "item.brand"),
        ("replicated.item.embedding_tables.unpooled_8.embeddings.user.weight", "user"),
        ("dense.head.item.tower.layers.0.weight", None),
    ],
)
def test_table_name_of_finds_the_table_of_a_parameter_in_any_collection(parameter_name: str, table_name: str | None) -> None:
    brand = IngestedFeature(
        kind="categorical",
        num_rows=5,
        num_values=3,
        num_out_of_vocabulary=0,
        num_missing=0,
        definition="{}",
        is_continued=False,
    )
    spec = ModelSpec.sized(
        TwoTowerConfig(learn_user_embedding=True), num_users=3, num_items=4, ingested_by_feature={"item.brand": brand}
    )
    assert table_name_of(parameter_name, spec) == table_name
