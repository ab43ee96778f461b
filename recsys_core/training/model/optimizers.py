"""Optimizers of the tables and the layers, learning-rate schedules, and the Adagrad accumulators of the tables.

Shapes: R rows of a shard, D columns of its weights, C columns of its accumulators; C is 1 for row-wise Adagrad.
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

from recsys_core.models.spec import ModelSpec, TableSpec, module_name
from recsys_core.models.tables.embedding_tables import local_shards
from recsys_core.models.tables.table_config import DenseOptimizer, Schedule, TableOptimizer
from recsys_core.training.config import TrainingConfig
from recsys_core.training.model.sharded_model import EPS, fused_kernels

DENSE_OPTIMIZER_BY_KIND = {"adam": torch.optim.AdamW, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
TABLE_OPTIMIZER_BY_KIND = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}
ADAGRAD_KINDS = ("rowwise_adagrad", "adagrad")
_ACCUMULATOR_KEYS = ("momentum1", "sum")
"""Keys of the accumulator in the optimizer state of a sharded table (FBGEMM) and of a replicated table (torch)."""


def make_optimizer(model: DistributedModelParallel, *, spec: ModelSpec, config: TrainingConfig) -> CombinedOptimizer:
    """Combine the fused optimizers of sharded tables with ordinary optimizers for replicated tables and for the layers."""
    optimizers: list[KeyedOptimizer | tuple[str, KeyedOptimizer]] = [model.fused_optimizer]
    dense_parameter_by_name: dict[str, Tensor] = {}
    for parameter_name, parameter in in_backward_optimizer_filter(model.named_parameters()):
        table_name = table_name_of(parameter_name, spec)
        if table_name is None:
            dense_parameter_by_name[parameter_name] = parameter
        elif not spec.tables[table_name].is_frozen:
            replicated_optimizer = _replicated_table_optimizer(parameter_name, parameter, spec.tables[table_name].optimizer)
            optimizers.append((f"replicated.{table_name}", replicated_optimizer))
    if dense_parameter_by_name:
        optimizers.append(("dense", _dense_optimizer(dense_parameter_by_name, config.dense_optimizer)))
    return CombinedOptimizer(optimizers)


def table_name_of(parameter_name: str, spec: ModelSpec) -> str | None:
    """Return the name of the table to which a parameter or optimizer state belongs; None if it belongs to a tower."""
    name_parts = parameter_name.split(".")
    collection_index = next(
        (index for index, name_part in enumerate(name_parts) if name_part in ("embeddings", "embedding_bags")), None
    )
    if collection_index is None:
        return None
    # The part after the collection is the name of the table. Other parts may be equal to the name of a table by coincidence.
    return next(table_name for table_name in spec.tables if module_name(table_name) == name_parts[collection_index + 1])


def _replicated_table_optimizer(parameter_name: str, parameter: Tensor, optimizer_config: TableOptimizer) -> KeyedOptimizer:
    eps_argument = {"eps": EPS} if optimizer_config.kind in ADAGRAD_KINDS else {}

    def build_optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = TABLE_OPTIMIZER_BY_KIND[optimizer_config.kind](
            parameters, lr=optimizer_config.learning_rate, **eps_argument
        )
        return optimizer

    optimizer = KeyedOptimizerWrapper({parameter_name: parameter}, build_optimizer)
    if optimizer_config.gradient_clip_value is None:
        return optimizer
    return GradientClippingOptimizer(
        optimizer, clipping=GradientClipping.VALUE, max_gradient=optimizer_config.gradient_clip_value
    )


def _dense_optimizer(dense_parameter_by_name: dict[str, Tensor], optimizer_config: DenseOptimizer) -> KeyedOptimizer:
    def build_optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        # No fused kernel accepts sharded and plain tensors in one group. Only Adam has a fused kernel for sharded tensors.
        # Weight decay applies to matrices only. It does not help biases, scales of norms, pooling weights or the temperature.
        parameter_groups = [
            {
                "params": [
                    parameter
                    for parameter in parameters
                    if (isinstance(parameter, DTensor), parameter.dim() > 1) == (is_sharded, is_matrix)
                ],
                "fused": not is_sharded or optimizer_config.kind == "adam",
                "weight_decay": optimizer_config.weight_decay if is_matrix else 0.0,
            }
            for is_sharded in (False, True)
            for is_matrix in (True, False)
        ]
        optimizer: torch.optim.Optimizer = DENSE_OPTIMIZER_BY_KIND[optimizer_config.kind](
            [group for group in parameter_groups if group["params"]], lr=optimizer_config.learning_rate
        )
        return optimizer

    optimizer = KeyedOptimizerWrapper(dense_parameter_by_name, build_optimizer)
    if optimizer_config.gradient_clip_norm is None:
        return optimizer
    # torch needs the process groups of the sharded parameters. Without them, the norm covers only this rank's part.
    process_groups_by_parameter = {
        parameter: [parameter.device_mesh.get_group()]
        for parameter in dense_parameter_by_name.values()
        if isinstance(parameter, DTensor)
    }
    return GradientClippingOptimizer(
        optimizer,
        clipping=GradientClipping.NORM,
        max_gradient=optimizer_config.gradient_clip_norm,
        enable_global_grad_clip=True,
        param_to_pgs=process_groups_by_parameter,
    )


class LearningRates:
    """Sets the learning rates of a step, by the schedule of each table's optimizer and of the dense optimizer."""

    def __init__(self, optimizer: CombinedOptimizer, *, spec: ModelSpec, config: TrainingConfig, total_steps: int) -> None:
        self._total_steps = total_steps
        self._parameter_groups: list[tuple[dict[str, object], Schedule]] = []
        for leaf_optimizer in _leaf_optimizers(optimizer):
            table_names = [
                table_name
                for parameter_name in leaf_optimizer.params
                if (table_name := table_name_of(parameter_name, spec)) is not None
            ]
            if not table_names:
                schedule: Schedule = config.dense_optimizer
            elif spec.tables[table_names[0]].is_frozen:
                continue
            else:
                schedule = spec.tables[table_names[0]].optimizer
            self._parameter_groups += [(group, schedule) for group in leaf_optimizer.param_groups]

    def set_step(self, step: int) -> None:
        """Set the learning rates for `step` (0-based)."""
        for group, schedule in self._parameter_groups:
            group["lr"] = schedule.learning_rate * schedule.scale(step, total_steps=self._total_steps)


