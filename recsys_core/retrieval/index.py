"""Stage `build_index`: FAISS indexes over the exported item vectors, each measured against exact search.

Shapes: I items, D width, B queries, K recall_k, R rows given by an index.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from recsys_core.errors import InputError
from recsys_core.manifests import ExportManifest, IndexManifest, IndexReport, fingerprint_of, produce
from recsys_core.retrieval.config import IndexConfig, IndexKind
from recsys_core.retrieval.search import search
from recsys_core.seeds import INDEX_ORDER_SEED, INDEX_SAMPLE_SEED

POINTS_PER_CENTROID = 39
"""Below it FAISS calls a k-means undertrained."""
SAMPLE_PER_CENTROID = 256
"""Above it FAISS would subsample anyway."""
ADD_ROWS = 65_536
MEASURED_QUERIES = 2_000
SERIAL_ITEMS = 100_000
"""Up to here HNSW is built on one thread: links then don't depend on timing, and a rerun gives the same index."""


def build_indexes(config: IndexConfig, *, export: ExportManifest, folder: Path) -> IndexManifest:
    """Build `config.built_kinds` by inner product; under cosine similarity the exported vectors are normalised.

    Raises InputError if ivf_pq is built and the vectors cannot be cut into `subquantizers` parts, or if there are fewer
    than two items.
    """
    if "ivf_pq" in config.built_kinds and export.dim % config.pq_m:
        raise InputError(
            f"index.pq_m is {config.pq_m}, which does not divide the vectors' size {export.dim}; "
            f"set it to a divisor of {export.dim}, or change the last size of model.query.layers and model.candidate.layers"
        )
    if export.num_items < 2:
        raise InputError(f"the catalogue has {export.num_items} item(s), and an index needs at least 2; give more items")

    def build(out: Path) -> dict[str, Any]:
        item_ID = np.load(export.path("item_vectors.npy"), mmap_mode="r")
        query_BD = _queries(export)
        reports: dict[str, IndexReport] = {}
        exact_BK = np.zeros((0, 0), np.int64)
        for kind in config.built_kinds:
            index, parameters = _build(kind, item_ID, config=config)
            faiss.write_index(index, str(out / f"{kind}.faiss"))
            with _threads(1):
                started = time.perf_counter()
                _, row_BK = search(
                    index, query_BD, kind=kind, depth=min(config.recall_k, export.num_items), parameters=parameters
                )
                seconds = time.perf_counter() - started
            if kind == "flat":
                exact_BK = row_BK
            reports[kind] = IndexReport(
                recall=share_found(row_BK, exact_BK=exact_BK, query_BD=query_BD, item_ID=item_ID),
                k=config.recall_k,
                ms_per_query=1000 * seconds / len(query_BD),
                bytes=(out / f"{kind}.faiss").stat().st_size,
                parameters=parameters,
            )
        return {
            "served": config.served_kind,
            "similarity": export.similarity,
            "dim": export.dim,
            "num_items": export.num_items,
            "reports": reports,
        }

    fingerprint = fingerprint_of("index", config, export)
    needs_bytes = bytes_of(config, items=export.num_items, dim=export.dim)
    return produce(folder, IndexManifest, fingerprint=fingerprint, build=build, needs_bytes=needs_bytes)


def bytes_of(config: IndexConfig, *, items: int, dim: int) -> int:
    """What the indexes take at least: vectors or codes, links in hnsw, and a row number per item, in the cells of ivf again."""
    bits = bits_for(items, wanted=config.pq_nbits)
    vector, row = 4 * dim, 8
    per_item: dict[IndexKind, int] = {
        "flat": vector + row,
        "ivf_flat": vector + 2 * row,
        "ivf_pq": config.pq_m * bits // 8 + 2 * row,
        "hnsw": vector + 8 * config.hnsw_m + row,
    }
    return items * sum(per_item[kind] for kind in config.built_kinds)


