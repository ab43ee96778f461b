"""Loading and searching of FAISS indexes. Search parameters are passed with each call. An index returns item rows.

Shapes: B queries, D width, N search depth, I items, R vectors of a shard.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from recsys_core.errors import StageError
from recsys_core.manifests import FileRecord, record_file
from recsys_core.retrieval.index_kind import item_row_by_position, search_vectors
from recsys_core.retrieval.kinds import AnyIndexKind
from recsys_core.retrieval.shards import ShardedIndex, ShardVectors, merge, shards_of

MAX_EXACT_ITEMS = 20_000
"""Up to this number of selected items, queries are compared with all of them, which is exact and about as fast as a search."""


def load_index(record_by_path: Mapping[Path, FileRecord]) -> Any:
    """Memory-map the index whose shards are in these files. Raises StageError if a file differs from its record.

    The checksums are verified first, because faiss silently reads most corrupt files and hangs on others
    (facebookresearch/faiss#5400).
    """
    for path, record in record_by_path.items():
        verify_file(path, record=record)
    return map_index([*record_by_path])


def map_index(paths: Sequence[Path]) -> Any:
    """Memory-map the index whose shards are in these files, so that processes share its memory.

    The files must not change while the index is used.
    """
    shards = tuple(faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC) for path in paths)
    return shards[0] if len(shards) == 1 else ShardedIndex(shards)


def verify_size(path: Path, *, record: FileRecord) -> None:
    """Raise StageError if the file is missing or has another size than its record."""
    if not path.is_file():
        raise StageError(f"{path}: the file is missing; build or copy it again")
    if (size_bytes := path.stat().st_size) != record.size_bytes:
        raise StageError(
            f"{path}: the file has {size_bytes} bytes, but {record.size_bytes} bytes were written; the file was changed. "
            "Build or copy it again"
        )


def verify_file(path: Path, *, record: FileRecord) -> None:
    """Raise StageError if the file is missing or differs from its record."""
    verify_size(path, record=record)
    actual_record = record_file(path)
    if actual_record != record:
        raise StageError(
            f"{path}: the file has {actual_record.size_bytes} bytes with sha256 {actual_record.sha256}, but "
            f"{record.size_bytes} bytes with sha256 {record.sha256} were written; the file was changed. Build or copy it again"
        )


class Selection:
    """A subset of the items, in the form that FAISS needs to search one particular index.

    Attributes:
        num_items: number of selected items.
        shards: the selected items of each shard.
    """

    def __init__(self, index: Any, is_selected_I: NDArray[np.bool_]) -> None:
        self.num_items = int(is_selected_I.sum())
        self.shards = tuple(ShardSelection(shard, is_selected_I) for shard in shards_of(index))


class ShardSelection:
    """The selected items of a shard.

    Attributes:
        num_items: number of selected items in the shard.
        selector: a FAISS selector of their positions inside the shard.
    """

    def __init__(self, shard: Any, is_selected_I: NDArray[np.bool_]) -> None:
        is_selected_R = is_selected_I[item_row_by_position(shard)]
        self.num_items = int(is_selected_R.sum())
        self._bits = np.packbits(is_selected_R, bitorder="little")  # FAISS reads it in place
        self.selector: Any = faiss.IDSelectorBitmap(self._bits)  # type: ignore[call-arg,arg-type]  # the stubs have the C++ signature


def search(
    index: Any, query_BD: NDArray[np.float32], *, kind: AnyIndexKind, depth: int, selection: Selection | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return inner products [B, N] and item rows [B, N], best first.

    If fewer than `depth` items are found for a query, its remaining rows are -1. A selection limits the returned items.
    """
    query_BD = np.ascontiguousarray(query_BD, dtype=np.float32)
    return merge(
        [
            _search_shard(shard, query_BD, kind, depth, shard_selection)
            for shard, shard_selection in _shard_selections(index, selection)
        ]
    )


def search_exhaustively(
    index: Any, query_BD: NDArray[np.float32], *, kind: AnyIndexKind, depth: int, selection: Selection | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the results of an exhaustive search, in the format of `search`.

    The results are exact unless the index holds only compressed vectors, from which it computes the scores.
    """
    query_BD = np.ascontiguousarray(query_BD, dtype=np.float32)
    return merge(
        [
            kind.search_exhaustively(shard, query_BD, depth, None if shard_selection is None else shard_selection.selector)
            for shard, shard_selection in _shard_selections(index, selection)
        ]
    )


def _search_shard(
    shard: Any, query_BD: NDArray[np.float32], kind: AnyIndexKind, depth: int, selection: ShardSelection | None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if selection is None:
        score_BN, row_BN = shard.search(query_BD, depth, params=kind.search_parameters(depth))
        return score_BN, row_BN
    if selection.num_items <= MAX_EXACT_ITEMS:
        return kind.search_exhaustively(shard, query_BD, depth, selection.selector)
    # A graph search visits the other items too, so its candidate list has to be longer.
    visited_depth = -(-depth * shard.ntotal // selection.num_items)
    parameters = kind.search_parameters(visited_depth, selection.selector)
    return search_vectors(shard.index, shard, query_BD, depth, parameters)


def _shard_selections(index: Any, selection: Selection | None) -> Iterator[tuple[Any, ShardSelection | None]]:
    """Yield each shard of an index with the selected items of the shard; None if all items are selected."""
    shards = shards_of(index)
    yield from zip(shards, [None] * len(shards) if selection is None else selection.shards, strict=True)


def stored_vectors(index: Any) -> ShardVectors | None:
    """Return the vectors of an index whose shards store uncompressed vectors in one array each; None for other indexes."""
    arrays = [vector_RD for shard in shards_of(index) if (vector_RD := _stored_array(shard)) is not None]
    return ShardVectors(index, [vector_RD.__getitem__ for vector_RD in arrays]) if arrays else None


def _stored_array(shard: Any) -> NDArray[np.float32] | None:
    """Return a shard's array of uncompressed vectors without a copy, by position; None if the shard has no such array."""
    inner_index = faiss.downcast_index(shard.index)
    storage = faiss.downcast_index(inner_index.storage) if hasattr(inner_index, "storage") else inner_index
    if not isinstance(storage, faiss.IndexFlat):
        return None
    vector_RD: NDArray[np.float32] = faiss.rev_swig_ptr(storage.get_xb(), shard.ntotal * shard.d)
    return vector_RD.reshape(shard.ntotal, shard.d)


def decoded_vectors(index: Any) -> ShardVectors:
    """Return the vectors of an index for which `stored_vectors` returns None, decoded from its codes."""
    inner_indexes = [faiss.downcast_index(shard.index) for shard in shards_of(index)]
    for inner_index in inner_indexes:
        if not isinstance(inner_index, faiss.IndexRefine):  # an IndexRefine has its vectors in the order of the positions
            faiss.extract_index_ivf(inner_index).make_direct_map()
    return ShardVectors(index, [inner_index.reconstruct_batch for inner_index in inner_indexes])
