"""Which parameters of the towers decay."""

import pytest
import torch
from torchrec.distributed.model_parallel import get_unwrapped_module

from recsys_core.models.config import TowerConfig
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.optimizer_config import DenseOptimizer
from recsys_core.training.config import DenseParallel, TrainingConfig
from recsys_core.training.dense_parallel import local
from recsys_core.training.optimizers import make_optimizer
from recsys_core.training.process_group import Process
from tests.gloo import run_ranks
from tests.recsys_core.training.small_model import sharded_model, small_spec

RATE, DECAY = 0.1, 0.5


def decay_alone(rank: int, kind: str, dense_parallel: DenseParallel) -> None:
    spec = small_spec(forms={})
    layers = TowerConfig(layers=(12, 8), skip_connection=True, layer_norm=True)
    spec = spec.model_copy(update={"config": spec.config.model_copy(update={"query": layers, "learn_temperature": True})})
    dense = DenseOptimizer.model_validate({"kind": kind, "learning_rate": RATE, "weight_decay": DECAY})
    config = TrainingConfig(dense_optimizer=dense, dense_parallel=dense_parallel)
    process = Process(rank=rank, world_size=1, device=torch.device("cpu"))
    model, _ = sharded_model(
        spec, kinds=dict.fromkeys(spec.tables, "row_wise"), training=config, loss=LossConfig(), process=process
    )
    parameters = dict(get_unwrapped_module(model).head.named_parameters())
    assert {"objective.log_temperature", "query.pooling.attention", "query.tower.layers.1.weight"} <= set(parameters)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(1.0)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)  # whatever moves now moves by decay alone
    make_optimizer(model, spec=spec, config=config).step()
    for name, parameter in parameters.items():
        is_still = torch.equal(local(parameter), torch.ones_like(local(parameter)))
        assert is_still == (parameter.dim() < 2), name
    matrix = local(parameters["query.tower.layers.0.weight"])
    if kind != "adagrad":
        torch.testing.assert_close(matrix, torch.full_like(matrix, 1 - RATE * DECAY))


@pytest.mark.parametrize("dense_parallel", ["replicated", "sharded"])
@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd"])
def test_only_matrices_decay(kind: str, dense_parallel: DenseParallel) -> None:
    run_ranks(decay_alone, world_size=1, arguments=(kind, dense_parallel))
