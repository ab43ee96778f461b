"""The contract of an index kind, checked for every member of AnyIndexKind."""

from pathlib import Path
from typing import Any, get_args

import faiss
import numpy as np
import pytest
from pydantic import TypeAdapter

from recsys_core.errors import InputError
from recsys_core.manifests import record_file
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.index import build_index, build_indexes
from recsys_core.retrieval.kinds import MIN_ITEMS_PER_CENTROID, AnyIndexKind
from recsys_core.retrieval.search import load_index, search, search_exhaustively
from tests.recsys_core.evaluation.stage_folders import export_stage

KINDS = tuple(kind_class() for kind_class in get_args(get_args(AnyIndexKind)[0]))
NUM_ITEMS, DIM = 3_000, 32
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    """Vectors of length 1 in clusters, so that the best item of an item's vector is the item itself."""
    random = np.random.default_rng(0)
    centre = random.normal(size=(30, DIM))
    vector = centre[random.integers(30, size=NUM_ITEMS)] + 0.5 * random.normal(size=(NUM_ITEMS, DIM))
    return (vector / np.linalg.norm(vector, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def index_by_kind(vectors: np.ndarray) -> dict[str, Any]:
    return {kind.kind: build_index(kind.fitted(NUM_ITEMS), vectors) for kind in KINDS}


@every_kind
def test_an_index_has_every_item_and_an_item_is_among_its_own_results(
    kind: AnyIndexKind, index_by_kind: dict[str, Any], vectors: np.ndarray
) -> None:
    index = index_by_kind[kind.kind]
    assert (index.ntotal, index.d, index.metric_type) == (NUM_ITEMS, DIM, faiss.METRIC_INNER_PRODUCT)
    score, row = search(index, vectors[:200], kind=kind.fitted(NUM_ITEMS), depth=10)
    assert row.shape == score.shape == (200, 10)
    assert (np.diff(score, axis=1) <= 0).all()
    assert np.mean((row == np.arange(200)[:, None]).any(axis=1)) > 0.95


@every_kind
def test_an_exhaustive_search_returns_every_item_and_is_exact_without_compression(
    kind: AnyIndexKind, index_by_kind: dict[str, Any], vectors: np.ndarray
) -> None:
    score, row = search_exhaustively(index_by_kind[kind.kind], vectors[:20], kind=kind, depth=NUM_ITEMS)
    assert (np.sort(row, axis=1) == np.arange(NUM_ITEMS)).all()
    exact_score = np.take_along_axis(vectors[:20] @ vectors.T, row, axis=1)
    is_compressed = kind.min_bytes(num_items=NUM_ITEMS, dim=DIM) < vectors.nbytes
    np.testing.assert_allclose(score, exact_score, atol=0.5 if is_compressed else 1e-5)


@every_kind
def test_an_index_that_was_written_and_read_gives_the_same_results_and_has_about_the_estimated_size(
    kind: AnyIndexKind, index_by_kind: dict[str, Any], vectors: np.ndarray, tmp_path: Path
) -> None:
    faiss.write_index(index_by_kind[kind.kind], str(tmp_path / "index"))
    index, fitted = load_index(tmp_path / "index", record=record_file(tmp_path / "index")), kind.fitted(NUM_ITEMS)
    for before, after in zip(
        search(index_by_kind[kind.kind], vectors[:50], kind=fitted, depth=10),
        search(index, vectors[:50], kind=fitted, depth=10),
        strict=True,
    ):
        assert np.array_equal(before, after)
    min_bytes = kind.min_bytes(num_items=NUM_ITEMS, dim=DIM)
    max_centroid_bytes = 4 * DIM * (256 + NUM_ITEMS // MIN_ITEMS_PER_CENTROID)  # of the sub-vectors and of the cells
    assert min_bytes <= (tmp_path / "index").stat().st_size < 1.1 * min_bytes + max_centroid_bytes


@every_kind
@pytest.mark.parametrize("num_items", [2, 12, 100])
def test_the_settings_fit_a_small_catalogue_and_are_read_back_from_their_parameters(
    kind: AnyIndexKind, num_items: int, vectors: np.ndarray
) -> None:
    fitted = kind.fitted(num_items)
    assert fitted.fitted(num_items) == fitted
    *_, fitted = fitted.search_variants(num_items)
    parameters = fitted.model_dump(exclude={"kind"})
    assert all(type(parameter) is int for parameter in parameters.values())
    assert TypeAdapter(AnyIndexKind).validate_python({"kind": kind.kind} | parameters) == fitted
    _, row = search_exhaustively(build_index(fitted, vectors[:num_items]), vectors[:3], kind=fitted, depth=num_items)
    assert (np.sort(row, axis=1) == np.arange(num_items)).all()


@every_kind
def test_the_problem_of_a_kind_is_reported_by_the_config_and_stops_the_stage(kind: AnyIndexKind, tmp_path: Path) -> None:
    assert kind.problem(64) is None
    problem = IndexConfig(served=kind).problem(33)
    assert problem == kind.problem(33)
    if problem is not None:
        export = export_stage(
            tmp_path / "export", item_vectors=np.ones((2, 33)), queries={"test": (range(1), np.ones((1, 33)))}
        )
        with pytest.raises(InputError, match=f"index: {problem}"):
            build_indexes(IndexConfig(served=kind), export=export, folder=tmp_path / "index")
