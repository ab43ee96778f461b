"""Loading and searching of FAISS indexes. Search parameters are passed with each call. An index returns item rows.

Shapes: B queries, D width, N search depth.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from recsys_core.errors import StageError
from recsys_core.manifests import FileRecord, record_file
from recsys_core.retrieval.config import IndexKind


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
            f"{path}: the file has {actual_record.bytes} bytes with sha256 {actual_record.sha256}, but {record.bytes} bytes "
            f"with sha256 {record.sha256} were written; the file was changed. Build or copy it again"
        )


def search(
    index: Any, query_BD: NDArray[np.float32], *, kind: IndexKind, depth: int, parameters: Mapping[str, int]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return inner products [B, N] and item rows [B, N], best first.

    If fewer than `depth` items are found for a query, its remaining rows are -1.

    parameters: the parameters of the IndexReport. nprobe is used for the IVF kinds. ef_search is used for hnsw, and raised to
        `depth` if it is smaller.
    """
    search_parameters: Any = None
    if kind in ("ivf_flat", "ivf_pq"):
        search_parameters = faiss.SearchParametersIVF(nprobe=parameters["nprobe"])  # type: ignore[call-arg]  # faiss's stubs lag
    elif kind == "hnsw":
        search_parameters = faiss.SearchParametersHNSW(efSearch=max(parameters["ef_search"], depth))  # type: ignore[attr-defined]
    score_BN, row_BN = index.search(np.ascontiguousarray(query_BD, dtype=np.float32), depth, params=search_parameters)
    return score_BN, row_BN


def search_exhaustively(
    index: Any, query_BD: NDArray[np.float32], *, kind: IndexKind, depth: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the results of an exhaustive search, in the format of `search`.

    They are exact for every kind except ivf_pq, whose scores are computed from quantized vectors.
    """
    inner_index: Any = faiss.downcast_index(index.index)
    if kind == "hnsw":
        score_BN, index_BN = search(inner_index.storage, query_BD, kind="flat", depth=depth, parameters={})
        return score_BN, faiss.vector_to_array(index.id_map)[index_BN]
    return search(index, query_BD, kind=kind, depth=depth, parameters={"nprobe": getattr(inner_index, "nlist", 0)})
