"""Adagrad's memory of an embedding table: what it has summed up for each row, or each number, and divides a step by.

Shapes: R rows and C columns of a shard; S is C, or 1 where there is one sum per row.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

from recsys_core.models.optimizer_config import TableOptimizer
from recsys_core.models.shards import local_shards
from recsys_core.models.spec import ModelSpec
from recsys_core.training.optimizers import table_of

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
            columns = weight.weight_RC.shape[1]
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
