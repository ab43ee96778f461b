"""The checks find a broken index, a query tower of another version, and items in another order."""

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
from recsys_core.serving.contents import PackageContents, read_package
from recsys_core.serving.description import DESCRIPTION_NAME, description_sha256
from tests.recsys_core.refresh.refreshed import Tables, folder_of, refresh_small
from tests.recsys_core.refresh.small_pipeline import ITEMS, SmallPipeline, build_pipeline, write_items, write_vectors

METRICS = ["golden_queries", "golden_equal_vectors", "golden_overlap", "index_recall_users", "index_recall_items"]


def failed(found: tuple[Check, ...]) -> list[str]:
    return [check.metric for check in found if not check.is_passed]


def check_again(parent: SmallPipeline, refresh_result: Refreshed, **changes: Any) -> tuple[Check, ...]:
    """Check a refreshed package again, with other contents."""
    sha256 = record_file(parent.package_folder / DESCRIPTION_NAME).sha256
    contents = read_package(folder_of(refresh_result), sha256=description_sha256(refresh_result.package))
    return check_package(
        read_package(parent.package_folder, sha256=sha256),
        replace(contents, **changes),
        refresh_result.changes,
        parent_folder=parent.package_folder,
        config=RefreshConfig(),
    )


@pytest.fixture
def refresh_result(parent: SmallPipeline, tables: Tables, tmp_path: Path) -> Refreshed:
    tables(range(1010, 1320))
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None
    return refresh_result


def contents_of(refresh_result: Refreshed) -> PackageContents:
    return read_package(folder_of(refresh_result), sha256=description_sha256(refresh_result.package))


def test_an_exact_index_has_the_recall_and_the_answers_of_its_parent(refresh_result: Refreshed) -> None:
    assert [check.metric for check in refresh_result.checks] == METRICS
    values = {check.metric: check.value for check in refresh_result.checks}
    assert values.pop("golden_queries") > 20
    assert set(values.values()) == {1.0} and refresh_result.problems == ()


def test_an_index_of_items_in_another_order_is_refused(parent: SmallPipeline, refresh_result: Refreshed) -> None:
    index = contents_of(refresh_result).index
    order = np.random.default_rng(7).permutation(index.ntotal)
    vectors = faiss.rev_swig_ptr(faiss.downcast_index(index.index).get_xb(), index.ntotal * index.d).reshape(-1, index.d)
    broken = faiss.IndexIDMap(faiss.IndexFlatIP(index.d))
    broken.add_with_ids(vectors, order)
    found = check_again(parent, refresh_result, index=broken)
    assert failed(found) == METRICS[1:]
    assert "recall@100 of the index for the vectors of users: " in str(found[3])


def test_an_index_without_the_new_items_is_refused(parent: SmallPipeline, refresh_result: Refreshed) -> None:
    contents, num_kept = contents_of(refresh_result), len(refresh_result.changes.kept_row_I)
    vector_ID = package.read_item_vectors(contents, np.arange(contents.package.model.num_items))
    vector_ID[num_kept:] = 0
    index = build_index(contents.package.index, vector_ID)
    assert "index_recall_items" in failed(check_again(parent, refresh_result, index=index))


def test_a_query_tower_of_another_version_is_refused(parent: SmallPipeline, refresh_result: Refreshed) -> None:
    tower = contents_of(refresh_result).tower
    with torch.no_grad():
        for parameter in tower.dense.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    assert "golden_equal_vectors" in failed(check_again(parent, refresh_result, tower=tower))


def test_golden_queries_with_an_item_that_left_are_left_out(parent: SmallPipeline, tables: Tables, tmp_path: Path) -> None:
    tables()
    num_all = _num_golden(parent, tmp_path / "title", tables, title={1000: "new"})
    tables()
    num_fewer = _num_golden(parent, tmp_path / "left", tables, vectors=range(1000, 1260))
    assert 0 < num_fewer < num_all


def _num_golden(parent: SmallPipeline, folder: Path, tables: Tables, **tables_of_today: Any) -> float:
    tables(**tables_of_today)
    refresh_result = refresh_small(parent, folder)
    assert refresh_result is not None and refresh_result.problems == ()
    return refresh_result.checks[0].value


def test_the_recall_is_compared_with_that_of_the_parent_and_not_with_a_target(tmp_path: Path) -> None:
    files = tmp_path / "files"
    parent = build_pipeline(files, index={"kind": "ivf_flat", "nlist": 6, "nprobe": 1})
    ids = [*ITEMS, 1300, 1301]
    write_vectors(files, ids)
    write_items(files, ids)
    refresh_result = refresh_small(parent, tmp_path / "new", max_recall_drop=0.3, min_golden_overlap=0.2)
    assert refresh_result is not None
    recalls = refresh_result.checks[3:]
    assert all(check.value < 0.7 for check in recalls), recalls
    assert refresh_result.problems == (), refresh_result.checks


def test_the_samples_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_QUERIES", 3)
    sample = checks._sample_rows(np.arange(10))
    assert len(sample) == 3 and len({*sample.tolist()}) == 3
