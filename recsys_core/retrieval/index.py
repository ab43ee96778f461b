"""Stage `build_index`: FAISS indexes over the exported item vectors, each measured against exact search.

Memory holds one shard of one index, the vectors that train it and a block of the memory-mapped vectors. Recall and latency are
measured on memory-mapped index files.

Shapes: I items, D width, B queries, R rows of a file or of a shard.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.errors import InputError, StageError
from recsys_core.manifests import ExportManifest, IndexManifest, IndexReport, StageFolder
from recsys_core.retrieval.auto import Auto, Candidate, choose_kind
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.kinds import AnyIndexKind
from recsys_core.retrieval.measure import MeasuredQueries, faiss_threads, tune
from recsys_core.retrieval.search import map_index
from recsys_core.retrieval.shards import index_paths, rows_by_shard
from recsys_core.seeds import INDEX_SAMPLE_SEED

ADD_BATCH_ROWS = 65_536
MAX_MEASURED_QUERIES = 2_000
RECALL_FILE_NAME = "served_recall.parquet"


def build_indexes(config: IndexConfig, *, export: ExportManifest, folder: Path) -> IndexManifest:
    """Build the indexes of `config.indexes_to_build`, measure them on the test queries, and choose the served index.

    Raises:
        InputError: the settings of an index do not fit the vector width; no index fits into index.served.max_bytes; a value of
            a vector is larger than an index can hold; there are fewer than two items; or the test split is empty.
        StageError: a vector is not finite.
    """
    num_items, dim = export.num_items, export.dim
    kinds = config.indexes_to_build(num_items=num_items, dim=dim)
    if num_items < 2:
        raise InputError(f"the catalogue has {num_items} item(s), but an index needs at least 2; add items")

    stage = StageFolder(folder, IndexManifest, inputs=["build_index", config, export])
    if stage.manifest is not None:
        return stage.manifest
    with stage.writing(min_bytes=sum(kind.min_bytes(num_items=num_items, dim=dim) for kind in kinds)) as output_folder:
        measured_indexes = _MeasuredIndexes(config, export, output_folder)
        for kind in kinds:
            measured_indexes.add(kind)
        served_kind, choice_reason, warning = measured_indexes.choose_served()
        if isinstance(config.served, Auto):
            for unserved_kind in (
                {*measured_indexes.report_by_kind} - {index.kind for index in config.configured_indexes} - {served_kind}
            ):
                for path in index_paths(
                    output_folder, unserved_kind, num_shards=measured_indexes.report_by_kind[unserved_kind].shards
                ):
                    path.unlink()
        user_rows = np.load(export.path("query_users_test.npy"))[measured_indexes.test_rows]
        recall_table = pa.table(
            {"user": pa.array(user_rows, pa.int64()), "recall": measured_indexes.recall_by_kind[served_kind]}
        )
        pq.write_table(recall_table, output_folder / RECALL_FILE_NAME)
        return stage.commit(
            served_index=served_kind,
            similarity=export.similarity,
            dim=dim,
            num_items=num_items,
            recall_target=config.recall_target,
            choice=choice_reason,
            warning=warning,
            reports=measured_indexes.report_by_kind,
        )


def served_recall_by_user(index: IndexManifest) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the row of each measured user [B], and the recall of the served index for this user [B].

    The recall compares the first index.recall_k items with the result of an exact search. If the test split has more than
    MAX_MEASURED_QUERIES users, a random sample of that size is measured.
    """
    recall_table = pq.read_table(index.path(RECALL_FILE_NAME))
    return recall_table["user"].to_numpy(), recall_table["recall"].to_numpy()