def centroids_for(items: int, *, wanted: int) -> int:
    """`wanted`, or as many as the items can train.

    >>> centroids_for(12_101, wanted=100), centroids_for(390, wanted=100), centroids_for(20, wanted=100)
    (100, 10, 1)
    """
    return max(1, min(wanted, items // POINTS_PER_CENTROID))


def bits_for(items: int, *, wanted: int) -> int:
    """`wanted`, or the most bits whose centroids are no more than the items, which is all that FAISS insists on.

    The rule of 39 points guards centroids trained on a sample against what they have not seen; here a small catalogue is
    its own sample, so fewer bits would only lose precision.

    >>> bits_for(12_101, wanted=8), bits_for(256, wanted=8), bits_for(255, wanted=8), bits_for(2, wanted=8)
    (8, 8, 7, 1)
    """
    return min(wanted, items.bit_length() - 1)


def share_found(
    row_BR: NDArray[np.int64], *, exact_BK: NDArray[np.int64], query_BD: NDArray[np.float32], item_ID: NDArray[np.float32]
) -> float:
    """Share of the exact top k that an index gives, over all queries; -1 is no row.

    An item that scores as high as the last of the exact ones counts like it: exact search chooses among equals by chance.

    >>> item_ID = np.array([[3], [2], [2], [1]], np.float32)
    >>> share_found(np.array([[0, 2], [3, -1]]), exact_BK=np.array([[0, 1], [0, 1]]), query_BD=np.ones((2, 1)), item_ID=item_ID)
    0.5
    """
    right = 0
    for query_D, row_R, exact_K in zip(query_BD, row_BR, exact_BK, strict=True):
        row_R = row_R[row_R >= 0]
        score_T = (item_ID[np.concatenate([exact_K, row_R])] * query_D).sum(axis=1)
        least = score_T[: len(exact_K)].min()
        right += min(len(exact_K), int(np.count_nonzero(score_T[len(exact_K) :] >= least)))
    return right / exact_BK.size


def _build(kind: IndexKind, item_ID: NDArray[np.float32], *, config: IndexConfig) -> tuple[Any, dict[str, int]]:
    items, dim = item_ID.shape
    lists, bits = centroids_for(items, wanted=config.nlist), bits_for(items, wanted=config.pq_nbits)
    parameters: dict[str, int] = {}
    index: Any
    if kind == "flat":
        index = faiss.IndexFlatIP(dim)
    elif kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, config.hnsw_m, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = config.ef_construction
        parameters = {
            "hnsw_m": config.hnsw_m,
            "ef_construction": config.ef_construction,
            "ef_search": config.ef_search,
        }
    else:
        parameters = {"nlist": lists, "nprobe": min(config.nprobe, lists)}
        cells = faiss.IndexFlatIP(dim)
        if kind == "ivf_flat":
            index = faiss.IndexIVFFlat(cells, dim, lists, faiss.METRIC_INNER_PRODUCT)
        else:
            index = faiss.IndexIVFPQ(cells, dim, lists, config.pq_m, bits, faiss.METRIC_INNER_PRODUCT)
            index.pq.cp.min_points_per_centroid = 1
            parameters |= {"pq_m": config.pq_m, "pq_nbits": bits}
        index.cp.min_points_per_centroid = 1
        index.train(_sample(item_ID, rows=SAMPLE_PER_CENTROID * max(lists, 1 << bits)))

    # Equal scores are found by the order in which vectors are added. Rows are numbered by falling popularity: in that order
    # a model that scores all items the same would be served as popularity.
    order_I = np.random.default_rng(INDEX_ORDER_SEED).permutation(items)
    with_rows = faiss.IndexIDMap(index)
    with _threads(1 if kind == "hnsw" and items <= SERIAL_ITEMS else faiss.omp_get_max_threads()):
        for start in range(0, items, ADD_ROWS):
            rows = order_I[start : start + ADD_ROWS]
            with_rows.add_with_ids(np.ascontiguousarray(item_ID[rows]), rows)
    return with_rows, parameters


def _sample(item_ID: NDArray[np.float32], *, rows: int) -> NDArray[np.float32]:
    """Rows to train on, in ascending order so that the memory map is read once from front to back."""
    if rows >= len(item_ID):
        return np.ascontiguousarray(item_ID)
    chosen = np.sort(np.random.default_rng(INDEX_SAMPLE_SEED).choice(len(item_ID), rows, replace=False))
    return item_ID[chosen]


def _queries(export: ExportManifest) -> NDArray[np.float32]:
    vectors_ED: NDArray[np.float32] = np.load(export.path("query_vectors_test.npy"))
    if len(vectors_ED) == 0:
        raise InputError("no event is in the test split, so the indexes cannot be measured; change interactions.split")
    return _sample(vectors_ED, rows=MEASURED_QUERIES)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
