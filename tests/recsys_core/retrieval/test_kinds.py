"""Properties that every index kind has."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import faiss
import numpy as np
import pytest
from pydantic import TypeAdapter

from recsys_core.errors import InputError
from recsys_core.manifests import record_file
from recsys_core.retrieval.compressed import IvfPq, IvfSq8, OpqPq, PqFastScan
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.index import build_index, build_indexes
from recsys_core.retrieval.ivf import MIN_ITEMS_PER_CENTROID
from recsys_core.retrieval.kinds import AnyIndexKind, Flat, Hnsw
from recsys_core.retrieval.search import Selection, decoded_vectors, load_index, search, search_exhaustively, stored_vectors
from tests.recsys_core.evaluation.stage_folders import write_export_stage

KINDS = tuple(kind_class() for kind_class in get_args(get_args(AnyIndexKind)[0]))
NUM_ITEMS, DIM = 3_000, 32
RESCORED_KINDS = (IvfSq8(rescore=4), IvfPq(rescore=4), OpqPq(rescore=4), PqFastScan(rescore=4))
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)


@pytest.fixture(scope="module", autouse=True)
def few_iterations() -> Iterator[None]:
    """Train the rotation of opq_pq for a shorter time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpqPq, "OPQ_ITERATIONS", 2)
        yield


