"""Stage `build_index`: FAISS indexes over the exported item vectors, each measured against exact search.

Shapes: I items, D width, B queries, K recall_k, N rows returned by an index.
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
from recsys_core.manifests import ExportManifest, IndexManifest, IndexReport, StageFolder, fingerprint_of
from recsys_core.retrieval.config import IndexConfig, IndexKind
from recsys_core.retrieval.search import search
from recsys_core.seeds import INDEX_ORDER_SEED, INDEX_SAMPLE_SEED

MIN_ITEMS_PER_CENTROID = 39
"""With fewer items per centroid, FAISS warns that k-means is undertrained."""
MAX_VECTORS_PER_CENTROID = 256
"""FAISS trains k-means on at most this many vectors per centroid."""
ADD_BATCH_ROWS = 65_536
MAX_MEASURED_QUERIES = 2_000
MAX_SINGLE_THREAD_ITEMS = 100_000
"""Up to this number of items, one thread builds HNSW. Its links then do not depend on timing, so a rerun is identical."""


def build_indexes(config: IndexConfig, *, export: ExportManifest, folder: Path) -> IndexManifest:
    """Build the indexes of `config.built_kinds`, and measure recall and latency of each on the test queries.

    Raises:
        InputError: ivf_pq is built and pq_m does not divide the vector width; there are fewer than two items; or the test
            split is empty.
    """
    if "ivf_pq" in config.built_kinds and export.dim % config.pq_m:
        raise InputError(
            f"index.pq_m is {config.pq_m}, which does not divide the vector width {export.dim}; "
            f"set it to a divisor of {export.dim}, or change the last size of model.query.layers and model.candidate.layers"
        )
    if export.num_items < 2:
        raise InputError(f"the catalogue has {export.num_items} item(s), but an index needs at least 2; add items")

    stage = StageFolder(folder, IndexManifest, fingerprint=fingerprint_of("build_index", config, export))
    if stage.manifest is not None:
        return stage.manifest
    min_bytes = estimate_bytes(config, num_items=export.num_items, dim=export.dim)
    with stage.writing(min_bytes=min_bytes) as output_folder:
        item_ID = np.load(export.path("item_vectors.npy"), mmap_mode="r")
        query_BD = _load_queries(export)
        depth = min(config.recall_k, export.num_items)
        report_by_kind: dict[str, IndexReport] = {}
        exact_row_BK = np.zeros((0, 0), np.int64)
        for kind in config.built_kinds:
            index, parameters = _build_index(kind, item_ID, config=config)
            faiss.write_index(index, str(output_folder / f"{kind}.faiss"))
            with _faiss_threads(1):
                start_time = time.perf_counter()
                _, row_BK = search(index, query_BD, kind=kind, depth=depth, parameters=parameters)
                duration_s = time.perf_counter() - start_time
            if kind == "flat":
                exact_row_BK = row_BK
            report_by_kind[kind] = IndexReport(
                recall=recall_of_exact(row_BK, exact_row_BK=exact_row_BK, query_BD=query_BD, item_ID=item_ID),
                k=config.recall_k,
                ms_per_query=1000 * duration_s / len(query_BD),
                bytes=(output_folder / f"{kind}.faiss").stat().st_size,
                parameters=parameters,
            )
        return stage.commit(
            served_index=config.served_kind,
            similarity=export.similarity,
            dim=export.dim,
            num_items=export.num_items,
            reports=report_by_kind,
        )


def estimate_bytes(config: IndexConfig, *, num_items: int, dim: int) -> int:
    """Return a lower bound of the bytes of all indexes: their vectors or codes, row numbers, and the links of HNSW."""
    vector_bytes, row_number_bytes = 4 * dim, 8
    code_bytes = config.pq_m * usable_pq_nbits(num_items, requested=config.pq_nbits) // 8
    bytes_per_item: dict[IndexKind, int] = {
        "flat": vector_bytes + row_number_bytes,
        "ivf_flat": vector_bytes + 2 * row_number_bytes,  # the cells of an IVF index store the row numbers again
        "ivf_pq": code_bytes + 2 * row_number_bytes,
        "hnsw": vector_bytes + 8 * config.hnsw_m + row_number_bytes,
    }
    return num_items * sum(bytes_per_item[kind] for kind in config.built_kinds)


def usable_nlist(num_items: int, *, requested: int) -> int:
    """Return the requested number of cells, or the largest number with enough items per cell for k-means.

    >>> usable_nlist(12_101, requested=100), usable_nlist(390, requested=100), usable_nlist(20, requested=100)
    (100, 10, 1)
    """
    return max(1, min(requested, num_items // MIN_ITEMS_PER_CENTROID))


def usable_pq_nbits(num_items: int, *, requested: int) -> int:
    """Return the requested number of bits, or the largest number with at least one item per centroid, as FAISS requires.

    MIN_ITEMS_PER_CENTROID does not apply here. Its purpose is that centroids fit more vectors than the sample on which they are
    trained. In a small catalogue, the sample contains all vectors.

    >>> usable_pq_nbits(12_101, requested=8), usable_pq_nbits(256, requested=8), usable_pq_nbits(255, requested=8)
    (8, 8, 7)
    """
    return min(requested, num_items.bit_length() - 1)


def recall_of_exact(
    row_BN: NDArray[np.int64],
    *,
    exact_row_BK: NDArray[np.int64],
    query_BD: NDArray[np.float32],
    item_ID: NDArray[np.float32],
) -> float:
    """Return the share of the exact top K that an index returns, over all queries. Row -1 marks a missing item.

    An item with the same score as the last exact item counts as correct, because the order of equal scores is arbitrary.

    >>> item_ID = np.array([[3], [2], [2], [1]], np.float32)
    >>> exact_row_BK = np.array([[0, 1], [0, 1]])
    >>> recall_of_exact(np.array([[0, 2], [3, -1]]), exact_row_BK=exact_row_BK, query_BD=np.ones((2, 1)), item_ID=item_ID)
    0.5
    """
    num_correct = 0
    for query_D, row_N, exact_row_K in zip(query_BD, row_BN, exact_row_BK, strict=True):
        returned_rows = row_N[row_N >= 0]
        scores = (item_ID[np.concatenate([exact_row_K, returned_rows])] * query_D).sum(axis=1)
        exact_scores, returned_scores = scores[: len(exact_row_K)], scores[len(exact_row_K) :]
        num_correct += min(len(exact_row_K), int(np.count_nonzero(returned_scores >= exact_scores.min())))
    return num_correct / exact_row_BK.size


def _build_index(kind: IndexKind, item_ID: NDArray[np.float32], *, config: IndexConfig) -> tuple[Any, dict[str, int]]:
    """Return the index, and its build and search parameters by name of the setting."""
    num_items, dim = item_ID.shape
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
        nlist = usable_nlist(num_items, requested=config.nlist)
        nbits = usable_pq_nbits(num_items, requested=config.pq_nbits)
        parameters = {"nlist": nlist, "nprobe": min(config.nprobe, nlist)}
        quantizer = faiss.IndexFlatIP(dim)
        if kind == "ivf_flat":
            index = faiss.IndexIVFFlat(quantizer, dim, nlist, faiss.METRIC_INNER_PRODUCT)
        else:
            index = faiss.IndexIVFPQ(quantizer, dim, nlist, config.pq_m, nbits, faiss.METRIC_INNER_PRODUCT)
            index.pq.cp.min_points_per_centroid = 1
            parameters |= {"pq_m": config.pq_m, "pq_nbits": nbits}
        index.cp.min_points_per_centroid = 1
        index.train(_random_rows(item_ID, num_rows=MAX_VECTORS_PER_CENTROID * max(nlist, 1 << nbits)))

    # FAISS returns equal scores in the order in which the vectors were added. Row order would favour popular items,
    # because rows are numbered by falling popularity.
    order_I = np.random.default_rng(INDEX_ORDER_SEED).permutation(num_items)
    index_with_row_numbers = faiss.IndexIDMap(index)
    with _faiss_threads(1 if kind == "hnsw" and num_items <= MAX_SINGLE_THREAD_ITEMS else faiss.omp_get_max_threads()):
        for batch_start in range(0, num_items, ADD_BATCH_ROWS):
            item_rows = order_I[batch_start : batch_start + ADD_BATCH_ROWS]
            index_with_row_numbers.add_with_ids(np.ascontiguousarray(item_ID[item_rows]), item_rows)
    return index_with_row_numbers, parameters


def _random_rows(vectors: NDArray[np.float32], *, num_rows: int) -> NDArray[np.float32]:
    """Return random rows, in ascending order so that a memory map is read from front to back."""
    if num_rows >= len(vectors):
        return np.ascontiguousarray(vectors)
    sampled_rows = np.sort(np.random.default_rng(INDEX_SAMPLE_SEED).choice(len(vectors), num_rows, replace=False))
    return vectors[sampled_rows]


def _load_queries(export: ExportManifest) -> NDArray[np.float32]:
    query_BD: NDArray[np.float32] = np.load(export.path("query_vectors_test.npy"))
    if len(query_BD) == 0:
        raise InputError("the test split has no event, so the indexes cannot be measured; change interactions.split")
    return _random_rows(query_BD, num_rows=MAX_MEASURED_QUERIES)


@contextmanager
def _faiss_threads(num_threads: int) -> Iterator[None]:
    """Set the number of FAISS threads for a `with` block."""
    previous_num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(num_threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(previous_num_threads)