class _MeasuredIndexes:
    """The indexes of a stage, which are built, written and measured one after the other; the first is the flat index.

    Attributes:
        test_rows: rows of query_vectors_test.npy with the queries on which the indexes are measured.
        report_by_kind: the report of each index.
        recall_by_kind: the recall of each index on each test query, [B].
    """

    def __init__(self, config: IndexConfig, export: ExportManifest, output_folder: Path) -> None:
        self._config, self._export, self._output_folder = config, export, output_folder
        self._item_vector_ID = _load_vectors(export.path("item_vectors.npy"))
        self._candidates: list[Candidate] = []
        self.report_by_kind: dict[str, IndexReport] = {}
        self.recall_by_kind: dict[str, NDArray[np.float64]] = {}

    def add(self, kind: AnyIndexKind) -> None:
        """Build the index, write it, tune its search parameters and measure it."""
        num_items, dim = self._item_vector_ID.shape
        num_shards = self._config.num_shards(kind, num_items=num_items, dim=dim)
        kind = kind.fitted(num_items, dim)
        paths = index_paths(self._output_folder, kind.kind, num_shards=num_shards)
        write_index(kind, self._item_vector_ID, paths)
        index = map_index(paths)
        if kind.kind == "flat":
            self._set_queries(index)
        kind, search_points = tune(kind, index, self._tuning_queries, recall_target=self._config.recall_target)
        parameters, num_bytes = kind.model_dump(exclude={"kind"}), sum(path.stat().st_size for path in paths)
        if isinstance(self._config.served, Auto):
            point = next((point for point in search_points if point.parameters == parameters), None)
            point = point or self._tuning_queries.measure(index, kind)
            self._candidates.append(Candidate(kind.kind, point.recall, point.ms_per_query, num_bytes))
        recall_B, ms_per_query = self._test_queries.recall_and_latency(index, kind)
        self.recall_by_kind[kind.kind] = recall_B
        self.report_by_kind[kind.kind] = IndexReport(
            recall=float(recall_B.mean()),
            k=self._config.recall_k,
            ms_per_query=ms_per_query,
            size_bytes=num_bytes,
            shards=num_shards,
            parameters=parameters,
            tried=search_points,
        )

    def choose_served(self) -> tuple[str, str | None, str | None]:
        """Return the served kind, the reason if `auto` chose the kind, and a warning if the kind misses the recall target."""
        served_config, recall_target = self._config.served, self._config.recall_target
        if isinstance(served_config, Auto):
            too_large_kinds = served_config.too_large_kinds(num_items=self._export.num_items, dim=self._export.dim)
            too_large_kinds = tuple(kind for kind in too_large_kinds if kind not in self.report_by_kind)
            choice = choose_kind(
                self._candidates,
                recall_target=recall_target,
                max_bytes=served_config.max_bytes,
                too_large_kinds=too_large_kinds,
            )
            return choice.kind, choice.reason, None if choice.reaches_target else choice.reason
        report = self.report_by_kind[served_config.kind]
        best_recall = max((point.recall for point in report.tried), default=report.recall)
        if best_recall >= recall_target:
            return served_config.kind, None, None
        is_tuned_on_validation = bool(report.tried) and self._tuning_queries is not self._test_queries
        queries_text = "validation queries" if is_tuned_on_validation else "test queries"
        warning = (
            f"the {served_config.kind} index reaches a recall@{report.k} of {best_recall:.4f} on {queries_text}, below "
            f"index.recall_target {recall_target:g}; change its settings, or set index.served to auto"
        )
        return served_config.kind, None, warning

    def _set_queries(self, flat_index: Any) -> None:
        """Set the test and tuning queries, with the exact results that `flat_index` returns."""
        depth = min(self._config.recall_k, self._export.num_items)
        vectors_by_split = {
            split: _load_vectors(self._export.path(f"query_vectors_{split}.npy"))
            for split in ("test", "validation")
            if split == "test" or self._export.num_queries.get(split, 0)
        }
        if len(vectors_by_split["test"]) == 0:
            raise InputError("the test split has no event, so the indexes cannot be measured; change interactions.split")
        self.test_rows = _random_rows(len(vectors_by_split["test"]), num_rows=MAX_MEASURED_QUERIES)
        query_sets = [
            MeasuredQueries.with_exact_results(
                query_RD[_random_rows(len(query_RD), num_rows=MAX_MEASURED_QUERIES)],
                exact_index=flat_index,
                item_vector_ID=self._item_vector_ID,
                depth=depth,
            )
            for query_RD in vectors_by_split.values()
        ]
        # Without validation queries, the queries of the test split tune an index too.
        self._test_queries, self._tuning_queries = query_sets[0], query_sets[-1]


def write_index(kind: AnyIndexKind, item_vector_ID: NDArray[np.float32], paths: Sequence[Path]) -> None:
    """Build an index shard by shard (see `build_shards`), and write each shard to its file."""
    for path, shard in zip(paths, build_shards(kind, item_vector_ID, num_shards=len(paths)), strict=True):
        faiss.write_index(shard, str(path))
        del shard  # frees its memory before the next shard is built


def build_index(kind: AnyIndexKind, item_vector_ID: NDArray[np.float32]) -> Any:
    """Return an IndexIDMap with all vectors; see `build_shards`."""
    (index,) = build_shards(kind, item_vector_ID, num_shards=1)
    return index


