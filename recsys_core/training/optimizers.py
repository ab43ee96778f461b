"""Optimizers: fused for sharded tables, regular for the rest; learning-rate schedules; Adagrad accumulators of the tables.

Shapes: R rows and C columns of a shard; C is 1 for the accumulators of row-wise Adagrad.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_core.models.embedding_tables import local_shards
from recsys_core.models.optimizer_config import DenseOptimizer, Schedule, TableOptimizer
from recsys_core.models.spec import ModelSpec, module_name
from recsys_core.training.config import TrainingConfig
from recsys_core.training.sharded_model import ADAGRAD_EPS

DENSE_KINDS = {"adam": torch.optim.AdamW, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
REPLICATED_TABLE_KINDS = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}
ADAGRAD_KINDS = ("rowwise_adagrad", "adagrad")
_ACCUMULATOR_KEYS = ("momentum1", "sum")
"""Key of the accumulator in the optimizer state: first for sharded tables (FBGEMM), then for replicated tables (torch)."""


def make_optimizer(model: DistributedModelParallel, *, spec: ModelSpec, config: TrainingConfig) -> CombinedOptimizer:
    """Combine the fused optimizers of the sharded tables with regular ones for replicated tables and for the layers."""
    optimizers: list[KeyedOptimizer | tuple[str, KeyedOptimizer]] = [model.fused_optimizer]
    layers: dict[str, Tensor] = {}
    for name, parameter in in_backward_optimizer_filter(model.named_parameters()):
        table = table_of(name, spec)
        if table is None:
            layers[name] = parameter
        elif not spec.tables[table].frozen:
            settings = spec.tables[table].settings.optimizer or config.table_optimizer
            optimizers.append((f"replicated.{table}", _replicated_table_optimizer(name, parameter, settings)))
    if layers:
        optimizers.append(("dense", _dense_optimizer(layers, config.dense_optimizer)))
    return CombinedOptimizer(optimizers)


def table_of(parameter: str, spec: ModelSpec) -> str | None:
    """Return the table that the name of a parameter or optimizer state belongs to; None if it belongs to a tower."""
    words = parameter.split(".")
    collection_index = next((index for index, word in enumerate(words) if word in ("embeddings", "embedding_bags")), None)
    if collection_index is None:
        return None
    # The word after the collection is the table. Other words may have a table's name without being the table.
    return next(name for name in spec.tables if module_name(name) == words[collection_index + 1])


def _replicated_table_optimizer(name: str, parameter: Tensor, settings: TableOptimizer) -> KeyedOptimizer:
    eps = {"eps": ADAGRAD_EPS} if settings.kind in ADAGRAD_KINDS else {}

    def build(parameters: list[Tensor]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = REPLICATED_TABLE_KINDS[settings.kind](parameters, lr=settings.learning_rate, **eps)
        return optimizer

    optimizer = KeyedOptimizerWrapper({name: parameter}, build)
    if settings.gradient_clip_value is None:
        return optimizer
    return GradientClippingOptimizer(optimizer, clipping=GradientClipping.VALUE, max_gradient=settings.gradient_clip_value)


def _dense_optimizer(layers: dict[str, Tensor], settings: DenseOptimizer) -> KeyedOptimizer:
    def build(parameters: list[Tensor]) -> torch.optim.Optimizer:
        # No fused kernel accepts sharded and plain tensors in one group, and only torch's Adam has one for sharded tensors.
        # Weight decay applies to matrices only: it does not help biases, scales of norms, pooling weights and the temperature.
        groups = [
            {
                "params": [
                    value for value in parameters if (isinstance(value, DTensor), value.dim() > 1) == (is_sharded, is_matrix)
                ],
                "fused": not is_sharded or settings.kind == "adam",
                "weight_decay": settings.weight_decay if is_matrix else 0.0,
            }
            for is_sharded in (False, True)
            for is_matrix in (True, False)
        ]
        optimizer: torch.optim.Optimizer = DENSE_KINDS[settings.kind](
            [group for group in groups if group["params"]], lr=settings.learning_rate
        )
        return optimizer

    optimizer = KeyedOptimizerWrapper(layers, build)
    if settings.gradient_clip_norm is None:
        return optimizer
    # Without the process groups of the sharded parameters, the norm would cover only this rank's part of these parameters.
    process_groups = {value: [value.device_mesh.get_group()] for value in layers.values() if isinstance(value, DTensor)}
    return GradientClippingOptimizer(
        optimizer,
        clipping=GradientClipping.NORM,
        max_gradient=settings.gradient_clip_norm,
        enable_global_grad_clip=True,
        param_to_pgs=process_groups,
    )


class LearningRates:
    """Sets the learning rates of a step. Tables follow the schedule of their optimizer, layers that of the dense optimizer."""

    def __init__(self, optimizer: CombinedOptimizer, *, spec: ModelSpec, config: TrainingConfig, total_steps: int) -> None:
        self._total_steps = total_steps
        self._parameter_groups: list[tuple[dict[str, object], Schedule]] = []
        for leaf_optimizer in _leaf_optimizers(optimizer):
            tables = [table for name in leaf_optimizer.params if (table := table_of(name, spec)) is not None]
            if not tables:
                schedule: Schedule = config.dense_optimizer
            elif spec.tables[tables[0]].frozen:
                continue
            else:
                schedule = spec.tables[tables[0]].settings.optimizer or config.table_optimizer
            self._parameter_groups += [(group, schedule) for group in leaf_optimizer.param_groups]

    def set_step(self, step: int) -> None:
        """Set the learning rates for `step` (0-based)."""
        for group, schedule in self._parameter_groups:
            group["lr"] = schedule.learning_rate * schedule.scale(step, total_steps=self._total_steps)


def _leaf_optimizers(optimizer: KeyedOptimizer) -> Iterator[KeyedOptimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, child in optimizer.optimizers:
            yield from _leaf_optimizers(child)
    else:
        yield optimizer


@dataclass(frozen=True)
class AccumulatorShard:
    """A view into the Adagrad accumulators of a rectangle of a table.

    Attributes:
        row, column: position of the rectangle in the table.
        num_columns: width of the rectangle. values_RC has this many columns, or one if Adagrad is row-wise.
    """

    row: int
    column: int
    num_columns: int
    values_RC: Tensor

    def in_table(self, *, is_rowwise: bool, dim: int) -> tuple[int, int, Tensor]:
        """Return (row, column, values). The caller adds `values` to the whole table's accumulators at this row and column.

        Args:
            is_rowwise: whether the table has one accumulator per row, the mean over all `dim` columns. A shard's accumulator is
                the mean over the shard's columns; `values` is this mean times the shard's share of the columns.
        """
        if is_rowwise:
            return self.row, 0, self.values_RC[:, :1] * (self.num_columns / dim)
        return self.row, self.column, self.values_RC


def has_accumulators(spec: ModelSpec, table: str, *, default: TableOptimizer) -> bool:
    """Return whether an Adagrad optimizer trains `table`. default: optimizer of the tables without an `optimizer` setting."""
    table_spec = spec.tables[table]
    return not table_spec.frozen and (table_spec.settings.optimizer or default).kind in ADAGRAD_KINDS


def accumulator_shards(optimizer: KeyedOptimizer, *, spec: ModelSpec, table: str) -> list[AccumulatorShard]:
    """Return this rank's accumulators of `table`; empty if other ranks have the table. optimizer: result of make_optimizer."""
    shards = []
    state = optimizer.state
    for name, parameter in optimizer.params.items():
        if table_of(name, spec) != table:
            continue
        value = next(value for key, value in state[parameter].items() if key.rpartition(".")[2] in _ACCUMULATOR_KEYS)
        # The positions come from the weights. The positions in the state are wrong for row-wise Adagrad with column-wise
        # sharding, because TorchRec continues the row numbers from one column shard to the next.
        for weight_shard, tensor in zip(local_shards(parameter), _local_tensors(value), strict=True):
            values_RC = tensor[:, None] if tensor.dim() == 1 else tensor
            shards.append(AccumulatorShard(weight_shard.row, weight_shard.column, weight_shard.weight_RD.shape[1], values_RC))
    return shards


def _local_tensors(value: Any) -> list[Tensor]:
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
