from pathlib import Path
from typing import get_args

import faiss
import numpy as np
import pytest
from matplotlib.figure import Figure

from recsys_core import plots
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import ExportManifest
from recsys_core.retrieval.config import IndexConfig, IndexKind
from recsys_core.retrieval.index import build_indexes, estimate_bytes
from recsys_core.retrieval.plot import plot_indexes
from recsys_core.retrieval.search import load_index, search, search_exhaustively
from tests.recsys_core.evaluation.stage_folders import export_stage

KINDS = get_args(IndexKind)
CONFIG = IndexConfig(compared_kinds=KINDS, nlist=10, nprobe=2, pq_m=4, pq_nbits=6, ef_search=16, recall_k=10)


def _export(folder: Path, *, items: int = 800, dim: int = 16, queries: int = 60) -> ExportManifest:
    """Clustered vectors of very different lengths, where inner product and L2 disagree."""
    random = np.random.default_rng(0)
    centre = random.normal(size=(12, dim))
    vectors = (centre[random.integers(12, size=items)] + 0.3 * random.normal(size=(items, dim))) * random.uniform(
        0.3, 3, (items, 1)
    )
    query_vectors = centre[random.integers(12, size=queries)] + 0.3 * random.normal(size=(queries, dim))
    return export_stage(folder, item_vectors=vectors, queries={"test": (range(queries), query_vectors)})


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> ExportManifest:
    return _export(tmp_path_factory.mktemp("export") / "export")


@pytest.fixture(scope="module")
def built(export: ExportManifest, tmp_path_factory: pytest.TempPathFactory):
    return build_indexes(CONFIG, export=export, folder=tmp_path_factory.mktemp("index") / "index")


