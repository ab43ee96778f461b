"""The index stage: recall against a brute-force search, tuning, the choice of `auto`, and errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from matplotlib.figure import Figure

from recsys_core import plots
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import ExportManifest, IndexManifest
from recsys_core.retrieval import auto
from recsys_core.retrieval.auto import Auto
from recsys_core.retrieval.compressed import IvfPq, IvfSq8, OpqPq, PqFastScan
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.index import build_index, build_indexes, num_gpus, served_recall_by_user
from recsys_core.retrieval.ivf import IvfFlat
from recsys_core.retrieval.kinds import AnyIndexKind, Hnsw
from recsys_core.retrieval.plot import index_table, plot_indexes
from recsys_core.retrieval.search import load_index, search, search_exhaustively
from tests.recsys_core.evaluation.stage_folders import write_export_stage

CONFIG = IndexConfig(
    served=Hnsw(ef_search=16),
    compared=(IvfFlat(nlist=10, nprobe=2), IvfPq(nlist=10, nprobe=2, pq_m=4, pq_nbits=6)),
    recall_k=10,
)


def _write_export(folder: Path, *, num_items: int = 800, dim: int = 16, num_queries: int = 60) -> ExportManifest:
    """Write an export of clustered vectors with very different norms, which inner product and L2 rank differently."""
    random = np.random.default_rng(0)
    cluster_centres = random.normal(size=(12, dim))
    vector_ID = cluster_centres[random.integers(12, size=num_items)] + 0.3 * random.normal(size=(num_items, dim))
    vector_ID *= random.uniform(0.3, 3, (num_items, 1))
    query_BD = cluster_centres[random.integers(12, size=num_queries)] + 0.3 * random.normal(size=(num_queries, dim))
    return write_export_stage(folder, item_vectors=vector_ID, queries={"test": (range(num_queries), query_BD)})


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> ExportManifest:
    return _write_export(tmp_path_factory.mktemp("export") / "export")


@pytest.fixture(scope="module")
def built_indexes(export: ExportManifest, tmp_path_factory: pytest.TempPathFactory) -> IndexManifest:
    """The manifest of the indexes that CONFIG builds."""
    return build_indexes(CONFIG, export=export, folder=tmp_path_factory.mktemp("index") / "index")


def _exact_search(export: ExportManifest, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the query vectors of the test split, and the rows of the k best items of each query."""
    item_vector_ID, query_BD = np.load(export.path("item_vectors.npy")), np.load(export.path("query_vectors_test.npy"))
    return query_BD, np.argsort(-query_BD @ item_vector_ID.T, axis=1, kind="stable")[:, :k]


def _recall_by_query(row_BK: np.ndarray, exact_row_BK: np.ndarray) -> list[float]:
    """Return, for each query, the share of exact results that were found."""
    return [len({*rows} & {*exact_rows}) / len(exact_rows) for rows, exact_rows in zip(row_BK, exact_row_BK, strict=True)]


def _load_built_index(manifest: IndexManifest, kind: AnyIndexKind) -> Any:
    return load_index({manifest.path(f"{kind.kind}.faiss"): manifest.files[f"{kind.kind}.faiss"]})


def test_the_reported_recall_equals_the_overlap_with_a_brute_force_search(built_indexes, export: ExportManifest) -> None:
    query_BD, exact_row_BK = _exact_search(export, CONFIG.recall_k)
    for kind in CONFIG.configured_indexes:
        index, report = _load_built_index(built_indexes, kind), built_indexes.reports[kind.kind]
        _, row_BK = search(index, query_BD, kind=kind, depth=CONFIG.recall_k)
        assert report.recall == pytest.approx(np.mean(_recall_by_query(row_BK, exact_row_BK)), abs=1e-3)
        assert report.size_bytes == built_indexes.path(f"{kind.kind}.faiss").stat().st_size
    assert (built_indexes.reports["flat"].recall, built_indexes.warning, built_indexes.choice) == (1.0, None, None)
    assert built_indexes.reports["hnsw"].recall > 0.9
    assert built_indexes.reports["ivf_pq"].recall < 1.0


