"""The contract of an index in shards, checked for every kind: what one index finds, in files that are built one by one."""

import weakref
from pathlib import Path
from typing import Any, get_args

import faiss
import numpy as np
import pytest

from recsys_core.manifests import ExportManifest, IndexManifest
from recsys_core.retrieval.compressed import IvfPq, IvfSq8, OpqPq, PqFastScan
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.index import build_index, build_indexes, write_index
from recsys_core.retrieval.ivf import IvfFlat
from recsys_core.retrieval.kinds import AnyIndexKind, Flat, Hnsw
from recsys_core.retrieval.measure import recall_per_query
from recsys_core.retrieval.search import (
    Selection,
    decoded_vectors,
    load_index,
    map_index,
    search,
    search_exhaustively,
    stored_vectors,
)
from recsys_core.retrieval.shards import index_paths, merge, rows_by_shard, shards_of
from tests.recsys_core.evaluation.stage_folders import export_stage

NUM_ITEMS, DIM, DEPTH, TARGET = 3_001, 16, 20, 0.9
KINDS: tuple[AnyIndexKind, ...] = (
    Flat(),
    Hnsw(hnsw_m=8, ef_construction=40),
    IvfFlat(nlist=20),
    IvfSq8(nlist=20),
    IvfSq8(nlist=20, rescore=4),
    IvfPq(nlist=20, pq_nbits=4, rescore=None),
    OpqPq(nlist=20, pq_nbits=4, rescore=None),
    PqFastScan(nlist=20),
)


def _name(kind: AnyIndexKind) -> str:
    return f"{kind.kind}-{getattr(kind, 'rescore', 0)}"


every_kind = pytest.mark.parametrize("kind", KINDS, ids=_name)
every_number_of_shards = pytest.mark.parametrize("num_shards", [1, 3])


