"""Who updates what: tables in the backward pass, towers and replicated tables after it; and how fast, step by step."""

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

DENSE, REPLICATED = "dense", "replicated"
REPLICATED_KINDS = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}


def make_optimizer(model: DistributedModelParallel, *, spec: ModelSpec, config: TrainingConfig) -> CombinedOptimizer:
    """One optimizer over the fused ones and those for what the backward pass does not update."""
    dense: dict[str, torch.Tensor] = {}
    parts: list[KeyedOptimizer | tuple[str, KeyedOptimizer]] = [model.fused_optimizer]
    for name, parameter in in_backward_optimizer_filter(model.named_parameters()):
        table = table_of(name, spec)
        if table is None:
            dense[name] = parameter
        elif not spec.tables[table].frozen:
            wish = spec.tables[table].settings.optimizer or config.table_optimizer
            made: KeyedOptimizer = KeyedOptimizerWrapper({name: parameter}, lambda p, wish=wish: _replicated(p, wish))
            if wish.gradient_clip_value is not None:
                made = GradientClippingOptimizer(made, clipping=GradientClipping.VALUE, max_gradient=wish.gradient_clip_value)
            parts.append((f"{REPLICATED}.{table}", made))
    if dense:
        layers: KeyedOptimizer = KeyedOptimizerWrapper(dense, lambda p: _dense(p, config.dense_optimizer))
        if config.dense_optimizer.gradient_clip_norm is not None:
            # Told which are sharded and over whom; else it takes the norm of what a rank holds, and for them of nothing at all.
            groups = {value: [value.device_mesh.get_group()] for value in dense.values() if isinstance(value, DTensor)}
            layers = GradientClippingOptimizer(
                layers,
                clipping=GradientClipping.NORM,
                max_gradient=config.dense_optimizer.gradient_clip_norm,
                enable_global_grad_clip=True,
                param_to_pgs=groups,
            )
        parts.append((DENSE, layers))
    return CombinedOptimizer(parts)


def table_of(parameter: str, spec: ModelSpec) -> str | None:
    """The table whose weights or optimizer state `parameter` names; None for those of the towers."""
    words = parameter.split(".")
    holder = next((place for place, word in enumerate(words) if word in ("embeddings", "embedding_bags")), None)
    if holder is None:
        return None
    # Only the word after it: a collection may be named as a table is.
    return next(name for name in spec.tables if module_name(name) == words[holder + 1])


def _dense(parameters: list[torch.Tensor], wish: DenseOptimizer) -> torch.optim.Optimizer:
    kinds = {"adam": torch.optim.AdamW, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
    # Apart from each other, since no kernel takes both; for sharded parameters torch has a fused one of Adam alone.
    # Only matrices decay: a bias, a norm's scale, the pooling's weights or the temperature is not better for being near zero.
    groups = [
        {
            "params": [value for value in parameters if isinstance(value, DTensor) == sharded and (value.dim() > 1) == decays],
            "fused": not sharded or wish.kind == "adam",
            "weight_decay": wish.weight_decay if decays else 0.0,
        }
        for sharded in (False, True)
        for decays in (True, False)
    ]
    made: torch.optim.Optimizer = kinds[wish.kind]([group for group in groups if group["params"]], lr=wish.learning_rate)
    return made


def _replicated(parameters: list[torch.Tensor], wish: TableOptimizer) -> torch.optim.Optimizer:
    eps = {"eps": ADAGRAD_EPS} if wish.kind in ("rowwise_adagrad", "adagrad") else {}
    made: torch.optim.Optimizer = REPLICATED_KINDS[wish.kind](parameters, lr=wish.learning_rate, **eps)
    return made


class LearningRates:
    """Sets every group's learning rate for a step, from its table's schedule or the towers'."""

    def __init__(self, optimizer: CombinedOptimizer, *, spec: ModelSpec, config: TrainingConfig, total_steps: int) -> None:
        self._total_steps = total_steps
        self._groups: list[tuple[dict[str, object], Schedule]] = []
        for one in _leaves(optimizer):
            table = next((found for name in one.params if (found := table_of(name, spec)) is not None), None)
            if table is None:
                schedule: Schedule = config.dense_optimizer
            elif spec.tables[table].frozen:
                continue
            else:
                schedule = spec.tables[table].settings.optimizer or config.table_optimizer
            self._groups += [(group, schedule) for group in one.param_groups]

    def set_step(self, step: int) -> None:
        """Sets the learning rates for `step` (0-based)."""
        for group, schedule in self._groups:
            group["lr"] = schedule.learning_rate * schedule.scale(step, total_steps=self._total_steps)


def _leaves(optimizer: KeyedOptimizer) -> Iterator[KeyedOptimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from _leaves(part)
    else:
        yield optimizer


ADAGRAD = ("rowwise_adagrad", "adagrad")
_KEYS = ("momentum1", "sum")
"""What FBGEMM calls the sums of a sharded table, and torch those of a replicated one."""


@dataclass(frozen=True)
class SumShard:
    """A view into the sums of a rectangle of a table, which starts at (row, column) and is `columns` wide."""

    row: int
    column: int
    columns: int
    sum_RS: Tensor


def has_sums(spec: ModelSpec, table: str, *, default: TableOptimizer) -> bool:
    """Whether `table` is trained by an Adagrad. default: of tables that have no optimizer of their own."""
    found = spec.tables[table]
    return not found.frozen and (found.settings.optimizer or default).kind in ADAGRAD


def sum_shards(optimizer: KeyedOptimizer, *, spec: ModelSpec, table: str) -> list[SumShard]:
    """This rank's sums of `table`, from the optimizer that make_optimizer gives; none where another rank has them all."""
    shards = []
    state = optimizer.state
    for name, parameter in optimizer.params.items():
        if table_of(name, spec) != table:
            continue
        value = next(value for key, value in state[parameter].items() if key.rpartition(".")[2] in _KEYS)
        # Under column-wise sharding TorchRec counts the rows of row-wise sums through all shards: the weights know the place.
        for weight, sums in zip(local_shards(parameter), _tensors(value), strict=True):
            columns = weight.weight_RD.shape[1]
            shards.append(SumShard(weight.row, weight.column, columns, sums[:, None] if sums.dim() == 1 else sums))
    return shards


def _tensors(value: Any) -> list[Tensor]:
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]


def sums_of(shard: SumShard, *, by_row: bool, dim: int) -> tuple[int, int, Tensor]:
    """(row, column, values) of what `shard` adds to the sums of the whole table of width `dim`: [rows] or [rows, dim].

    A sum per row is the mean over the shard's own columns: those of all column shards make up the row's by their widths.
    """
    if by_row:
        return shard.row, 0, shard.sum_RS[:, :1] * (shard.columns / dim)
    return shard.row, shard.column, shard.sum_RS
