"""An index in several shards. Each shard is an index of a part of the items, in a file of its own.

FAISS's IndexShards is not used, because it has no file format and would search all shards with the same item selector. The
shards are not merged into one file, because FAISS cannot merge graphs, and a merge would take the memory of the whole index.

Shapes: S shards, B queries, N rows returned by a search, I items, R items of a shard, L looked-up items, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.layout import shard_files
from recsys_core.dataset.shards import positions_by_shard
from recsys_core.retrieval.index_kind import item_row_by_position
from recsys_core.seeds import INDEX_ORDER_SEED

Floats32 = NDArray[np.float32]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class ShardedIndex:
    """The IndexIDMaps of the shards, which return item rows of the whole catalogue."""

    shards: tuple[Any, ...]

    @property
    def ntotal(self) -> int:
        """Number of vectors."""
        return sum(shard.ntotal for shard in self.shards)

    @property
    def d(self) -> int:
        """Width of the vectors."""
        width: int = self.shards[0].d
        return width


def shards_of(index: Any) -> tuple[Any, ...]:
    """Return the shards of an index. An IndexIDMap is its own only shard."""
    return index.shards if isinstance(index, ShardedIndex) else (index,)


def index_paths(folder: Path, name: str, *, num_shards: int) -> list[Path]:
    """Return the file of each shard of an index.

    >>> [path.name for num_shards in (1, 2) for path in index_paths(Path(), "hnsw", num_shards=num_shards)]
    ['hnsw.faiss', 'hnsw.0.faiss', 'hnsw.1.faiss']
    """
    return [folder / file_name for file_name in shard_files(f"{name}.faiss", num_shards=num_shards)]


def rows_by_shard(num_items: int, *, num_shards: int) -> list[Rows]:
    """Return the item rows of each shard, in the order in which their vectors are added.

    FAISS returns equal scores in the order in which the vectors were added. Row order would favour popular items, because rows
    are numbered by falling popularity. The concatenation of the shards is the same for every number of shards.
    """
    order_I = np.random.default_rng(INDEX_ORDER_SEED).permutation(num_items)
    return np.array_split(order_I, num_shards)


def merge(shard_results: Sequence[tuple[Floats32, Rows]]) -> tuple[Floats32, Rows]:
    """Merge scores [B, N] and item rows [B, N] of each shard, best first. Among equal scores, earlier shards come first.

    >>> first, second = (np.array([[3, 1]]), np.array([[7, 8]])), (np.array([[2, 1]]), np.array([[4, 5]]))
    >>> [array.tolist() for array in merge([first, second])]
    [[[3, 2]], [[7, 4]]]
    """
    if len(shard_results) == 1:
        return shard_results[0]
    score_BN, row_BN = (np.concatenate(arrays, axis=1) for arrays in zip(*shard_results, strict=True))
    order_BN = np.argsort(-score_BN, axis=1, kind="stable")[:, : shard_results[0][0].shape[1]]
    return np.take_along_axis(score_BN, order_BN, axis=1), np.take_along_axis(row_BN, order_BN, axis=1)


class ShardVectors:
    """The vectors in the shards of an index, by item row.

    Args:
        read_vectors_S: function of each shard that returns the vectors at positions inside the shard.
    """

    def __init__(self, index: Any, read_vectors_S: Sequence[Callable[[Rows], Floats32]]) -> None:
        self._index, self._read_vectors_S = index, read_vectors_S
        row_S = [item_row_by_position(shard) for shard in shards_of(index)]
        self._end_position_S = np.cumsum([len(row_R) for row_R in row_S])
        self._position_I = np.argsort(np.concatenate(row_S))

    def take(self, item_row_L: Rows) -> Floats32:
        """Return the vectors of items, [L, D]."""
        position_L, vector_LD = self._position_I[item_row_L], np.empty((len(item_row_L), self._index.d), np.float32)
        shard_L = np.searchsorted(self._end_position_S, position_L, side="right")
        for shard, indices in positions_by_shard(shard_L, num_shards=len(self._end_position_S)):
            shard_start = self._end_position_S[shard - 1] if shard else 0
            vector_LD[indices] = self._read_vectors_S[shard](position_L[indices] - shard_start)
        return vector_LD