@pytest.mark.parametrize(
    "kind", [IvfFlat(nlist=20), IvfPq(nlist=20, pq_m=16, pq_nbits=8), PqFastScan(nlist=20, pq_m=16), Hnsw(hnsw_m=4)]
)
def test_the_fastest_search_that_reaches_the_validation_target_is_used(kind: AnyIndexKind, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    vector_ID, test_query_BD, validation_query_BD = (random.normal(size=(num_vectors, 32)) for num_vectors in (3_000, 50, 60))
    queries = {"test": (range(50), test_query_BD), "validation": (range(60), validation_query_BD)}
    export = write_export_stage(tmp_path / "export", item_vectors=vector_ID, queries=queries)
    config = IndexConfig(served=kind, recall_target=0.7, recall_k=20)
    manifest = build_indexes(config, export=export, folder=tmp_path / "index")
    report, item_vector_ID = manifest.reports[kind.kind], np.load(export.path("item_vectors.npy"))
    tuned_point = next(point for point in report.tried if point.parameters == report.parameters)
    assert tuned_point.ms_per_query == min(point.ms_per_query for point in report.tried if point.recall >= 0.7)
    fastest_kind, index = kind.model_validate({"kind": kind.kind} | report.parameters), _load_built_index(manifest, kind)
    for query_BD, recall in ((validation_query_BD, tuned_point.recall), (test_query_BD, report.recall)):
        exact_row_BK = np.argsort(-query_BD @ item_vector_ID.T, axis=1)[:, :20]
        _, row_BK = search(index, query_BD, kind=fastest_kind, depth=20)
        assert recall == pytest.approx(np.mean(_recall_by_query(row_BK, exact_row_BK)), abs=2e-3)


def test_if_no_search_reaches_the_target_the_best_search_is_used(export: ExportManifest, tmp_path: Path) -> None:
    config = IndexConfig(served=IvfPq(nlist=10, pq_m=2, pq_nbits=2), compared=(Hnsw(ef_search=9),), recall_target=1.0)
    manifest = build_indexes(config, export=export, folder=tmp_path / "index")
    tried_points, hnsw_report = manifest.reports["ivf_pq"].tried, manifest.reports["hnsw"]
    assert [point.parameters["nprobe"] for point in tried_points] == [1, 2, 3, 4, 6, 8, 10][: len(tried_points)]
    best_point = max(tried_points, key=lambda point: point.recall)
    assert manifest.reports["ivf_pq"].parameters == best_point.parameters
    assert manifest.warning is not None
    recall_text = f"a recall@100 of {best_point.recall:.4f} on test queries"  # there are no validation queries
    assert f"the ivf_pq index reaches {recall_text}, below index.recall_target 1;" in manifest.warning
    assert (hnsw_report.parameters["ef_search"], hnsw_report.tried) == (9, ())


def test_the_warning_about_the_recall_target_has_the_recall_on_validation_queries(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    vector_ID, test_query_BD, validation_query_BD = (random.normal(size=(num_vectors, 16)) for num_vectors in (500, 20, 30))
    queries = {"test": (range(20), test_query_BD), "validation": (range(30), validation_query_BD)}
    export = write_export_stage(tmp_path / "export", item_vectors=vector_ID, queries=queries)
    config = IndexConfig(served=IvfPq(nlist=4, pq_m=2, pq_nbits=2), recall_target=1.0)
    manifest = build_indexes(config, export=export, folder=tmp_path / "index")
    report = manifest.reports["ivf_pq"]
    best_recall = max(point.recall for point in report.tried)
    assert manifest.warning is not None and f"{best_recall:.4f}" != f"{report.recall:.4f}"  # the report is on test queries
    assert f"the ivf_pq index reaches a recall@100 of {best_recall:.4f} on validation queries, below" in manifest.warning


def test_a_larger_nprobe_searches_more_cells(built_indexes, export: ExportManifest) -> None:
    query_BD, _ = _exact_search(export, 1)
    index = _load_built_index(built_indexes, IvfFlat())
    num_results_in_1_cell, num_results_in_5_cells = (
        (search(index, query_BD, kind=IvfFlat(nprobe=nprobe), depth=export.num_items)[1] >= 0).sum() for nprobe in (1, 5)
    )
    assert num_results_in_1_cell < num_results_in_5_cells < export.num_items * len(query_BD)


def test_a_small_catalogue_lowers_nlist_and_pq_nbits(tmp_path: Path) -> None:
    manifest = build_indexes(
        IndexConfig(compared=(IvfPq(),), recall_k=50),
        export=_write_export(tmp_path / "export", num_items=100, num_queries=5),
        folder=tmp_path / "index",
    )
    assert manifest.reports["ivf_pq"].parameters == {"nlist": 2, "nprobe": 2, "pq_m": 8, "pq_nbits": 6, "rescore": 0}
    tiny_manifest = build_indexes(
        IndexConfig(recall_k=5),
        export=_write_export(tmp_path / "export2", num_items=2, num_queries=1),
        folder=tmp_path / "index2",
    )
    assert tiny_manifest.reports["hnsw"].recall == 1.0


def test_a_pq_m_that_does_not_divide_the_width_is_rejected(tmp_path: Path, export: ExportManifest) -> None:
    with pytest.raises(InputError, match=r"pq_m of the kind ivf_pq is 5, which does not divide the vector width 16"):
        build_indexes(IndexConfig(compared=(IvfPq(pq_m=5),)), export=export, folder=tmp_path / "index")
    assert not any(tmp_path.iterdir())


def test_a_changed_or_missing_index_file_is_rejected(built_indexes, tmp_path: Path) -> None:
    content = bytearray(built_indexes.path("hnsw.faiss").read_bytes())
    content[len(content) // 2] ^= 1
    for name, damaged_content in {"flipped": bytes(content), "cut": bytes(content[:-9])}.items():
        (tmp_path / name).write_bytes(damaged_content)
        with pytest.raises(StageError, match="the file was changed"):
            load_index({tmp_path / name: built_indexes.files["hnsw.faiss"]})
    with pytest.raises(StageError, match="missing"):
        load_index({tmp_path / "absent": built_indexes.files["hnsw.faiss"]})


def test_building_again_gives_the_same_files(built_indexes, export: ExportManifest, tmp_path: Path) -> None:
    assert build_indexes(CONFIG, export=export, folder=tmp_path / "index").files == built_indexes.files


def test_the_plot_has_a_labelled_point_per_index(built_indexes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "save_png", lambda figure, path: figures.append(figure) or path)
    plot_indexes(built_indexes, tmp_path / "index.png")
    labels = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert [label.split(",")[0] for label in labels] == [*built_indexes.reports, "recall target"]
    assert [label.startswith("hnsw") for label in labels] == ["(served)" in label for label in labels]
    assert figures[0].axes[0].lines[-1].get_ydata()[0] == CONFIG.recall_target


def test_only_the_flat_the_served_and_the_compared_kinds_are_built(tmp_path: Path, export: ExportManifest) -> None:
    manifest = build_indexes(IndexConfig(), export=export, folder=tmp_path / "served")
    assert {*manifest.reports} == {"flat", "hnsw"}
    assert {*manifest.files} == {"flat.faiss", "hnsw.faiss", "served_recall.parquet"}
    manifest = build_indexes(IndexConfig(served="flat", compared=("ivf_flat",)), export=export, folder=tmp_path / "compared")
    assert {*manifest.reports} == {"flat", "ivf_flat"}


def test_with_equal_scores_no_index_prefers_popular_items(tmp_path: Path) -> None:
    num_items = 2_000  # rows are numbered by falling popularity
    query_BD = np.ones((3, 8), np.float32)
    queries = {"test": (range(3), query_BD)}
    export = write_export_stage(tmp_path / "export", item_vectors=np.ones((num_items, 8)), queries=queries)
    manifest = build_indexes(CONFIG, export=export, folder=tmp_path / "index")
    for kind in CONFIG.configured_indexes:
        index = _load_built_index(manifest, kind)
        for search_items in (search, search_exhaustively):
            _, row_BK = search_items(index, query_BD, kind=kind, depth=100)
            assert 0.3 < row_BK[row_BK >= 0].mean() / num_items < 0.7
        assert manifest.reports[kind.kind].recall == 1.0  # every item has the score of the exact results


def test_the_recall_of_the_served_index_is_stored_for_each_measured_user(built_indexes, export: ExportManifest) -> None:
    query_BD, exact_row_BK = _exact_search(export, CONFIG.recall_k)
    user_U, recall_U = served_recall_by_user(built_indexes)
    _, row_BK = search(_load_built_index(built_indexes, CONFIG.served), query_BD, kind=CONFIG.served, depth=CONFIG.recall_k)
    assert user_U.tolist() == list(range(60))
    assert recall_U.tolist() == pytest.approx(_recall_by_query(row_BK, exact_row_BK))
    assert built_indexes.reports["hnsw"].recall == pytest.approx(recall_U.mean())


def test_a_sample_of_the_test_users_is_measured_if_there_are_many(
    export: ExportManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recsys_core.retrieval.index.MAX_MEASURED_QUERIES", 7)
    user_U, recall_U = served_recall_by_user(build_indexes(CONFIG, export=export, folder=tmp_path / "index"))
    assert len(user_U) == len(recall_U) == 7
    assert sorted({*user_U} & {*range(60)}) == user_U.tolist()


def test_auto_serves_the_fastest_kind_that_reaches_the_target(export: ExportManifest, tmp_path: Path) -> None:
    config = IndexConfig(served=Auto(), compared=(IvfPq(pq_m=1, pq_nbits=1),), recall_target=0.9)
    manifest = build_indexes(config, export=export, folder=tmp_path / "index")
    assert {*manifest.reports} == {"flat", "ivf_pq", "hnsw"}
    assert manifest.served_index in {"flat", "hnsw"}  # ivf_pq does not reach the target
    assert manifest.choice is not None
    assert manifest.choice.startswith(f"{manifest.served_index} has the least latency")
    assert manifest.choice.endswith(" of the 2 kinds that reach a recall of 0.9 on validation queries")
    assert {*manifest.files} == {"flat.faiss", "ivf_pq.faiss", f"{manifest.served_index}.faiss", "served_recall.parquet"}
    assert manifest.warning is None


def test_an_index_below_the_target_is_served_with_a_warning_if_no_better_index_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpqPq, "OPQ_ITERATIONS", 1)
    random = np.random.default_rng(0)
    vector_ID, query_BD = (random.normal(size=(num_vectors, 32)) for num_vectors in (3_000, 50))
    export = write_export_stage(tmp_path / "export", item_vectors=vector_ID, queries={"test": (range(50), query_BD)})
    config = IndexConfig(served=Auto(max_bytes=200_000), recall_target=0.99)  # the vectors take 384,000 bytes
    manifest = build_indexes(config, export=export, folder=tmp_path / "index")
    report = manifest.reports["opq_pq"]
    assert (manifest.served_index, {*manifest.reports}) == ("opq_pq", {"flat", "opq_pq"})
    assert report.size_bytes <= 200_000 < manifest.reports["flat"].size_bytes
    assert manifest.warning is not None
    assert manifest.warning.startswith(
        "no kind reaches a recall of 0.99 within max_bytes (0.2 MiB; too large: flat, hnsw); opq_pq has the highest, 0."
    )
    with pytest.raises(InputError, match=r"max_bytes is 9, but the smallest index of 3,000 items of width 32 takes .* bytes"):
        build_indexes(IndexConfig(served=Auto(max_bytes=9)), export=export, folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()


NUM_MANY_ITEMS = 10_000
"""Number of items for which `auto` tries all kinds, because the fixture `large_export` lowers MAX_SMALL_ITEMS."""
CHEAP_HNSW, CHEAP_OPQ = Hnsw(hnsw_m=8, ef_construction=20), OpqPq(nlist=64, pq_m=4, pq_nbits=4)


@pytest.fixture(scope="module")
def large_export(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExportManifest]:
    """An export of more than MAX_SMALL_ITEMS items, whose vectors are in clusters so that IVF reaches a high recall."""
    rng = np.random.default_rng(0)
    cluster_centres = rng.normal(size=(200, 8))
    vector_ID = cluster_centres[rng.integers(200, size=NUM_MANY_ITEMS)] + 0.4 * rng.normal(size=(NUM_MANY_ITEMS, 8))
    vector_ID /= np.linalg.norm(vector_ID, axis=1, keepdims=True)
    queries = vector_ID[rng.integers(NUM_MANY_ITEMS, size=(2, 60))] + 0.1 * rng.normal(size=(2, 60, 8))
    queries_by_split = {split: (range(60), query) for split, query in zip(("test", "validation"), queries, strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "MAX_SMALL_ITEMS", NUM_MANY_ITEMS - 1)
        yield write_export_stage(tmp_path_factory.mktemp("large") / "export", item_vectors=vector_ID, queries=queries_by_split)


def test_auto_serves_the_next_kind_if_the_best_is_too_large_for_the_memory(
    large_export: ExportManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpqPq, "OPQ_ITERATIONS", 1)
    config = IndexConfig(served=Auto(), compared=(CHEAP_HNSW,), recall_target=0.9, recall_k=20)
    unlimited_manifest = build_indexes(config, export=large_export, folder=tmp_path / "unlimited")
    measured_points = [(kind, point) for kind, report in unlimited_manifest.reports.items() for point in report.tried]
    assert {*unlimited_manifest.reports} == {"flat", "hnsw", "ivf_flat", "ivf_sq8", "pq_fastscan"}
    assert {kind for kind, _ in measured_points} == {*unlimited_manifest.reports} - {"flat"}
    assert unlimited_manifest.choice is not None and unlimited_manifest.warning is None
    assert unlimited_manifest.choice.startswith(f"{unlimited_manifest.served_index} has the least latency")
    served_parameters = {"nlist": None} | unlimited_manifest.reports[unlimited_manifest.served_index].parameters
    served_points = [
        point
        for kind, point in measured_points
        if kind == unlimited_manifest.served_index and point.parameters.items() <= served_parameters.items()
    ]
    assert served_points[0].recall >= 0.9
    assert served_points[0].ms_per_query == min(point.ms_per_query for _, point in measured_points if point.recall >= 0.9)
    plot_indexes(unlimited_manifest, tmp_path / "indexes.png")
    table = index_table(unlimited_manifest.reports, served_kind=unlimited_manifest.served_index, notes=unlimited_manifest.notes)
    assert unlimited_manifest.choice in table and table.count("| pq_fastscan |") > 4

    max_bytes = unlimited_manifest.reports[unlimited_manifest.served_index].size_bytes - 1
    limited_config = config.model_copy(update={"served": Auto(max_bytes=max_bytes), "compared": (CHEAP_HNSW, CHEAP_OPQ)})
    limited_manifest = build_indexes(limited_config, export=large_export, folder=tmp_path / "limited")
    assert limited_manifest.choice is not None
    names_of_too_large_kinds = limited_manifest.choice.partition("too large: ")[2].partition(")")[0]
    assert unlimited_manifest.served_index in names_of_too_large_kinds
    assert limited_manifest.served_index != unlimited_manifest.served_index
    assert limited_manifest.reports[limited_manifest.served_index].size_bytes <= max_bytes
    assert (tmp_path / "limited" / f"{limited_manifest.served_index}.faiss").is_file()


def test_auto_serves_the_best_kind_if_no_kind_within_the_memory_reaches_the_target(
    large_export: ExportManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpqPq, "OPQ_ITERATIONS", 1)
    max_bytes = NUM_MANY_ITEMS * 30  # a whole vector takes 32 bytes
    config = IndexConfig(served=Auto(max_bytes=max_bytes), compared=(CHEAP_OPQ,), recall_target=1.0, recall_k=20)
    manifest = build_indexes(config, export=large_export, folder=tmp_path / "index")
    recall_by_kind = {
        kind: max(point.recall for point in report.tried) for kind, report in manifest.reports.items() if report.tried
    }
    assert (manifest.served_index, {*recall_by_kind}) == ("ivf_sq8", {"ivf_sq8", "opq_pq"})
    assert recall_by_kind["opq_pq"] < recall_by_kind["ivf_sq8"] < 1
    expected_choice = (
        "no kind reaches a recall of 1 within max_bytes (0.3 MiB; too large: flat, hnsw, ivf_flat, pq_fastscan); "
        f"ivf_sq8 has the highest, {recall_by_kind['ivf_sq8']:.4f}"
    )
    assert manifest.warning == manifest.choice == expected_choice


@pytest.mark.parametrize("name", ["item_vectors.npy", "query_vectors_test.npy"])
def test_a_vector_that_is_not_finite_stops_the_stage(name: str, tmp_path: Path) -> None:
    vector_ID = np.ones((50, 8))
    vector_ID[17, 3] = np.nan if name == "item_vectors.npy" else 1
    query_BD = np.ones((20, 8))
    query_BD[17, 5] = np.inf if name == "query_vectors_test.npy" else 1
    export = write_export_stage(tmp_path / "export", item_vectors=vector_ID, queries={"test": (range(20), query_BD)})
    with pytest.raises(StageError, match=rf"{name}: the vector in row 17 is not finite: training diverged"):
        build_indexes(IndexConfig(), export=export, folder=tmp_path / "index")
    assert {path.name for path in tmp_path.iterdir()} == {"export"}


@pytest.mark.parametrize("value", [70_000.0, -65_505.0])
def test_a_value_that_overflows_half_precision_stops_only_indexes_that_rescore(value: float, tmp_path: Path) -> None:
    vector_ID = np.random.default_rng(0).normal(size=(400, 8))
    vector_ID[17, 3] = value
    vector_ID[18, 0] = 65_504.0
    export = write_export_stage(tmp_path / "export", item_vectors=vector_ID, queries={"test": (range(20), vector_ID[:20])})
    for kind in (PqFastScan(), IvfSq8(rescore=4)):
        message = rf"row 17 has the value {value:,.0f} in column 3, but the kind {kind.kind} with rescore .* up to 65,504; set"
        with pytest.raises(InputError, match=message):
            build_indexes(IndexConfig(served=kind), export=export, folder=tmp_path / "index")
    assert {path.name for path in tmp_path.iterdir()} == {"export"}
    for kind in (IvfSq8(), IvfPq(pq_m=4), PqFastScan(rescore=0)):
        manifest = build_indexes(IndexConfig(served=kind, recall_k=5), export=export, folder=tmp_path / kind.kind)
        index = _load_built_index(manifest, kind)
        score_BK, _ = search_exhaustively(index, vector_ID[:20], kind=kind.fitted(400, 8), depth=5)
        assert np.isfinite(score_BK).all()
    vector_ID[17, 3] = 65_504.0
    rescored_kind = IvfSq8(nlist=2, nprobe=2, rescore=4)
    score_BK, _ = search(build_index(rescored_kind, vector_ID.astype(np.float32)), vector_ID[:20], kind=rescored_kind, depth=5)
    assert np.isfinite(score_BK).all()


def test_a_gpu_builds_only_the_kinds_that_faiss_supports_on_gpus(
    export: ExportManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index in host memory replaces the index on the GPU, so that no GPU is needed."""
    monkeypatch.setattr(OpqPq, "OPQ_ITERATIONS", 1)
    moved_classes: list[str] = []
    clone_index = faiss.clone_index
    monkeypatch.setattr("recsys_core.retrieval.index.num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", lambda resources, device, index: clone_index(index), raising=False)
    monkeypatch.setattr(
        faiss, "index_gpu_to_cpu", lambda index: moved_classes.append(type(index).__name__) or clone_index(index), raising=False
    )
    item_vector_ID = np.load(export.path("item_vectors.npy"))
    for kind in (IvfFlat(), IvfSq8(), IvfPq(), IvfPq(rescore=2), IvfPq(pq_nbits=4), Hnsw(), OpqPq(), PqFastScan(pq_m=8)):
        fitted_kind = kind.fitted(*item_vector_ID.shape)
        index = build_index(fitted_kind, item_vector_ID)
        _, row_BI = search_exhaustively(index, item_vector_ID[:9], kind=fitted_kind, depth=len(item_vector_ID))
        assert (np.sort(row_BI, axis=1) == np.arange(len(item_vector_ID))).all()
        best_score_B = (item_vector_ID[:9] @ item_vector_ID.T).max(axis=1)
        assert (item_vector_ID[:9] * item_vector_ID[row_BI[:, 0]]).sum(axis=1) == pytest.approx(best_score_B, rel=0.3)
    assert moved_classes == ["IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ"]


@pytest.mark.skipif(num_gpus() == 0, reason="FAISS sees no GPU (faiss-gpu is not installed or no GPU is there)")
def test_an_index_has_nearly_the_same_recall_if_a_gpu_built_it(export: ExportManifest) -> None:
    query_BD, exact_row_BK = _exact_search(export, 10)
    item_vector_ID = np.load(export.path("item_vectors.npy"))
    for kind in (IvfFlat(nprobe=5), IvfSq8(nprobe=5), IvfPq(nprobe=5)):
        fitted_kind = kind.fitted(*item_vector_ID.shape)
        recalls = []
        for num_used_gpus in (num_gpus(), 0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("recsys_core.retrieval.index.num_gpus", lambda num_used_gpus=num_used_gpus: num_used_gpus)
                _, row_BK = search(build_index(fitted_kind, item_vector_ID), query_BD, kind=fitted_kind, depth=10)
            recalls.append(np.mean(_recall_by_query(row_BK, exact_row_BK)))
        assert recalls[0] == pytest.approx(recalls[1], abs=0.1)
