"""Reading an index and asking it, with every search setting given explicitly. An index is an IndexIDMap from item rows.

Shapes: B queries, D width, N depth.
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
    """The index in `path`; raises StageError if it is not the file that was recorded.

    The hash comes before faiss, which reads most corrupted files without a word and hangs on others
    (facebookresearch/faiss#5400).
    """
    verify_file(path, record=record)
    return faiss.read_index(str(path))


def verify_file(path: Path, *, record: FileRecord) -> None:
    """Raises StageError if the file is missing or differs from its record."""
    if not path.is_file():
        raise StageError(f"{path}: the file is missing; build or copy it again")
    found = record_file(path)
    if found != record:
        raise StageError(
            f"{path}: {found.bytes} bytes with sha256 {found.sha256}, but {record.bytes} bytes with sha256 {record.sha256} "
            "were written; the file was changed or cut off, build or copy it again"
        )


def search(
    index: Any, query_BD: NDArray[np.float32], *, kind: IndexKind, depth: int, parameters: Mapping[str, int]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Inner products [B, N] and item rows [B, N], best first; row -1 where the index found fewer than `depth`.

    parameters: of the index's IndexReport; nprobe for the IVF kinds, efSearch for hnsw (raised to `depth` if smaller).
    """
    settings: Any = None
    if kind in ("ivf_flat", "ivf_pq"):
        settings = faiss.SearchParametersIVF(nprobe=parameters["nprobe"])  # type: ignore[call-arg]  # faiss's stubs lag
    elif kind == "hnsw":
        settings = faiss.SearchParametersHNSW(efSearch=max(parameters["ef_search"], depth))  # type: ignore[attr-defined]
    score_BN, row_BN = index.search(np.ascontiguousarray(query_BD, dtype=np.float32), depth, params=settings)
    return score_BN, row_BN


def search_all(
    index: Any, query_BD: NDArray[np.float32], *, kind: IndexKind, depth: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """As `search`, but over every stored vector: never short, and exact up to the codes of ivf_pq."""
    vectors: Any = faiss.downcast_index(index.index)
    if kind == "hnsw":
        score_BN, place_BN = search(vectors.storage, query_BD, kind="flat", depth=depth, parameters={})
        return score_BN, faiss.vector_to_array(index.id_map)[place_BN]
    return search(index, query_BD, kind=kind, depth=depth, parameters={"nprobe": getattr(vectors, "nlist", 0)})
