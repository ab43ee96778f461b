"""Loading and searching of FAISS indexes. Search parameters are passed with each call. An index returns item rows.

Shapes: B queries, D width, N search depth.
"""

from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from recsys_core.errors import StageError
from recsys_core.manifests import FileRecord, record_file
from recsys_core.retrieval.index_kind import item_row_by_position, search_vectors
from recsys_core.retrieval.kinds import AnyIndexKind


def load_index(path: Path, *, record: FileRecord) -> Any:
    """Map the index in `path`, so that processes share its memory. Raises StageError if the file differs from its record.

    The checksum is verified first, because faiss silently reads most corrupt files and hangs on others
    (facebookresearch/faiss#5400). The file must not be changed as long as the index is used.
    """
    verify_file(path, record=record)
    return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)


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


MAX_EXACT_ITEMS = 20_000
"""Up to this many selected items are compared with the queries one by one: that is exact, and about as fast as a search."""


class Selection:
    """A part of the items, as FAISS selects them. It belongs to one index.

    Attributes:
        num_items: number of selected items.
    """

    def __init__(self, index: Any, is_selected_I: NDArray[np.bool_]) -> None:
        self.num_items = int(is_selected_I.sum())
        self._bits = np.packbits(is_selected_I[item_row_by_position(index)], bitorder="little")  # FAISS reads it in place
        self.selector: Any = faiss.IDSelectorBitmap(self._bits)  # type: ignore[call-arg,arg-type]  # the stubs are of C++


def search(
    index: Any, query_BD: NDArray[np.float32], *, kind: AnyIndexKind, depth: int, selection: Selection | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return inner products [B, N] and item rows [B, N], best first.

    If fewer than `depth` items are found for a query, its remaining rows are -1. With a selection, only its items are returned.
    """
    query_BD = np.ascontiguousarray(query_BD, dtype=np.float32)
    if selection is None:
        score_BN, row_BN = index.search(query_BD, depth, params=kind.search_parameters(depth))
        return score_BN, row_BN
    if selection.num_items <= MAX_EXACT_ITEMS:
        return search_exhaustively(index, query_BD, kind=kind, depth=depth, selection=selection)
    # A graph search visits the other items too, so its candidate list has to be longer.
    visited_depth = -(-depth * index.ntotal // selection.num_items)
    parameters = kind.search_parameters(visited_depth, selection.selector)
    return search_vectors(index.index, index, query_BD, depth, parameters)


def search_exhaustively(
    index: Any, query_BD: NDArray[np.float32], *, kind: AnyIndexKind, depth: int, selection: Selection | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the results of an exhaustive search, in the format of `search`.

    They are exact unless the index holds compressed vectors, from which it computes the scores.
    """
    selector = None if selection is None else selection.selector
    return kind.search_exhaustively(index, np.ascontiguousarray(query_BD, dtype=np.float32), depth, selector)


class StoredVectors:
    """The whole vectors of an index in its memory, by item row."""

    def __init__(self, index: Any, vector_ID: NDArray[np.float32]) -> None:
        self._index, self._vector_ID = index, vector_ID  # the vectors are in the memory of the index
        self._position_I = np.argsort(item_row_by_position(index))

    def take(self, item_row_L: NDArray[np.int64]) -> NDArray[np.float32]:
        """Copy the vectors of items, [L, D]."""
        vector_LD: NDArray[np.float32] = self._vector_ID[self._position_I[item_row_L]]
        return vector_LD


class DecodedVectors:
    """The vectors of an index without such an array, decoded from their codes, by item row."""

    def __init__(self, index: Any) -> None:
        self._index, self._position_I = faiss.downcast_index(index.index), np.argsort(item_row_by_position(index))
        if not isinstance(self._index, faiss.IndexRefine):  # it has the vectors in the order of the positions
            faiss.extract_index_ivf(self._index).make_direct_map()

    def take(self, item_row_L: NDArray[np.int64]) -> NDArray[np.float32]:
        """Decode the vectors of items, [L, D]."""
        if not len(item_row_L):
            return np.zeros((0, self._index.d), np.float32)
        vector_LD: NDArray[np.float32] = self._index.reconstruct_batch(self._position_I[item_row_L])
        return vector_LD


def stored_vectors(index: Any) -> StoredVectors | None:
    """Return the vectors of an index that holds them as a whole, in one array: a flat index, or one with flat storage."""
    inner_index = faiss.downcast_index(index.index)
    storage = faiss.downcast_index(inner_index.storage) if hasattr(inner_index, "storage") else inner_index
    if not isinstance(storage, faiss.IndexFlat):
        return None
    vector_ID = faiss.rev_swig_ptr(storage.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)
    return StoredVectors(index, vector_ID)