@pytest.fixture(scope="module")
def item_vector_ID() -> np.ndarray:
    """Vectors of norm 1 in clusters. Norm 1 makes each item the best result for its own vector."""
    random = np.random.default_rng(0)
    cluster_centres = random.normal(size=(30, DIM))
    vector_ID = cluster_centres[random.integers(30, size=NUM_ITEMS)] + 0.5 * random.normal(size=(NUM_ITEMS, DIM))
    return (vector_ID / np.linalg.norm(vector_ID, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def index_by_kind(item_vector_ID: np.ndarray) -> dict[str, Any]:
    return {kind.kind: build_index(kind.fitted(NUM_ITEMS, DIM), item_vector_ID) for kind in KINDS}


def _mean_recall(row_BK: np.ndarray, exact_row_BK: np.ndarray) -> float:
    """Return the share of the exact results that were found."""
    rows_and_exact_rows = zip(row_BK, exact_row_BK, strict=True)
    return float(np.mean([len({*rows} & {*exact_rows}) / len(exact_rows) for rows, exact_rows in rows_and_exact_rows]))


def _min_recall(kind: AnyIndexKind) -> float:
    """Return the recall that the widest search exceeds. It is low if product quantization is not rescored."""
    return 0.4 if getattr(kind, "rescore", None) == 0 and "pq" in kind.kind else 0.95


@every_kind
def test_an_index_has_every_item_and_an_item_is_among_its_own_results(
    kind: AnyIndexKind, index_by_kind: dict[str, Any], item_vector_ID: np.ndarray
) -> None:
    index = index_by_kind[kind.kind]
    assert (index.ntotal, index.d, index.metric_type) == (NUM_ITEMS, DIM, faiss.METRIC_INNER_PRODUCT)
    score_BK, row_BK = search(index, item_vector_ID[:200], kind=kind.fitted(NUM_ITEMS, DIM), depth=10)
    assert row_BK.shape == score_BK.shape == (200, 10)
    assert (np.diff(score_BK, axis=1) <= 0).all()
    assert np.mean((row_BK == np.arange(200)[:, None]).any(axis=1)) > 0.95


@every_kind
def test_the_widest_search_returns_each_item_at_most_once_with_a_high_recall(
    kind: AnyIndexKind, index_by_kind: dict[str, Any], item_vector_ID: np.ndarray
) -> None:
    index, query_BD = index_by_kind[kind.kind], item_vector_ID[:100]
    *_, (*_, widest_kind) = kind.fitted(NUM_ITEMS, DIM).search_variants(20)
    _, row_BK = search(index, query_BD, kind=widest_kind, depth=20)
    exact_row_BK = np.argsort(-query_BD @ item_vector_ID.T, axis=1)[:, :20]
    assert _mean_recall(row_BK, exact_row_BK) > _min_recall(kind)
    _, row_BK = search(index, query_BD, kind=widest_kind, depth=NUM_ITEMS + 7)
    assert (row_BK[:, NUM_ITEMS:] == -1).all()
    for row_K in row_BK:
        assert len(np.unique(row_K[row_K >= 0])) == (row_K >= 0).sum()


@pytest.mark.parametrize("kind", [*KINDS, IvfSq8(rescore=4)], ids=str)
def test_vectors_are_read_from_a_mapped_index_by_item_row(
    kind: AnyIndexKind, index_by_kind: dict[str, Any], item_vector_ID: np.ndarray, tmp_path: Path
) -> None:
    index_path = tmp_path / "index.faiss"
    built_index = index_by_kind[kind.kind] if kind in KINDS else build_index(kind.fitted(NUM_ITEMS, DIM), item_vector_ID)
    faiss.write_index(built_index, str(index_path))
    index = load_index({index_path: record_file(index_path)})
    assert (stored_vectors(index) is not None) == isinstance(kind, Flat | Hnsw)
    if kind.has_readable_vectors:
        row_B = np.random.default_rng(1).integers(0, NUM_ITEMS, 500)
        tolerance = 1e-6 if not isinstance(kind, IvfSq8) else 1e-3 if kind.rescore else 0.01
        read_vector_BD = (stored_vectors(index) or decoded_vectors(index)).take(row_B)
        np.testing.assert_allclose(read_vector_BD, item_vector_ID[row_B], atol=tolerance)


@every_kind
def test_the_vectors_are_read_in_blocks_and_never_copied_as_a_whole(
    kind: AnyIndexKind, item_vector_ID: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recsys_core.retrieval.index.ADD_BATCH_ROWS", 100)
    np.save(tmp_path / "vectors.npy", np.tile(item_vector_ID, (4, 1)))
    mapped_vector_RD = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    fitted_kind = kind.fitted(*mapped_vector_RD.shape)
    num_training_vectors = min(2_000, fitted_kind.num_training_vectors())
    monkeypatch.setattr(type(fitted_kind), "num_training_vectors", lambda _: num_training_vectors)
    tracemalloc.start()  # measures the memory of NumPy; FAISS allocates only the index
    build_index(fitted_kind, mapped_vector_RD)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 0.5 * mapped_vector_RD.nbytes


@pytest.mark.parametrize("kind", RESCORED_KINDS, ids=lambda kind: kind.kind)
def test_rescoring_raises_the_recall_and_its_scores_are_inner_products_of_the_vectors(
    kind: IvfPq, item_vector_ID: np.ndarray, tmp_path: Path
) -> None:
    query_BD = item_vector_ID[:100]
    exact_row_BK = np.argsort(-query_BD @ item_vector_ID.T, axis=1)[:, :20]
    recalls = []
    for rescore in (0, 4):
        fitted_kind = kind.model_copy(update={"rescore": rescore, "nprobe": 1_000}).fitted(NUM_ITEMS, DIM)
        index = build_index(fitted_kind, item_vector_ID)
        score_BK, row_BK = search(index, query_BD, kind=fitted_kind, depth=20)
        recalls.append(_mean_recall(row_BK, exact_row_BK))
    recall, rescored_recall = recalls
    assert recall < rescored_recall > 0.9
    np.testing.assert_allclose(score_BK, (query_BD[:, None] * item_vector_ID[row_BK]).sum(axis=2), atol=1e-3)
    faiss.write_index(index, str(tmp_path / "index"))
    loaded_index = load_index({tmp_path / "index": record_file(tmp_path / "index")})
    assert np.array_equal(search(loaded_index, query_BD, kind=fitted_kind, depth=20)[1], row_BK)
    score_BK, row_BK = search_exhaustively(loaded_index, query_BD, kind=fitted_kind, depth=NUM_ITEMS + 3)
    assert (np.sort(row_BK[:, :NUM_ITEMS], axis=1) == np.arange(NUM_ITEMS)).all()
    assert (row_BK[:, NUM_ITEMS:] == -1).all()
    assert (tmp_path / "index").stat().st_size > fitted_kind.min_bytes(num_items=NUM_ITEMS, dim=DIM)


@every_kind
def test_an_exhaustive_search_returns_every_item_and_is_exact_without_compression(
    kind: AnyIndexKind, index_by_kind: dict[str, Any], item_vector_ID: np.ndarray
) -> None:
    score_BK, row_BK = search_exhaustively(index_by_kind[kind.kind], item_vector_ID[:20], kind=kind, depth=NUM_ITEMS)
    assert (np.sort(row_BK, axis=1) == np.arange(NUM_ITEMS)).all()
    exact_score_BK = np.take_along_axis(item_vector_ID[:20] @ item_vector_ID.T, row_BK, axis=1)
    is_compressed = kind.min_bytes(num_items=NUM_ITEMS, dim=DIM) < item_vector_ID.nbytes
    np.testing.assert_allclose(score_BK, exact_score_BK, atol=0.5 if is_compressed else 1e-5)


@every_kind
def test_a_stored_index_gives_the_same_results_and_has_about_the_estimated_size(
    kind: AnyIndexKind, index_by_kind: dict[str, Any], item_vector_ID: np.ndarray, tmp_path: Path
) -> None:
    faiss.write_index(index_by_kind[kind.kind], str(tmp_path / "index"))
    loaded_index, fitted_kind = load_index({tmp_path / "index": record_file(tmp_path / "index")}), kind.fitted(NUM_ITEMS, DIM)
    for array, loaded_array in zip(
        search(index_by_kind[kind.kind], item_vector_ID[:50], kind=fitted_kind, depth=10),
        search(loaded_index, item_vector_ID[:50], kind=fitted_kind, depth=10),
        strict=True,
    ):
        assert np.array_equal(array, loaded_array)
    min_bytes = kind.min_bytes(num_items=NUM_ITEMS, dim=DIM)
    max_centroid_bytes = 4 * DIM * (256 + NUM_ITEMS // MIN_ITEMS_PER_CENTROID)  # centroids of the sub-vectors and cells
    assert min_bytes <= (tmp_path / "index").stat().st_size < 1.1 * min_bytes + max_centroid_bytes


@every_kind
@pytest.mark.parametrize("num_items", [2, 12, 100])
def test_fitted_settings_suit_a_small_catalogue_and_can_be_read_back(
    kind: AnyIndexKind, num_items: int, item_vector_ID: np.ndarray
) -> None:
    fitted_kind = kind.fitted(num_items, DIM)
    assert fitted_kind.fitted(num_items, DIM) == fitted_kind
    *_, (*_, widest_kind) = fitted_kind.search_variants(num_items)
    parameters = widest_kind.model_dump(exclude={"kind"})
    assert all(type(parameter) is int for parameter in parameters.values())
    assert TypeAdapter(AnyIndexKind).validate_python({"kind": kind.kind} | parameters) == widest_kind
    _, row_BK = search_exhaustively(
        build_index(widest_kind, item_vector_ID[:num_items]), item_vector_ID[:3], kind=widest_kind, depth=num_items
    )
    assert (np.sort(row_BK, axis=1) == np.arange(num_items)).all()


@every_kind
def test_every_tested_variant_is_within_the_limits_of_the_config(kind: AnyIndexKind) -> None:
    adapter: TypeAdapter[AnyIndexKind] = TypeAdapter(AnyIndexKind)
    largest_recall_k = 10_000
    for series in kind.fitted(NUM_ITEMS, DIM).search_variants(largest_recall_k):
        assert [adapter.validate_python(variant.model_dump()) for variant in series] == series


@every_kind
def test_an_unsupported_vector_width_is_rejected_by_the_config_and_by_the_stage(kind: AnyIndexKind, tmp_path: Path) -> None:
    assert kind.problem(64) is None
    problem = IndexConfig(served=kind).problem(33)
    assert problem == kind.problem(33)
    if problem is not None:
        export = write_export_stage(
            tmp_path / "export", item_vectors=np.ones((2, 33)), queries={"test": (range(1), np.ones((1, 33)))}
        )
        with pytest.raises(InputError, match=f"index: {problem}"):
            build_indexes(IndexConfig(served=kind), export=export, folder=tmp_path / "index")


@every_kind
@pytest.mark.parametrize("max_exact_items", [0, 10_000], ids=["search in the index", "exact search"])
def test_a_search_among_selected_items_returns_the_best_of_them_and_no_other_items(
    kind: AnyIndexKind,
    max_exact_items: int,
    index_by_kind: dict[str, Any],
    item_vector_ID: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recsys_core.retrieval.search.MAX_EXACT_ITEMS", max_exact_items)
    index, query_BD, num_selected = index_by_kind[kind.kind], item_vector_ID[:50], NUM_ITEMS // 5
    is_selected_I = np.zeros(NUM_ITEMS, np.bool_)
    is_selected_I[np.random.default_rng(3).permutation(NUM_ITEMS)[:num_selected]] = True
    selection = Selection(index, is_selected_I)
    assert selection.num_items == num_selected
    *_, (*_, widest_kind) = kind.fitted(NUM_ITEMS, DIM).search_variants(20)
    exact_row_BK = np.argsort(np.where(is_selected_I, -query_BD @ item_vector_ID.T, np.inf), axis=1)[:, :20]
    for search_items in (search, search_exhaustively):
        score_BK, row_BK = search_items(index, query_BD, kind=widest_kind, depth=20, selection=selection)
        assert is_selected_I[row_BK[row_BK >= 0]].all() and (np.diff(score_BK) <= 0).all()
        assert _mean_recall(row_BK, exact_row_BK) > _min_recall(kind)
    _, row_BK = search_exhaustively(index, query_BD, kind=widest_kind, depth=NUM_ITEMS, selection=selection)
    assert (np.sort(row_BK[:, :num_selected], axis=1) == np.flatnonzero(is_selected_I)).all()
    assert (row_BK[:, num_selected:] == -1).all()
