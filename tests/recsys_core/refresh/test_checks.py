"""Checks of a refreshed package: they fail for a broken index, a query tower of another version, and items in another order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from recsys_core.manifests import record_file
from recsys_core.refresh import checks, package
from recsys_core.refresh.checks import Check, check_package
from recsys_core.refresh.config import RefreshConfig
from recsys_core.refresh.refresh import Refreshed
from recsys_core.retrieval.index import build_index
from recsys_core.retrieval.measure import MeasuredQueries
from recsys_core.serving.contents import PackageContents, read_package
from recsys_core.serving.description import DESCRIPTION_NAME, description_sha256
from tests.recsys_core.refresh.refreshed import TableWriter, package_folder_of, refresh_small
from tests.recsys_core.refresh.small_pipeline import ITEMS, SmallPipeline, build_pipeline, write_items, write_vectors

CHECK_METRICS = ["golden_queries", "golden_equal_vectors", "golden_overlap", "index_recall_users", "index_recall_items"]


def failed_metrics(package_checks: tuple[Check, ...]) -> list[str]:
    return [check.metric for check in package_checks if not check.is_passed]


def check_again(parent: SmallPipeline, refresh_result: Refreshed, **changed_contents: Any) -> tuple[Check, ...]:
    """Check a refreshed package again, with the fields `changed_contents` of its PackageContents replaced."""
    sha256 = record_file(parent.package_folder / DESCRIPTION_NAME).sha256
    return check_package(
        read_package(parent.package_folder, sha256=sha256),
        replace(contents_of(refresh_result), **changed_contents),
        refresh_result.changes,
        parent_folder=parent.package_folder,
        config=RefreshConfig(),
    )


@pytest.fixture
def refresh_result(parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path) -> Refreshed:
    """A refresh with 10 removed and 20 new items."""
    write_tables(range(1010, 1320))
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None
    return refresh_result


def contents_of(refresh_result: Refreshed) -> PackageContents:
    return read_package(package_folder_of(refresh_result), sha256=description_sha256(refresh_result.package))


def test_a_refresh_with_an_exact_index_has_recall_1_and_overlap_1(refresh_result: Refreshed) -> None:
    assert [check.metric for check in refresh_result.checks] == CHECK_METRICS
    value_by_metric = {check.metric: check.value for check in refresh_result.checks}
    assert value_by_metric.pop("golden_queries") > 20
    assert set(value_by_metric.values()) == {1.0} and refresh_result.problems == ()


def test_an_index_with_items_in_another_order_is_refused(parent: SmallPipeline, refresh_result: Refreshed) -> None:
    index = contents_of(refresh_result).index
    permuted_row_I = np.random.default_rng(7).permutation(index.ntotal)
    vector_ID = faiss.rev_swig_ptr(faiss.downcast_index(index.index).get_xb(), index.ntotal * index.d).reshape(-1, index.d)
    permuted_index = faiss.IndexIDMap(faiss.IndexFlatIP(index.d))
    permuted_index.add_with_ids(vector_ID, permuted_row_I)
    package_checks = check_again(parent, refresh_result, index=permuted_index)
    assert failed_metrics(package_checks) == CHECK_METRICS[1:]
    assert "recall@100 of the index for the vectors of users: " in str(
        package_checks[CHECK_METRICS.index("index_recall_users")]
    )


def test_an_index_with_zeros_in_place_of_the_vectors_of_new_items_is_refused(
    parent: SmallPipeline, refresh_result: Refreshed
) -> None:
    contents, num_remaining_items = contents_of(refresh_result), len(refresh_result.changes.kept_row_I)
    vector_ID = package.read_item_vectors(contents, np.arange(contents.package.model.num_items))
    vector_ID[num_remaining_items:] = 0
    index = build_index(contents.package.index, vector_ID)
    assert "index_recall_items" in failed_metrics(check_again(parent, refresh_result, index=index))


def test_the_checks_search_all_new_items_or_all_items_if_no_item_is_new(
    parent: SmallPipeline,
    refresh_result: Refreshed,
    write_tables: TableWriter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched_vectors: list[np.ndarray] = []
    with_exact_results = MeasuredQueries.with_exact_results

    def record_queries(query_BD: np.ndarray, **arguments: Any) -> MeasuredQueries:
        searched_vectors.append(query_BD)
        return with_exact_results(query_BD, **arguments)

    monkeypatch.setattr(MeasuredQueries, "with_exact_results", record_queries)
    check_again(parent, refresh_result)
    write_tables(range(1010, 1300))
    refresh_without_new_items = refresh_small(parent, tmp_path / "only removed")
    assert refresh_without_new_items is not None
    # The checks of a refresh search four times: users and items of the parent, then users and items of the refreshed package.
    for each_refresh, searched_vector_ND, num_expected_items in (
        (refresh_result, searched_vectors[3], 20),
        (refresh_without_new_items, searched_vectors[7], 290),
    ):
        contents = contents_of(each_refresh)
        vector_ID = package.read_item_vectors(contents, np.arange(contents.package.model.num_items))
        expected_vectors = vector_ID[-num_expected_items:]
        np.testing.assert_array_equal(np.sort(searched_vector_ND, axis=0), np.sort(expected_vectors, axis=0))


def test_a_single_new_item_in_an_index_of_compressed_vectors_passes_the_checks(tmp_path: Path) -> None:
    input_folder = tmp_path / "files"
    parent = build_pipeline(input_folder, index="ivf_sq8", item_vectors="none")
    write_vectors(input_folder, [*ITEMS, 1300])
    write_items(input_folder, [*ITEMS, 1300])
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.problems == ()


def test_a_query_tower_of_another_version_is_refused(parent: SmallPipeline, refresh_result: Refreshed) -> None:
    tower = contents_of(refresh_result).tower
    with torch.no_grad():
        for parameter in tower.dense.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    assert "golden_equal_vectors" in failed_metrics(check_again(parent, refresh_result, tower=tower))


def test_golden_queries_with_a_removed_item_are_left_out(
    parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path
) -> None:
    # A refresh needs a change: the first refresh changes a title, the second removes items.
    num_all_queries = _num_golden_queries(parent, tmp_path / "title", write_tables, title={1000: "new"})
    num_remaining_queries = _num_golden_queries(parent, tmp_path / "removed", write_tables, vector_ids=range(1000, 1260))
    assert 0 < num_remaining_queries < num_all_queries


def test_golden_queries_with_a_filter_are_left_out_if_other_items_may_satisfy_the_filter(
    parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path
) -> None:
    num_all_queries = _num_golden_queries(parent, tmp_path / "new items", write_tables, vector_ids=range(1000, 1600))
    write_tables(genre=dict.fromkeys(ITEMS, "unseen"), in_stock={item_id: item_id % 6 == 0 for item_id in ITEMS})
    refresh_result = refresh_small(parent, tmp_path / "filters")
    assert refresh_result is not None
    value_by_metric = {check.metric: check.value for check in refresh_result.checks}
    assert 0 < value_by_metric["golden_queries"] < num_all_queries
    assert value_by_metric["golden_overlap"] == value_by_metric["golden_equal_vectors"] == 1


def _num_golden_queries(parent: SmallPipeline, folder: Path, write_tables: TableWriter, **table_changes: Any) -> float:
    """Refresh with changed tables, and return the number of golden queries that the checks compare."""
    write_tables(**table_changes)
    refresh_result = refresh_small(parent, folder)
    assert refresh_result is not None and refresh_result.problems == ()
    value_by_metric = {check.metric: check.value for check in refresh_result.checks}
    assert value_by_metric["golden_overlap"] == 1  # new items are excluded
    return value_by_metric["golden_queries"]


def test_the_recall_is_compared_with_the_recall_of_the_parent_and_not_with_a_target(tmp_path: Path) -> None:
    input_folder = tmp_path / "files"
    parent = build_pipeline(input_folder, index={"kind": "ivf_flat", "nlist": 6, "nprobe": 1})
    item_ids = [*ITEMS, 1300, 1301]
    write_vectors(input_folder, item_ids)
    write_items(input_folder, item_ids)
    refresh_result = refresh_small(parent, tmp_path / "new", max_recall_drop=0.3, min_golden_overlap=0.2)
    assert refresh_result is not None
    recall_checks = [check for check in refresh_result.checks if check.metric.startswith("index_recall")]
    assert all(check.value < 0.7 for check in recall_checks), recall_checks  # a search reads one of six lists
    assert refresh_result.problems == (), refresh_result.checks


def test_a_sample_has_distinct_queries_up_to_a_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_QUERIES", 3)
    sampled_rows = checks._sample_rows(np.arange(10))
    assert len(sampled_rows) == 3 and len({*sampled_rows.tolist()}) == 3