def _exact(export: ExportManifest, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    item, query = np.load(export.path("item_vectors.npy")), np.load(export.path("query_vectors_test.npy"))
    score = query @ item.T
    row = np.argsort(-score, axis=1, kind="stable")[:, :k]
    return query, row, np.take_along_axis(score, row, axis=1)


def test_every_kind_is_built_for_inner_product_and_holds_every_item(built, export: ExportManifest) -> None:
    for kind in KINDS:
        index = load_index(built.path(f"{kind}.faiss"), record=built.files[f"{kind}.faiss"])
        assert index.metric_type == faiss.METRIC_INNER_PRODUCT
        assert index.ntotal == export.num_items


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_estimate_is_a_close_lower_bound(built, export: ExportManifest, kind: IndexKind) -> None:
    kinds = CONFIG.model_copy(update={"served_kind": kind, "compared_kinds": ()})
    estimate = estimate_bytes(kinds, num_items=export.num_items, dim=export.dim)
    assert estimate <= sum(built.reports[one].bytes for one in kinds.built_kinds) < 1.2 * estimate


def test_reported_recall_equals_the_overlap_with_brute_force(built, export: ExportManifest) -> None:
    query, exact_row, _ = _exact(export, CONFIG.recall_k)
    for kind, report in built.reports.items():
        index = load_index(built.path(f"{kind}.faiss"), record=built.files[f"{kind}.faiss"])
        _, row = search(index, query, kind=kind, depth=CONFIG.recall_k, parameters=report.parameters)
        overlap = np.mean([len({*returned} & {*exact}) / len(exact) for returned, exact in zip(row, exact_row, strict=True)])
        assert report.recall == pytest.approx(overlap, abs=1e-3)
        assert report.bytes == built.path(f"{kind}.faiss").stat().st_size
    assert built.reports["flat"].recall == 1.0
    assert built.reports["hnsw"].recall > 0.9
    assert built.reports["ivf_pq"].recall < 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_search_all_returns_all_items_exactly_up_to_the_quantization(kind: IndexKind, built, export: ExportManifest) -> None:
    query, exact_row, exact_score = _exact(export, export.num_items)
    index = load_index(built.path(f"{kind}.faiss"), record=built.files[f"{kind}.faiss"])
    score, row = search_exhaustively(index, query, kind=kind, depth=export.num_items)
    assert (np.sort(row, axis=1) == np.arange(export.num_items)).all()
    if kind != "ivf_pq":
        np.testing.assert_allclose(score, exact_score, rtol=1e-4, atol=1e-4)
        assert np.mean(row == exact_row) > 0.99


def test_a_larger_nprobe_searches_more_cells(built, export: ExportManifest) -> None:
    query, _, _ = _exact(export, 1)
    index = load_index(built.path("ivf_flat.faiss"), record=built.files["ivf_flat.faiss"])
    few, many = (
        (search(index, query, kind="ivf_flat", depth=export.num_items, parameters={"nprobe": nprobe})[1] >= 0).sum()
        for nprobe in (1, 5)
    )
    assert few < many < export.num_items * len(query)


def test_a_small_catalogue_lowers_nlist_and_pq_nbits(tmp_path: Path) -> None:
    manifest = build_indexes(
        IndexConfig(compared_kinds=("ivf_pq",), recall_k=50),
        export=_export(tmp_path / "export", items=100, queries=5),
        folder=tmp_path / "index",
    )
    assert manifest.reports["ivf_pq"].parameters == {"nlist": 2, "nprobe": 2, "pq_m": 8, "pq_nbits": 6}
    tiny = build_indexes(
        IndexConfig(recall_k=5), export=_export(tmp_path / "export2", items=2, queries=1), folder=tmp_path / "index2"
    )
    assert tiny.reports["hnsw"].recall == 1.0


def test_a_pq_m_that_does_not_divide_the_width_is_rejected(tmp_path: Path, export: ExportManifest) -> None:
    with pytest.raises(InputError, match=r"pq_m is 5, which does not divide the vector width 16"):
        build_indexes(IndexConfig(compared_kinds=("ivf_pq",), pq_m=5), export=export, folder=tmp_path / "index")
    assert not any(tmp_path.iterdir())


def test_a_changed_index_file_is_rejected(built, tmp_path: Path) -> None:
    content = bytearray(built.path("hnsw.faiss").read_bytes())
    content[len(content) // 2] ^= 1
    for name, damaged in {"flipped": bytes(content), "cut": bytes(content[:-9])}.items():
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(StageError, match="the file was changed"):
            load_index(tmp_path / name, record=built.files["hnsw.faiss"])
    with pytest.raises(StageError, match="missing"):
        load_index(tmp_path / "absent", record=built.files["hnsw.faiss"])


def test_building_again_gives_the_same_files(built, export: ExportManifest, tmp_path: Path) -> None:
    again = build_indexes(CONFIG, export=export, folder=tmp_path / "index")
    assert again.files == built.files


def test_the_plot_has_a_labelled_point_per_index(built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(plots, "save_png", lambda figure, path: saved.append(figure) or path)
    plot_indexes(built.reports, served_kind=built.served_index, path=tmp_path / "index.png")
    labels = [text.get_text() for text in saved[0].axes[0].texts]
    assert [label.split(",")[0] for label in labels] == list(built.reports)
    assert [label.startswith("hnsw") for label in labels] == ["(served)" in label for label in labels]


def test_only_flat_the_served_and_the_compared_kinds_are_built(tmp_path: Path, export: ExportManifest) -> None:
    served = build_indexes(IndexConfig(pq_m=5), export=export, folder=tmp_path / "served")  # only ivf_pq uses pq_m
    assert {*served.reports} == {"flat", "hnsw"}
    assert {*served.files} == {"flat.faiss", "hnsw.faiss"}
    compared = build_indexes(
        IndexConfig(served_kind="flat", compared_kinds=("ivf_flat",)), export=export, folder=tmp_path / "compared"
    )
    assert {*compared.reports} == {"flat", "ivf_flat"}


def test_with_equal_scores_no_index_prefers_popular_items(tmp_path: Path) -> None:
    items = 2_000  # rows are numbered by falling popularity
    query = np.ones((3, 8), np.float32)
    export = export_stage(tmp_path / "export", item_vectors=np.ones((items, 8)), queries={"test": (range(3), query)})
    collapsed = build_indexes(CONFIG, export=export, folder=tmp_path / "index")
    for kind, report in collapsed.reports.items():
        index = load_index(collapsed.path(f"{kind}.faiss"), record=collapsed.files[f"{kind}.faiss"])
        for _, row in (
            search(index, query, kind=kind, depth=100, parameters=report.parameters),
            search_exhaustively(index, query, kind=kind, depth=100),
        ):
            assert 0.3 < row[row >= 0].mean() / items < 0.7
        assert report.recall == 1.0  # all items have the score of the exact ones