def build_shards(kind: AnyIndexKind, item_vector_ID: NDArray[np.float32], *, num_shards: int) -> Iterator[Any]:
    """Yield an IndexIDMap with the vectors of each shard. The IndexIDMap loses its vectors when the next shard is built.

    The index is trained once, so that all shards have the same cells and codes.

    A GPU trains and fills the index if there is a GPU and FAISS implements the kind for GPUs. The yielded index is in host
    memory.

    Args:
        kind: settings that are fitted to the catalogue.

    Raises:
        InputError: a value of a vector is larger than the index can hold.
    """
    num_items, dim = item_vector_ID.shape
    _check_max_value(kind, item_vector_ID)
    index = kind.empty_index(dim)
    is_on_gpu = kind.builds_on_gpu() and num_gpus() > 0
    if is_on_gpu:
        resources = faiss.StandardGpuResources()
        index = faiss.index_cpu_to_gpu(resources, 0, index)
    if num_training_vectors := kind.num_training_vectors():
        training_rows = _random_rows(num_items, num_rows=num_training_vectors)
        kind.train(index, np.ascontiguousarray(item_vector_ID[training_rows]))

    for item_row_R in rows_by_shard(num_items, num_shards=num_shards):
        index.reset()
        index_with_row_numbers = faiss.IndexIDMap(index)
        with faiss_threads(1 if kind.uses_one_thread(len(item_row_R)) else faiss.omp_get_max_threads()):
            for batch_start in range(0, len(item_row_R), ADD_BATCH_ROWS):
                batch_rows = item_row_R[batch_start : batch_start + ADD_BATCH_ROWS]
                index_with_row_numbers.add_with_ids(np.ascontiguousarray(item_vector_ID[batch_rows]), batch_rows)
        if is_on_gpu:
            _replace_index(index_with_row_numbers, faiss.index_gpu_to_cpu(index))
        yield index_with_row_numbers


def _check_max_value(kind: AnyIndexKind, item_vector_ID: NDArray[np.float32]) -> None:
    """Raise InputError for the first row with a value above the limit of the kind."""
    max_value = kind.max_value()
    if max_value is None:
        return
    for start in range(0, len(item_vector_ID), ADD_BATCH_ROWS):
        vector_RD = item_vector_ID[start : start + ADD_BATCH_ROWS]
        is_too_large_RD = np.abs(vector_RD) > max_value
        if is_too_large_RD.any():
            row, column = (int(indices[0]) for indices in np.nonzero(is_too_large_RD))
            raise InputError(
                f"index: the item vector in row {start + row:,} has the value {float(vector_RD[row, column]):,.0f} in column "
                f"{column}, but the kind {kind.kind} with rescore holds vectors in half precision, up to {max_value:,.0f}; set "
                "rescore: 0 or another kind, such as ivf_sq8 or hnsw, or model.similarity: cosine, whose vectors have norm 1"
            )


def num_gpus() -> int:
    """Return the number of GPUs that FAISS can use; 0 without faiss-gpu."""
    count: int = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0
    return count


def _replace_index(index_with_row_numbers: Any, index: Any) -> None:
    """Replace the index inside an IndexIDMap by an index with the same vectors, and keep the row numbers."""
    index_with_row_numbers.index = index
    index_with_row_numbers.referenced_objects = [index]  # FAISS's wrapper does not keep an assigned index alive


def _load_vectors(path: Path) -> NDArray[np.float32]:
    """Memory-map the vectors of a file. Raises StageError for the first row with a value that is not finite."""
    vector_RD: NDArray[np.float32] = np.load(path, mmap_mode="r")
    for start in range(0, len(vector_RD), ADD_BATCH_ROWS):
        is_finite_R = np.isfinite(vector_RD[start : start + ADD_BATCH_ROWS]).all(axis=1)
        if not is_finite_R.all():
            row = start + int(is_finite_R.argmin())
            raise StageError(f"{path}: the vector in row {row:,} is not finite: training diverged; lower the learning rates")
    return vector_RD


def _random_rows(num_available: int, *, num_rows: int) -> slice | NDArray[np.int64]:
    """Return `num_rows` random rows, or a slice of all rows if `num_rows` is not smaller than `num_available`.

    The rows are in ascending order, so that a memory map is read from front to back.
    """
    if num_rows >= num_available:
        return slice(None)
    return np.sort(np.random.default_rng(INDEX_SAMPLE_SEED).choice(num_available, num_rows, replace=False))
