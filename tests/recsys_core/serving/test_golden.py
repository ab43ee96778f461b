"""A package whose answers differ from those of its golden queries is refused, even if all its checksums match."""

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
from recsys_core.serving.golden import GoldenAnswer, GoldenQueries, _difference
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import CONTEXT_FEATURES, ITEM_FILES, USER_FEATURES, Build
from tests.recsys_core.serving.test_contents import describe, rehash


@pytest.fixture(scope="module")
def package_manifest(build: Build) -> PackageManifest:
    return build(index="hnsw", features=(*USER_FEATURES, *CONTEXT_FEATURES), item_files=ITEM_FILES)[1]


@pytest.fixture
def copy(package_manifest: PackageManifest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(package_manifest.folder / "package", tmp_path / "package"))


def swap_index(copy: Path, other: Path) -> None:
    shutil.copyfile(other / "index.faiss", copy / "index.faiss")
    rehash(copy, "index.faiss")


def swap_tower(copy: Path, other: Path) -> None:
    shutil.copyfile(other / "tower.safetensors", copy / "tower.safetensors")
    rehash(copy, "tower.safetensors")


def swap_items(copy: Path, other: Path) -> None:
    shutil.copyfile(other / "items.parquet", copy / "items.parquet")
    rehash(copy, "items.parquet")


def reverse_ids(copy: Path, other: Path) -> None:
    items = pq.read_table(copy / "items.parquet")
    ids = items["item_id"].combine_chunks().take(np.arange(len(items))[::-1].copy())
    pq.write_table(items.set_column(0, items.schema.field("item_id"), ids), copy / "items.parquet")
    rehash(copy, "items.parquet")


def reverse_popularity(copy: Path, other: Path) -> None:
    np.save(copy / "popularity.npy", np.load(copy / "popularity.npy")[::-1])
    rehash(copy, "popularity.npy")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            swap_index,
            "golden.json: row 0 of the request .* is expected; the query tower, the index and the ids",
        ),
        (swap_tower, "tower.safetensors: the file has the space_id .*: query tower and items are of different versions"),
        (swap_items, "items.parquet: the file has the space_id .*: query tower and items are of different versions"),
        (reverse_ids, "golden.json: row 0 of the request"),
        (reverse_popularity, "golden.json: row 8 of the request"),
    ],
)
def test_parts_of_another_version_are_refused(
    copy: Path, build: Build, change: Callable[[Path, Path], None], message: str
) -> None:
    features = (*USER_FEATURES, *CONTEXT_FEATURES)
    other = build(index="hnsw", features=features, item_files=ITEM_FILES, similarity="dot")[1]
    change(copy, other.folder / "package")
    with pytest.raises(StageError, match=message):
        Retriever.load(copy)
    if message.startswith("golden"):
        Retriever.load(copy, verify=False)


def test_a_changed_expectation_or_space_is_refused(copy: Path) -> None:
    golden = json.loads((copy / "golden.json").read_bytes())
    golden["requests"][0]["answers"][2]["scores"][0] += 0.1
    (copy / "golden.json").write_text(json.dumps(golden))
    rehash(copy, "golden.json")
    with pytest.raises(StageError, match=r"golden.json: row 2 of the request \{'rows': .* but the score .* is expected"):
        Retriever.load(copy)
    (copy / "golden.json").write_text("{}")
    rehash(copy, "golden.json")
    with pytest.raises(StageError, match=r"golden.json: cannot be read"):
        Retriever.load(copy)
    describe(copy, lambda described: described.update(space_id="other"))
    with pytest.raises(StageError, match=r"tower.safetensors: the file has the space_id \w+, but the package has other"):
        Retriever.load(copy)


def test_every_kind_of_request_is_compared(package_manifest: PackageManifest) -> None:
    golden = GoldenQueries.model_validate_json((package_manifest.folder / "package" / "golden.json").read_bytes())
    answers = [answer for request in golden.requests for answer in request.answers]
    assert len(answers) >= 32
    assert {answer.fallback for answer in answers} == {None, "history", "popularity"}
    assert sum(1 for request in golden.requests if "filter" in request.request["params"]) == 1
    assert sum(1 for request in golden.requests if "item_id" in request.request.get("inputs", {})) == 1


def test_items_with_nearly_equal_scores_may_change_places() -> None:
    def difference(item_ids: list[int], scores: list[float], **fields: Any) -> str | None:
        expected = GoldenAnswer(item_ids=(1, 2, 3), scores=(0.9, 0.5, 0.4999), fallback=None)
        return _difference(Answer(item_ids, scores, "", "", **fields), expected)

    assert difference([1, 3, 2], [0.9, 0.5, 0.4999]) is None
    assert difference([1, 2, 4], [0.9, 0.5, 0.4999]) is None
    assert "item 1 has no place in the answer" in str(difference([4, 2, 3], [0.9, 0.5, 0.4999]))
    assert "item 1 has the score 0.5" in str(difference([2, 1, 3], [0.9, 0.5, 0.4999]))
    assert "the answer has 2 items" in str(difference([1, 2], [0.9, 0.5]))
    assert "the answer has nothing" not in str(difference([1, 2, 3], [0.9, 0.5, 0.4999]))
    assert "the answer has 3 items from popularity" in str(difference([1, 2, 3], [0.9, 0.5, 0.4999], fallback="popularity"))
    assert "the score nan" in str(difference([1, 2, 3], [float("nan")] * 3))
