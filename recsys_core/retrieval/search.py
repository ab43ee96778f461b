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
from recsys_core.retrieval.kinds import AnyIndexKind


def load_index(path: Path, *, record: FileRecord) -> Any:
    """Read the index in `path`. Raises StageError if the file differs from its record.

    The checksum is verified first, because faiss silently reads most corrupt files and hangs on others
    (facebookresearch/faiss#5400).
    """
    verify_file(path, record=record)
    return faiss.read_index(str(path))


def verify_file(path: Path, *, record: FileRecord) -> None:
    """Raise StageError if the file is missing or differs from its record."""
    if not path.is_file():
        raise StageError(f"{path}: the file is missing; build or copy it again")
    actual_record = record_file(path)
    if actual_record != record:
        raise StageError(
            f"{path}: the file has {actual_record.size_bytes} bytes with sha256 {actual_record.sha256}, but "
            f"{record.size_bytes} bytes with sha256 {record.sha256} were written; the file was changed. Build or copy it again"
        )


def search(
    index: Any, query_BD: NDArray[np.float32], *, kind: AnyIndexKind, depth: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return inner products [B, N] and item rows [B, N], best first.

    If fewer than `depth` items are found for a query, its remaining rows are -1.
    """
    score_BN, row_BN = index.search(
        np.ascontiguousarray(query_BD, dtype=np.float32), depth, params=kind.search_parameters(depth)
    )
    return score_BN, row_BN


def search_exhaustively(
    index: Any, query_BD: NDArray[np.float32], *, kind: AnyIndexKind, depth: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the results of an exhaustive search, in the format of `search`.

    They are exact unless the index holds compressed vectors, from which it computes the scores.
    """
    return kind.search_exhaustively(index, np.ascontiguousarray(query_BD, dtype=np.float32), depth)
