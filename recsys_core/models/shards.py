"""The rectangles of an embedding table that this rank holds.

Shapes: R rows and C columns of a local shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor


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
    """This rank's shards of `table`, from the state dict of a (sharded) RetrievalTask."""
    (value,) = (value for key, value in state.items() if key.endswith(f"embedding_bags.{table}.weight"))
    return local_shards(value)
