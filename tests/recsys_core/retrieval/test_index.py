from pathlib import Path
from typing import get_args

import faiss
import numpy as np
import pytest

from recsys_core.errors import InputError, StageError
from recsys_core.manifests import ExportManifest
from recsys_core.retrieval.config import IndexConfig, IndexKind
from recsys_core.retrieval.index import build_indexes, bytes_of
from recsys_core.retrieval.plot import plot_indexes
from recsys_core.retrieval.search import load_index, search, search_all
from tests.recsys_core.evaluation.stages import export_stage

KINDS = get_args(IndexKind)
CONFIG = IndexConfig(compared_kinds=KINDS, nlist=10, nprobe=2, pq_m=4, pq_nbits=6, ef_search=16, recall_k=10)


def _export(folder: Path, *, items: int = 800, dim: int = 16, queries: int = 60) -> ExportManifest:
    """Clustered vectors of very different lengths, where inner product and L2 disagree."""
    random = np.random.default_rng(0)
    centre = random.normal(size=(12, dim))
    vectors = (centre[random.integers(12, size=items)] + 0.3 * random.normal(size=(items, dim))) * random.uniform(
        0.3, 3, (items, 1)
    )
    asked = centre[random.integers(12, size=queries)] + 0.3 * random.normal(size=(queries, dim))
    return export_stage(folder, item_vectors=vectors, queries={"test": (range(queries), asked)})


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
def test_an_index_takes_at_least_what_is_estimated_before_it_is_built(built, export: ExportManifest, kind: IndexKind) -> None:
    kinds = CONFIG.model_copy(update={"served_kind": kind, "compared_kinds": ()})
    estimate = bytes_of(kinds, items=export.num_items, dim=export.dim)
    assert estimate <= sum(built.reports[one].bytes for one in kinds.built_kinds) < 1.2 * estimate


def test_reported_recall_is_the_overlap_with_brute_force(built, export: ExportManifest) -> None:
    query, exact_row, _ = _exact(export, CONFIG.recall_k)
    for kind, report in built.reports.items():
        index = load_index(built.path(f"{kind}.faiss"), record=built.files[f"{kind}.faiss"])
        _, row = search(index, query, kind=kind, depth=CONFIG.recall_k, parameters=report.parameters)
        overlap = np.mean([len({*found} & {*exact}) / len(exact) for found, exact in zip(row, exact_row, strict=True)])
        assert report.recall == pytest.approx(overlap, abs=1e-3)
        assert report.bytes == built.path(f"{kind}.faiss").stat().st_size
    assert built.reports["flat"].recall == 1.0
    assert built.reports["hnsw"].recall > 0.9
    assert built.reports["ivf_pq"].recall < 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_searching_all_is_never_short_and_exact_up_to_the_codes(kind: IndexKind, built, export: ExportManifest) -> None:
    query, exact_row, exact_score = _exact(export, export.num_items)
    index = load_index(built.path(f"{kind}.faiss"), record=built.files[f"{kind}.faiss"])
    score, row = search_all(index, query, kind=kind, depth=export.num_items)
    assert (np.sort(row, axis=1) == np.arange(export.num_items)).all()
    if kind != "ivf_pq":
        np.testing.assert_allclose(score, exact_score, rtol=1e-4, atol=1e-4)
        assert np.mean(row == exact_row) > 0.99


def test_probes_are_what_the_caller_says(built, export: ExportManifest) -> None:
    query, _, _ = _exact(export, 1)
    index = load_index(built.path("ivf_flat.faiss"), record=built.files["ivf_flat.faiss"])
    few, many = (
        (search(index, query, kind="ivf_flat", depth=export.num_items, parameters={"nprobe": probes})[1] >= 0).sum()
        for probes in (1, 5)
    )
    assert few < many < export.num_items * len(query)


def test_a_catalogue_smaller_than_the_settings_lowers_them(tmp_path: Path) -> None:
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
    with pytest.raises(InputError, match=r"pq_m is 5, which does not divide the vectors' size 16"):
        build_indexes(IndexConfig(compared_kinds=("ivf_pq",), pq_m=5), export=export, folder=tmp_path / "index")
    assert not any(tmp_path.iterdir())


def test_a_changed_index_file_is_never_read(built, tmp_path: Path) -> None:
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


def test_the_plot_is_a_png(built, tmp_path: Path) -> None:
    path = plot_indexes(built.reports, served=built.served, path=tmp_path / "index.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_only_the_kinds_that_are_asked_for_are_built(tmp_path: Path, export: ExportManifest) -> None:
    served = build_indexes(IndexConfig(pq_m=5), export=export, folder=tmp_path / "served")  # 5 is for ivf_pq alone
    assert {*served.reports} == {"flat", "hnsw"}
    assert {*served.files} == {"flat.faiss", "hnsw.faiss"}
    compared = build_indexes(
        IndexConfig(served_kind="flat", compared_kinds=("ivf_flat",)), export=export, folder=tmp_path / "compared"
    )
    assert {*compared.reports} == {"flat", "ivf_flat"}


def test_where_all_items_score_the_same_no_index_prefers_the_popular_ones(tmp_path: Path) -> None:
    items = 2_000  # rows are numbered by falling popularity
    query = np.ones((3, 8), np.float32)
    export = export_stage(tmp_path / "export", item_vectors=np.ones((items, 8)), queries={"test": (range(3), query)})
    collapsed = build_indexes(CONFIG, export=export, folder=tmp_path / "index")
    for kind, report in collapsed.reports.items():
        index = load_index(collapsed.path(f"{kind}.faiss"), record=collapsed.files[f"{kind}.faiss"])
        for _, row in (
            search(index, query, kind=kind, depth=100, parameters=report.parameters),
            search_all(index, query, kind=kind, depth=100),
        ):
            assert 0.3 < row[row >= 0].mean() / items < 0.7
        assert report.recall == 1.0  # every item is as good as those of exact search