@pytest.fixture(scope="module", autouse=True)
def few_iterations() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpqPq, "OPQ_ITERATIONS", 1)
        yield


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    """Vectors in clusters; each of the last 100 items has the vector of one of the first 100."""
    random = np.random.default_rng(0)
    centre = random.normal(size=(30, DIM))
    vector = centre[random.integers(30, size=NUM_ITEMS)] + 0.5 * random.normal(size=(NUM_ITEMS, DIM))
    vector[-100:] = vector[:100]
    return (vector / np.linalg.norm(vector, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def export(vectors: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> ExportManifest:
    queries = vectors[:120] + 0.1 * np.random.default_rng(1).normal(size=(120, DIM))
    by_split = {"test": (range(60), queries[:60]), "validation": (range(60), queries[60:])}
    return export_stage(tmp_path_factory.mktemp("export") / "export", item_vectors=vectors, queries=by_split)


@pytest.fixture(scope="module")
def built(vectors: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> dict[AnyIndexKind, tuple[Any, AnyIndexKind]]:
    """The index of each kind in three shards, and its widest search."""
    folder = tmp_path_factory.mktemp("built")
    return {kind: _build(kind, vectors, folder / str(number), num_shards=3) for number, kind in enumerate(KINDS)}


def _build(kind: AnyIndexKind, vectors: np.ndarray, folder: Path, *, num_shards: int) -> tuple[Any, AnyIndexKind]:
    """Return a mapped index and its widest search."""
    folder.mkdir(exist_ok=True)
    paths = index_paths(folder, kind.kind, num_shards=num_shards)
    fitted_kind = kind.fitted(len(vectors), DIM)
    write_index(fitted_kind, vectors, paths)
    *_, (*_, widest) = fitted_kind.search_variants(DEPTH)
    return map_index(paths), widest


def _load(manifest: IndexManifest, kind: str) -> Any:
    paths = index_paths(manifest.folder, kind, num_shards=manifest.reports[kind].shards)
    return load_index({path: manifest.files[path.name] for path in paths})


def test_every_kind_is_checked() -> None:
    assert {type(kind) for kind in KINDS} == {*get_args(get_args(AnyIndexKind)[0])}


@every_kind
@every_number_of_shards
def test_the_stage_reaches_the_target_with_any_number_of_shards(
    kind: AnyIndexKind, num_shards: int, export: ExportManifest, vectors: np.ndarray, tmp_path: Path
) -> None:
    config = IndexConfig(served=kind, recall_k=DEPTH, recall_target=TARGET, shards=num_shards)
    manifest = build_indexes(config, export=export, folder=tmp_path / "index")
    query_BD, report = np.load(export.path("query_vectors_test.npy")), manifest.reports[kind.kind]
    index, fitted_kind = _load(manifest, kind.kind), kind.model_validate({"kind": kind.kind} | report.parameters)
    exact_row_BK = np.argsort(-query_BD @ vectors.T, axis=1)[:, :DEPTH]
    _, row_BK = search(index, query_BD, kind=fitted_kind, depth=DEPTH)
    recall_B = recall_per_query(row_BK, exact_row_BK=exact_row_BK, query_BD=query_BD, item_vector_ID=vectors)
    assert report.recall == pytest.approx(recall_B.mean()) and report.recall > TARGET - 0.05
    assert (len(shards_of(index)), index.ntotal, index.d) == (num_shards, NUM_ITEMS, DIM)
    assert report.size_bytes == sum(path.stat().st_size for path in manifest.folder.glob(f"{kind.kind}.*"))
    assert manifest.warning is None and manifest.reports["flat"].recall == 1


@pytest.mark.parametrize("kind", [*KINDS, PqFastScan(nlist=20, rescore=0)], ids=_name)
def test_three_shards_find_what_one_index_finds(kind: AnyIndexKind, vectors: np.ndarray, tmp_path: Path) -> None:
    """Shards with the same cells find the same items as one index. Other indexes find more with three shards."""
    for catalogue in (vectors, vectors[:-100]):  # with and without equal vectors, whose order is arbitrary
        index, widest = _build(kind, catalogue, tmp_path, num_shards=3)
        one, query_BD = build_index(kind.fitted(len(catalogue), DIM), catalogue), catalogue[:7]
        for depth in (1, 10, 150):
            for search_kind in (widest, widest.model_copy(update={"nprobe": 2})):
                (one_score, one_row), (score, row) = (search(a, query_BD, kind=search_kind, depth=depth) for a in (one, index))
                if getattr(kind, "rescore", 0) == 0 and kind.kind != "hnsw":
                    assert np.array_equal(score, one_score)
                    assert catalogue is vectors or "pq" in kind.kind or np.array_equal(row, one_row)
                else:
                    exact_row = np.argsort(-query_BD @ catalogue.T, axis=1)[:, :depth]
                    recalls = [
                        recall_per_query(rows, exact_row_BK=exact_row, query_BD=query_BD, item_vector_ID=catalogue).mean()
                        for rows in (one_row, row)
                    ]
                    assert recalls[0] <= recalls[1]


@every_kind
def test_a_search_beyond_the_catalogue_returns_every_item_once(kind: AnyIndexKind, built: Any, vectors: np.ndarray) -> None:
    index, widest = built[kind]
    for search_items in (search, search_exhaustively):
        score, row = search_items(index, vectors[:5], kind=widest, depth=NUM_ITEMS + 2)
        assert (np.diff(score) <= 0).all() and (row[:, NUM_ITEMS:] == -1).all()
        for row_N in row:
            assert len({*row_N}) == (row_N >= 0).sum() + 1
    assert (np.sort(row[:, :NUM_ITEMS]) == np.arange(NUM_ITEMS)).all()


@every_kind
@pytest.mark.parametrize("max_exact", [0, 10_000])
def test_a_selection_is_searched_in_each_shard(
    kind: AnyIndexKind, max_exact: int, built: Any, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recsys_core.retrieval.search.MAX_EXACT_ITEMS", max_exact)
    index, widest = built[kind]
    is_selected_I = np.zeros(NUM_ITEMS, np.bool_)
    is_selected_I[rows_by_shard(NUM_ITEMS, num_shards=3)[1][:600]] = True  # none in the other shards
    is_selected_I[1_000:1_400] = True
    selection = Selection(index, is_selected_I)
    assert selection.num_items == is_selected_I.sum() == sum(part.num_items for part in selection.shards)
    exact_row = np.argsort(np.where(is_selected_I, -vectors[:50] @ vectors.T, np.inf), axis=1)[:, :DEPTH]
    _, row = search(index, vectors[:50], kind=widest, depth=DEPTH, selection=selection)
    assert is_selected_I[row[row >= 0]].all()
    recall_B = recall_per_query(row, exact_row_BK=exact_row, query_BD=vectors[:50], item_vector_ID=vectors)
    assert recall_B.mean() > TARGET
    nothing = Selection(index, np.zeros(NUM_ITEMS, np.bool_))
    assert (search_exhaustively(index, vectors[:2], kind=widest, depth=3, selection=nothing)[1] == -1).all()


@every_kind
def test_the_vectors_of_all_shards_are_read_by_item_row(kind: AnyIndexKind, built: Any, vectors: np.ndarray) -> None:
    index, _ = built[kind]
    assert (stored_vectors(index) is not None) == isinstance(kind, Flat | Hnsw)
    if kind.has_readable_vectors:
        reader, rows = stored_vectors(index) or decoded_vectors(index), np.random.default_rng(1).integers(NUM_ITEMS, size=500)
        np.testing.assert_allclose(reader.take(rows), vectors[rows], atol=0.01 if isinstance(kind, IvfSq8) else 0)
        assert reader.take(rows[:0]).shape == (0, DIM)


@pytest.mark.parametrize("num_shards", [1, 3, 10])
def test_the_vectors_of_one_shard_at_a_time_are_in_memory(
    num_shards: int, vectors: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_indexes: weakref.WeakSet[Any] = weakref.WeakSet()
    num_live_rows = []

    def count_rows(index: Any, path: str) -> None:
        live_indexes.add(index)
        num_live_rows.append(sum(live.ntotal for live in live_indexes))

    monkeypatch.setattr(faiss, "write_index", count_rows)
    write_index(Flat(), vectors, index_paths(tmp_path, "flat", num_shards=num_shards))
    assert num_live_rows == [len(rows) for rows in np.array_split(np.arange(NUM_ITEMS), num_shards)]


@pytest.mark.parametrize(
    ("shards", "kind", "num_items", "expected"),
    [
        (1, Hnsw(), 10**9, 1),
        (5, Flat(), 10**9, 5),
        (5, Flat(), 9, 5),
        (5, Flat(), 2, 2),
        ("auto", Flat(), 15_790_320, 1),  # 272 bytes per item: 4 GiB - 256 bytes
        ("auto", Flat(), 15_790_321, 2),
        ("auto", IvfSq8(), 15_790_321, 1),
    ],
)
def test_auto_divides_an_index_that_is_larger_than_a_shard(
    shards: Any, kind: AnyIndexKind, num_items: int, expected: int
) -> None:
    assert IndexConfig(shards=shards).num_shards(kind, num_items=num_items, dim=66) == expected


def test_one_shard_keeps_the_fingerprint_of_a_config_without_the_setting() -> None:
    assert "shards" not in IndexConfig(shards=1).result_settings()
    assert IndexConfig(shards="auto").result_settings()["shards"] == "auto"


def test_equal_scores_are_in_the_order_of_the_shards_and_missing_items_are_last() -> None:
    no_score = np.finfo(np.float32).min
    results = [
        (np.array([[3, 2, no_score], [1, 1, 1]], np.float32), np.array([[5, 6, -1], [1, 2, 3]])),
        (np.array([[3, no_score, no_score], [4, 1, 0]], np.float32), np.array([[7, -1, -1], [8, 9, 4]])),
    ]
    scores, rows = merge(results)
    assert scores.tolist() == [[3, 3, 2], [4, 1, 1]]
    assert rows.tolist() == [[5, 7, 6], [8, 1, 2]]