def set_completed_steps(model: DistributedModelParallel, *, num_steps: int) -> None:
    """Set the number of completed steps in the tables' kernels. The fused Adam optimizers correct their bias by this number.

    FBGEMM does not save the number in a checkpoint, and also counts the lookups of validations.
    """
    for kernel in fused_kernels(model):
        kernel.iter_cpu.fill_(num_steps)


def _leaf_optimizers(optimizer: KeyedOptimizer) -> Iterator[KeyedOptimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, child_optimizer in optimizer.optimizers:
            yield from _leaf_optimizers(child_optimizer)
    else:
        yield optimizer


@dataclass(frozen=True)
class AccumulatorShard:
    """A view into the Adagrad accumulators of a rectangle of a table.

    Attributes:
        first_row, first_column: first row and first column of the rectangle in the table.
        num_columns: width of the rectangle. values_RC has this many columns, or one if Adagrad is row-wise.
    """

    first_row: int
    first_column: int
    num_columns: int
    values_RC: Tensor

    def table_contribution(self, *, is_rowwise: bool, dim: int) -> tuple[int, int, Tensor]:
        """Return (first row, first column, values). The caller adds `values` to the table's accumulators from this position on.

        With one accumulator per row, the shard's accumulator is a mean over the shard's columns, and the table's accumulator is
        the mean over all columns. `values` is then the shard's accumulator times the shard's share of the columns, so that the
        values of all shards add up to the table's accumulator.

        Args:
            is_rowwise: whether the table has one accumulator per row.
            dim: number of columns of the table.
        """
        if is_rowwise:
            return self.first_row, 0, self.values_RC[:, :1] * (self.num_columns / dim)
        return self.first_row, self.first_column, self.values_RC


def has_accumulators(table: TableSpec) -> bool:
    """Return whether an Adagrad optimizer trains the table."""
    return table.optimizer_kind in ADAGRAD_KINDS


def accumulator_shards(optimizer: KeyedOptimizer, *, spec: ModelSpec, table: str) -> list[AccumulatorShard]:
    """Return this rank's accumulators of `table`; empty if other ranks have the table. optimizer: result of make_optimizer."""
    shards = []
    state_by_parameter = optimizer.state
    for parameter_name, parameter in optimizer.params.items():
        if table_name_of(parameter_name, spec) != table:
            continue
        accumulator = next(
            accumulator
            for key, accumulator in state_by_parameter[parameter].items()
            if key.rpartition(".")[2] in _ACCUMULATOR_KEYS
        )
        # The positions come from the weights. The positions in the state are wrong for row-wise Adagrad with column-wise
        # sharding, because TorchRec continues the row numbers from one column shard to the next.
        for weight_shard, shard_tensor in zip(local_shards(parameter), _local_tensors(accumulator), strict=True):
            values_RC = shard_tensor[:, None] if shard_tensor.dim() == 1 else shard_tensor
            shards.append(
                AccumulatorShard(weight_shard.first_row, weight_shard.first_column, weight_shard.weight_RD.shape[1], values_RC)
            )
    return shards


def _local_tensors(tensor: Any) -> list[Tensor]:
    return [shard.tensor for shard in tensor.local_shards()] if isinstance(tensor, ShardedTensor) else [tensor]
