"""The rectangles of an embedding table that this rank holds.

Shapes: R rows and C columns of a local shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recsys_core.models.spec import module_name


@dataclass(frozen=True)
class LocalShard:
    """A view into the table's own memory, and where it lies in the whole table."""

    row: int
    column: int
    weight_RC: Tensor


def local_shards(value: Any) -> list[LocalShard]:
    """This rank's shards of a value in a sharded model's state dict; a data-parallel table is one shard."""
    if isinstance(value, ShardedTensor):
        shards = ((shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards())
        return [LocalShard(row, column, tensor) for (row, column), tensor in shards]
    return [LocalShard(0, 0, value)]


def table_shards(state: Mapping[str, Any], *, table: str) -> list[LocalShard]:
    """This rank's shards of `table`, from the state dict of a (sharded) RetrievalTask; none where another rank has them all."""
    value = next((value for key, value in state.items() if key.endswith(f".{module_name(table)}.weight")), None)
    return local_shards(value) if value is not None else []
