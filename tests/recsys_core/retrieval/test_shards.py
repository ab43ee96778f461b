"""Indexes in shards, for every kind: they find what one index finds, and are built one shard at a time."""

import weakref
from collections.abc import Iterator
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
from tests.recsys_core.evaluation.stage_folders import write_export_stage

NUM_ITEMS, DIM, DEPTH, RECALL_TARGET = 3_001, 16, 20, 0.9
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


def _kind_id(kind: AnyIndexKind) -> str:
    return f"{kind.kind}-{getattr(kind, 'rescore', 0)}"


every_kind = pytest.mark.parametrize("kind", KINDS, ids=_kind_id)
every_number_of_shards = pytest.mark.parametrize("num_shards", [1, 3])


@pytest.fixture(scope="module", autouse=True)
def few_iterations() -> Iterator[None]:
    """Train the rotation of opq_pq for a shorter time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpqPq, "OPQ_ITERATIONS", 1)
        yield


@pytest.fixture(scope="module")
def item_vector_ID() -> np.ndarray:
    """Unit vectors in clusters. The last 100 items have the vectors of the first 100 items."""
    random = np.random.default_rng(0)
    cluster_centres = random.normal(size=(30, DIM))
    vector_ID = cluster_centres[random.integers(30, size=NUM_ITEMS)] + 0.5 * random.normal(size=(NUM_ITEMS, DIM))
    vector_ID[-100:] = vector_ID[:100]
    return (vector_ID / np.linalg.norm(vector_ID, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def export(item_vector_ID: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> ExportManifest:
    query_BD = item_vector_ID[:120] + 0.1 * np.random.default_rng(1).normal(size=(120, DIM))
    queries_by_split = {"test": (range(60), query_BD[:60]), "validation": (range(60), query_BD[60:])}
    return write_export_stage(
        tmp_path_factory.mktemp("export") / "export", item_vectors=item_vector_ID, queries=queries_by_split
    )


@pytest.fixture(scope="module")
def index_and_search_by_kind(
    item_vector_ID: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> dict[AnyIndexKind, tuple[Any, AnyIndexKind]]:
    """For each kind, an index in three shards and the kind with its widest search settings."""
    folder = tmp_path_factory.mktemp("built")
    return {
        kind: _write_and_map_index(kind, item_vector_ID, folder / str(number), num_shards=3)
        for number, kind in enumerate(KINDS)
    }


def _write_and_map_index(
    kind: AnyIndexKind, item_vector_ID: np.ndarray, folder: Path, *, num_shards: int
) -> tuple[Any, AnyIndexKind]:
    """Write an index. Return the mapped index, and the kind with its widest search settings."""
    folder.mkdir(exist_ok=True)
    paths = index_paths(folder, kind.kind, num_shards=num_shards)
    fitted_kind = kind.fitted(len(item_vector_ID), DIM)
    write_index(fitted_kind, item_vector_ID, paths)
    *_, (*_, widest_kind) = fitted_kind.search_variants(DEPTH)
    return map_index(paths), widest_kind


def _load_built_index(manifest: IndexManifest, kind: str) -> Any:
    paths = index_paths(manifest.folder, kind, num_shards=manifest.reports[kind].shards)
    return load_index({path: manifest.files[path.name] for path in paths})


def test_every_kind_is_checked() -> None:
    assert {type(kind) for kind in KINDS} == {*get_args(get_args(AnyIndexKind)[0])}


@every_kind
@every_number_of_shards
def test_an_index_reaches_the_target_with_any_number_of_shards(
    kind: AnyIndexKind, num_shards: int, export: ExportManifest, item_vector_ID: np.ndarray, tmp_path: Path
) -> None:
    config = IndexConfig(served=kind, recall_k=DEPTH, recall_target=RECALL_TARGET, shards=num_shards)
    manifest = build_indexes(config, export=export, folder=tmp_path / "index")
    query_BD, report = np.load(export.path("query_vectors_test.npy")), manifest.reports[kind.kind]
    index, fitted_kind = _load_built_index(manifest, kind.kind), kind.model_validate({"kind": kind.kind} | report.parameters)
    exact_row_BK = np.argsort(-query_BD @ item_vector_ID.T, axis=1)[:, :DEPTH]
    _, row_BK = search(index, query_BD, kind=fitted_kind, depth=DEPTH)
    recall_B = recall_per_query(row_BK, exact_row_BK=exact_row_BK, query_BD=query_BD, item_vector_ID=item_vector_ID)
    assert report.recall == pytest.approx(recall_B.mean()) and report.recall > RECALL_TARGET - 0.05
    assert (len(shards_of(index)), index.ntotal, index.d) == (num_shards, NUM_ITEMS, DIM)
    assert report.size_bytes == sum(path.stat().st_size for path in manifest.folder.glob(f"{kind.kind}.*"))
    assert manifest.warning is None and manifest.reports["flat"].recall == 1


@pytest.mark.parametrize("kind", [*KINDS, PqFastScan(nlist=20, rescore=0)], ids=_kind_id)
def test_three_shards_find_the_items_that_one_index_finds(
    kind: AnyIndexKind, item_vector_ID: np.ndarray, tmp_path: Path
) -> None:
    """The scores are equal for kinds whose shards have the same cells. Other kinds reach at least the recall of one index."""
    for catalogue_ID in (item_vector_ID, item_vector_ID[:-100]):  # with and without equal vectors, whose order is arbitrary
        index, widest_kind = _write_and_map_index(kind, catalogue_ID, tmp_path, num_shards=3)
        one_index, query_BD = build_index(kind.fitted(len(catalogue_ID), DIM), catalogue_ID), catalogue_ID[:7]
        for depth in (1, 10, 150):
            for search_kind in (widest_kind, widest_kind.model_copy(update={"nprobe": 2})):
                one_index_score_BK, one_index_row_BK = search(one_index, query_BD, kind=search_kind, depth=depth)
                score_BK, row_BK = search(index, query_BD, kind=search_kind, depth=depth)
                if getattr(kind, "rescore", 0) == 0 and kind.kind != "hnsw":
                    assert np.array_equal(score_BK, one_index_score_BK)
                    assert catalogue_ID is item_vector_ID or "pq" in kind.kind or np.array_equal(row_BK, one_index_row_BK)
                else:
                    exact_row_BK = np.argsort(-query_BD @ catalogue_ID.T, axis=1)[:, :depth]
                    one_index_recall, recall = (
                        recall_per_query(rows, exact_row_BK=exact_row_BK, query_BD=query_BD, item_vector_ID=catalogue_ID).mean()
                        for rows in (one_index_row_BK, row_BK)
                    )
                    assert one_index_recall <= recall


@every_kind
def test_a_search_beyond_the_catalogue_returns_every_item_once(
    kind: AnyIndexKind, index_and_search_by_kind: Any, item_vector_ID: np.ndarray
) -> None:
    index, widest_kind = index_and_search_by_kind[kind]
    for search_items in (search, search_exhaustively):
        score_BK, row_BK = search_items(index, item_vector_ID[:5], kind=widest_kind, depth=NUM_ITEMS + 2)
        assert (np.diff(score_BK) <= 0).all() and (row_BK[:, NUM_ITEMS:] == -1).all()
        for row_K in row_BK:
            assert len({*row_K}) == (row_K >= 0).sum() + 1  # one more for -1
    assert (np.sort(row_BK[:, :NUM_ITEMS]) == np.arange(NUM_ITEMS)).all()


@every_kind
@pytest.mark.parametrize("max_exact_items", [0, 10_000], ids=["search in the index", "exact search"])
def test_a_search_among_selected_items_finds_nearly_all_of_the_best_items(
    kind: AnyIndexKind,
    max_exact_items: int,
    index_and_search_by_kind: Any,
    item_vector_ID: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recsys_core.retrieval.search.MAX_EXACT_ITEMS", max_exact_items)
    index, widest_kind = index_and_search_by_kind[kind]
    is_selected_I = np.zeros(NUM_ITEMS, np.bool_)
    is_selected_I[rows_by_shard(NUM_ITEMS, num_shards=3)[1][:600]] = True  # items of one shard
    is_selected_I[1_000:1_400] = True
    selection = Selection(index, is_selected_I)
    assert selection.num_items == is_selected_I.sum() == sum(shard.num_items for shard in selection.shards)
    exact_row_BK = np.argsort(np.where(is_selected_I, -item_vector_ID[:50] @ item_vector_ID.T, np.inf), axis=1)[:, :DEPTH]
    _, row_BK = search(index, item_vector_ID[:50], kind=widest_kind, depth=DEPTH, selection=selection)
    assert is_selected_I[row_BK[row_BK >= 0]].all()
    recall_B = recall_per_query(row_BK, exact_row_BK=exact_row_BK, query_BD=item_vector_ID[:50], item_vector_ID=item_vector_ID)
    assert recall_B.mean() > RECALL_TARGET
    empty_selection = Selection(index, np.zeros(NUM_ITEMS, np.bool_))
    assert (search_exhaustively(index, item_vector_ID[:2], kind=widest_kind, depth=3, selection=empty_selection)[1] == -1).all()


@every_kind
def test_the_vectors_of_all_shards_are_read_by_item_row(
    kind: AnyIndexKind, index_and_search_by_kind: Any, item_vector_ID: np.ndarray
) -> None:
    index, _ = index_and_search_by_kind[kind]
    assert (stored_vectors(index) is not None) == isinstance(kind, Flat | Hnsw)
    if kind.has_readable_vectors:
        reader, row_B = stored_vectors(index) or decoded_vectors(index), np.random.default_rng(1).integers(NUM_ITEMS, size=500)
        np.testing.assert_allclose(reader.take(row_B), item_vector_ID[row_B], atol=0.01 if isinstance(kind, IvfSq8) else 0)
        assert reader.take(row_B[:0]).shape == (0, DIM)


@pytest.mark.parametrize("num_shards", [1, 3, 10])
def test_the_vectors_of_only_one_shard_are_in_memory_at_a_time(
    num_shards: int, item_vector_ID: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_indexes: weakref.WeakSet[Any] = weakref.WeakSet()
    num_live_rows_per_write = []

    def record_live_rows(index: Any, path: str) -> None:
        live_indexes.add(index)
        num_live_rows_per_write.append(sum(live_index.ntotal for live_index in live_indexes))

    monkeypatch.setattr(faiss, "write_index", record_live_rows)
    write_index(Flat(), item_vector_ID, index_paths(tmp_path, "flat", num_shards=num_shards))
    assert num_live_rows_per_write == [len(rows) for rows in np.array_split(np.arange(NUM_ITEMS), num_shards)]


@pytest.mark.parametrize(
    ("shards", "kind", "num_items", "expected_num_shards"),
    [
        (1, Hnsw(), 10**9, 1),
        (5, Flat(), 10**9, 5),
        (5, Flat(), 9, 5),
        (5, Flat(), 2, 2),
        ("auto", Flat(), 15_790_320, 1),  # 256 bytes less than 4 GiB: an item takes 66 * 4 + 8 bytes
        ("auto", Flat(), 15_790_321, 2),
        ("auto", IvfSq8(), 15_790_321, 1),
    ],
)
def test_the_number_of_shards_is_configured_or_follows_from_the_size_of_the_index(
    shards: Any, kind: AnyIndexKind, num_items: int, expected_num_shards: int
) -> None:
    assert IndexConfig(shards=shards).num_shards(kind, num_items=num_items, dim=66) == expected_num_shards


def test_the_setting_for_one_shard_is_left_out_of_the_fingerprint() -> None:
    assert "shards" not in IndexConfig(shards=1).result_settings()
    assert IndexConfig(shards="auto").result_settings()["shards"] == "auto"


def test_merged_items_with_equal_scores_are_in_the_order_of_their_shards() -> None:
    no_score = np.finfo(np.float32).min
    results_of_shards = [
        (np.array([[3, 2, no_score], [1, 1, 1]], np.float32), np.array([[5, 6, -1], [1, 2, 3]])),
        (np.array([[3, no_score, no_score], [4, 1, 0]], np.float32), np.array([[7, -1, -1], [8, 9, 4]])),
    ]
    score_BK, row_BK = merge(results_of_shards)
    assert score_BK.tolist() == [[3, 3, 2], [4, 1, 1]]
    assert row_BK.tolist() == [[5, 7, 6], [8, 1, 2]]
