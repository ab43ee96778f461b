"""Rejection of a package whose answers to the golden queries differ from the stored answers, although all checksums match."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from recsys_core.errors import StageError
from recsys_core.manifests import PackageManifest
from recsys_core.serving.answers import Answer
from recsys_core.serving.golden import GoldenAnswer, GoldenQueries, _difference_text
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import CONTEXT_FEATURES, ITEM_FILES, USER_FEATURES, ModelBuilder
from tests.recsys_core.serving.test_contents import edit_description, update_record


@pytest.fixture(scope="module")
def package_manifest(build_packaged_model: ModelBuilder) -> PackageManifest:
    return build_packaged_model(index_kind="hnsw", features=(*USER_FEATURES, *CONTEXT_FEATURES), item_files=ITEM_FILES).package


@pytest.fixture
def package_copy(package_manifest: PackageManifest, tmp_path: Path) -> Path:
    """A copy of the package folder, which a test may change."""
    return Path(shutil.copytree(package_manifest.folder / "package", tmp_path / "package"))


def replace_index(package_copy: Path, other_folder: Path) -> None:
    shutil.copyfile(other_folder / "index.faiss", package_copy / "index.faiss")
    update_record(package_copy, "index.faiss")


def replace_tower(package_copy: Path, other_folder: Path) -> None:
    shutil.copyfile(other_folder / "tower.safetensors", package_copy / "tower.safetensors")
    update_record(package_copy, "tower.safetensors")


def replace_items(package_copy: Path, other_folder: Path) -> None:
    shutil.copyfile(other_folder / "items.parquet", package_copy / "items.parquet")
    update_record(package_copy, "items.parquet")


def reverse_ids(package_copy: Path, other_folder: Path) -> None:
    items = pq.read_table(package_copy / "items.parquet")
    ids = items["item_id"].combine_chunks().take(np.arange(len(items))[::-1].copy())
    pq.write_table(items.set_column(0, items.schema.field("item_id"), ids), package_copy / "items.parquet")
    update_record(package_copy, "items.parquet")


def reverse_popularity(package_copy: Path, other_folder: Path) -> None:
    np.save(package_copy / "popularity.npy", np.load(package_copy / "popularity.npy")[::-1])
    update_record(package_copy, "popularity.npy")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_index, "golden.json: row 0 of the request .* is expected; the query tower, the index and the ids"),
        (replace_tower, "tower.safetensors: the file has the space_id .*: query tower and items are of different versions"),
        (replace_items, "items.parquet: the file has the space_id .*: query tower and items are of different versions"),
        (reverse_ids, "golden.json: row 0 of the request"),
        (reverse_popularity, "golden.json: row 8 of the request"),  # the first row without a history
    ],
)
def test_a_file_of_another_version_or_in_another_order_is_rejected(
    package_copy: Path, build_packaged_model: ModelBuilder, change: Callable[[Path, Path], None], message: str
) -> None:
    features = (*USER_FEATURES, *CONTEXT_FEATURES)
    other_manifest = build_packaged_model(index_kind="hnsw", features=features, item_files=ITEM_FILES, similarity="dot").package
    change(package_copy, other_manifest.folder / "package")
    with pytest.raises(StageError, match=message):
        Retriever.load(package_copy)
    if message.startswith("golden"):
        Retriever.load(package_copy, verify=False)


def test_a_changed_golden_answer_or_space_id_is_rejected(package_copy: Path) -> None:
    golden = json.loads((package_copy / "golden.json").read_bytes())
    golden["requests"][0]["answers"][2]["scores"][0] += 0.1
    (package_copy / "golden.json").write_text(json.dumps(golden))
    update_record(package_copy, "golden.json")
    with pytest.raises(StageError, match=r"golden.json: row 2 of the request \{'rows': .* but the score .* is expected"):
        Retriever.load(package_copy)
    (package_copy / "golden.json").write_text("{}")
    update_record(package_copy, "golden.json")
    with pytest.raises(StageError, match=r"golden.json: cannot be read"):
        Retriever.load(package_copy)
    edit_description(package_copy, lambda description: description.update(space_id="other"))
    with pytest.raises(StageError, match=r"tower.safetensors: the file has the space_id \w+, but the package has other"):
        Retriever.load(package_copy)


def test_golden_queries_cover_every_kind_of_request(package_manifest: PackageManifest) -> None:
    golden = GoldenQueries.model_validate_json((package_manifest.folder / "package" / "golden.json").read_bytes())
    answers = [answer for request in golden.requests for answer in request.answers]
    assert len(answers) >= 32
    assert {answer.fallback for answer in answers} == {None, "history", "popularity"}
    assert sum("filter" in request.request["params"] for request in golden.requests) == 1
    assert sum("item_id" in request.request.get("inputs", {}) for request in golden.requests) == 1


def test_only_items_with_nearly_equal_scores_may_change_places() -> None:
    expected_scores = [0.9, 0.5, 0.4999]

    def difference(item_ids: list[int], scores: list[float], **fields: Any) -> str | None:
        expected = GoldenAnswer(item_ids=(1, 2, 3), scores=tuple(expected_scores), fallback=None)
        return _difference_text(Answer(item_ids, scores, "", "", **fields), expected)

    assert difference([1, 2, 3], expected_scores) is None
    assert difference([1, 3, 2], expected_scores) is None
    assert difference([1, 2, 4], expected_scores) is None  # item 4 may have nearly the score of item 3
    assert "item 1 has no place in the answer" in str(difference([4, 2, 3], expected_scores))
    assert "item 1 has the score 0.5" in str(difference([2, 1, 3], expected_scores))
    assert "the answer has 2 items" in str(difference([1, 2], [0.9, 0.5]))
    assert "the answer has 3 items from popularity" in str(difference([1, 2, 3], expected_scores, fallback="popularity"))
    assert "the score nan" in str(difference([1, 2, 3], [float("nan")] * 3))
