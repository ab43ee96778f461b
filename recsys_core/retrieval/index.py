"""Stage `build_index`: FAISS indexes over the exported item vectors, each measured against exact search.

Shapes: I items, D width, B queries, K recall_k, N rows returned by an index.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from recsys_core.errors import InputError
from recsys_core.manifests import ExportManifest, IndexManifest, IndexReport, SearchPoint, StageFolder, fingerprint_of
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.kinds import AnyIndexKind, Flat
from recsys_core.retrieval.search import search
from recsys_core.seeds import INDEX_ORDER_SEED, INDEX_SAMPLE_SEED

ADD_BATCH_ROWS = 65_536
MAX_MEASURED_QUERIES = 2_000


def build_indexes(config: IndexConfig, *, export: ExportManifest, folder: Path) -> IndexManifest:
    """Build the indexes of `config.built`, and measure recall and latency of each on the test queries.

    Raises:
        InputError: the settings of an index do not fit the vector width; there are fewer than two items; or the test split
            is empty.
    """
    if (problem := config.problem(export.dim)) is not None:
        raise InputError(f"index: {problem}")
    if export.num_items < 2:
        raise InputError(f"the catalogue has {export.num_items} item(s), but an index needs at least 2; add items")

    stage = StageFolder(folder, IndexManifest, fingerprint=fingerprint_of("build_index", config, export))
    if stage.manifest is not None:
        return stage.manifest
    min_bytes = sum(kind.min_bytes(num_items=export.num_items, dim=export.dim) for kind in config.built)
    with stage.writing(min_bytes=min_bytes) as output_folder:
        item_vector_ID = np.load(export.path("item_vectors.npy"), mmap_mode="r")
        exact = build_index(Flat(), item_vector_ID)
        depth = min(config.recall_k, export.num_items)
        test, tuning = (_measured_queries(query_BD, exact, item_vector_ID, depth) for query_BD in _load_queries(export))
        report_by_kind: dict[str, IndexReport] = {}
        for kind in (configured_kind.fitted(export.num_items) for configured_kind in config.built):
            index_path = output_folder / f"{kind.kind}.faiss"
            index = exact if kind.kind == "flat" else build_index(kind, item_vector_ID)
            faiss.write_index(index, str(index_path))
            tuned_kind, tried = tune(kind, index, tuning, recall_target=config.recall_target)
            point = test.measure(index, tuned_kind)
            report_by_kind[kind.kind] = IndexReport(
                recall=point.recall,
                k=config.recall_k,
                ms_per_query=point.ms_per_query,
                bytes=index_path.stat().st_size,
                parameters=point.parameters,
                tried=tried,
            )
        return stage.commit(
            served_index=config.served.kind,
            similarity=export.similarity,
            dim=export.dim,
            num_items=export.num_items,
            recall_target=config.recall_target,
            reports=report_by_kind,
        )


@dataclass(frozen=True)
class MeasuredQueries:
    """Queries with their exact results, on which an index is measured."""

    query_BD: NDArray[np.float32]
    exact_row_BK: NDArray[np.int64]
    item_vector_ID: NDArray[np.float32]

    def measure(self, index: Any, kind: AnyIndexKind) -> SearchPoint:
        """Return recall and latency of the index. One thread searches all queries in one batch."""
        with _faiss_threads(1):
            start_time = time.perf_counter()
            _, row_BK = search(index, self.query_BD, kind=kind, depth=self.exact_row_BK.shape[1])
            duration_s = time.perf_counter() - start_time
        recall = recall_of_exact(
            row_BK, exact_row_BK=self.exact_row_BK, query_BD=self.query_BD, item_vector_ID=self.item_vector_ID
        )
        parameters = kind.model_dump(exclude={"kind"})
        return SearchPoint(parameters=parameters, recall=recall, ms_per_query=1000 * duration_s / len(self.query_BD))


def tune(
    kind: AnyIndexKind, index: Any, queries: MeasuredQueries, *, recall_target: float
) -> tuple[AnyIndexKind, tuple[SearchPoint, ...]]:
    """Return the settings of the fastest search that reaches the target on the queries, and the points that were measured.

    If no setting reaches the target, return the one with the highest recall.
    """
    variants: list[AnyIndexKind] = [*kind.search_variants(queries.exact_row_BK.shape[1])]
    if len(variants) == 1:
        return variants[0], ()
    tried: list[SearchPoint] = []
    for variant in variants:
        tried.append(queries.measure(index, variant))
        if tried[-1].recall >= recall_target:
            return variant, tuple(tried)
    best = max(range(len(tried)), key=lambda position: tried[position].recall)
    return variants[best], tuple(tried)


def _measured_queries(
    query_BD: NDArray[np.float32], exact_index: Any, item_vector_ID: NDArray[np.float32], depth: int
) -> MeasuredQueries:
    _, exact_row_BK = search(exact_index, query_BD, kind=Flat(), depth=depth)
    return MeasuredQueries(query_BD, exact_row_BK, item_vector_ID)


def recall_of_exact(
    row_BN: NDArray[np.int64],
    *,
    exact_row_BK: NDArray[np.int64],
    query_BD: NDArray[np.float32],
    item_vector_ID: NDArray[np.float32],
) -> float:
    """Return the share of the exact top K that an index returns, over all queries. Row -1 marks a missing item.

    An item with the same score as the last exact item counts as correct, because the order of equal scores is arbitrary.

    >>> item_vector_ID = np.array([[3], [2], [2], [1]], np.float32)
    >>> exact_row_BK = np.array([[0, 1], [0, 1]])
    >>> query_BD = np.ones((2, 1), np.float32)
    >>> row_BN = np.array([[0, 2], [3, -1]])
    >>> recall_of_exact(row_BN, exact_row_BK=exact_row_BK, query_BD=query_BD, item_vector_ID=item_vector_ID)
    0.5
    """
    num_correct = 0
    for query_D, row_N, exact_row_K in zip(query_BD, row_BN, exact_row_BK, strict=True):
        returned_rows = row_N[row_N >= 0]
        scores = (item_vector_ID[np.concatenate([exact_row_K, returned_rows])] * query_D).sum(axis=1)
        exact_scores, returned_scores = scores[: len(exact_row_K)], scores[len(exact_row_K) :]
        num_correct += min(len(exact_row_K), int(np.count_nonzero(returned_scores >= exact_scores.min())))
    return num_correct / exact_row_BK.size


def build_index(kind: AnyIndexKind, item_vector_ID: NDArray[np.float32]) -> Any:
    """Return an IndexIDMap with all vectors. `kind` has the settings for this number of items."""
    num_items, dim = item_vector_ID.shape
    index = kind.empty_index(dim)
    if num_training_vectors := kind.num_training_vectors():
        index.train(_random_rows(item_vector_ID, num_rows=num_training_vectors))

    # FAISS returns equal scores in the order in which the vectors were added. Row order would favour popular items,
    # because rows are numbered by falling popularity.
    order_I = np.random.default_rng(INDEX_ORDER_SEED).permutation(num_items)
    index_with_row_numbers = faiss.IndexIDMap(index)
    with _faiss_threads(1 if kind.uses_one_thread(num_items) else faiss.omp_get_max_threads()):
        for batch_start in range(0, num_items, ADD_BATCH_ROWS):
            item_rows = order_I[batch_start : batch_start + ADD_BATCH_ROWS]
            index_with_row_numbers.add_with_ids(np.ascontiguousarray(item_vector_ID[item_rows]), item_rows)
    return index_with_row_numbers


def _random_rows(vectors: NDArray[np.float32], *, num_rows: int) -> NDArray[np.float32]:
    """Return random rows, in ascending order so that a memory map is read from front to back."""
    if num_rows >= len(vectors):
        return np.ascontiguousarray(vectors)
    sampled_rows = np.sort(np.random.default_rng(INDEX_SAMPLE_SEED).choice(len(vectors), num_rows, replace=False))
    return vectors[sampled_rows]


def _load_queries(export: ExportManifest) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the queries that measure an index, and those that tune it: of the test split, and of the validation split.

    Without validation queries, the queries of the test split tune an index too.
    """
    query_BD: NDArray[np.float32] = np.load(export.path("query_vectors_test.npy"))
    if len(query_BD) == 0:
        raise InputError("the test split has no event, so the indexes cannot be measured; change interactions.split")
    test_query_BD = _random_rows(query_BD, num_rows=MAX_MEASURED_QUERIES)
    if not export.num_queries.get("validation", 0):
        return test_query_BD, test_query_BD
    return test_query_BD, _random_rows(np.load(export.path("query_vectors_validation.npy")), num_rows=MAX_MEASURED_QUERIES)


@contextmanager
def _faiss_threads(num_threads: int) -> Iterator[None]:
    """Set the number of FAISS threads for a `with` block."""
    previous_num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(num_threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(previous_num_threads)
