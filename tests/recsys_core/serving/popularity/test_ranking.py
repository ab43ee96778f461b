"""A request with nothing but a value of the feature of the segments gets the most popular items of the segment."""

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.errors import StageError
from recsys_core.manifests import PackageManifest
from recsys_core.serving.golden import GoldenQueries
from recsys_core.serving.popularity.ranking import Segments
from recsys_core.serving.requests import respond
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.ingest.random_features import NUM_ROWS
from tests.recsys_core.serving.conftest import (
    CONTEXT_FEATURES,
    ITEM_FILES,
    ITEM_IDS,
    NUM_ITEMS,
    NUM_USERS,
    USER_FEATURES,
    USER_IDS,
    Build,
    ExportedModel,
)

COLUMN, KEY = "user.single", "user.single"
"""Both sides have a feature called single."""


@pytest.fixture(scope="module")
def built(build: Build) -> tuple[ExportedModel, PackageManifest]:
    return build(features=(*USER_FEATURES, *CONTEXT_FEATURES), item_files=ITEM_FILES, popularity_by=KEY)


def expected_counts(exported_model: ExportedModel) -> dict[int, Counter[str]]:
    counts: dict[int, Counter[str]] = {row: Counter() for row in range(NUM_ROWS)}
    for user in range(NUM_USERS):
        row = int(exported_model.features.feature_by_key[KEY].table_rows[user])
        counts[row].update(ITEM_IDS[item] for item in exported_model.train[user])
    return counts


def test_an_unknown_user_with_a_value_gets_the_most_popular_items_of_its_segment(
    built: tuple[ExportedModel, PackageManifest],
) -> None:
    exported_model, package = built
    retriever, counts = Retriever.load(package.folder), expected_counts(exported_model)
    large = [row for row in range(1, NUM_ROWS) if counts[row].total() >= 50]
    assert len(large) > 1
    answers = retriever.recommend([None] * len(large), k=8, features={COLUMN: [f"{KEY} {row}" for row in large]})
    assert answers.fallbacks == ["popularity"] * len(large)
    for row, item_ids, scores in zip(large, answers.item_ids, answers.scores, strict=True):
        shares = sorted((count / counts[row].total() for count in counts[row].values()), reverse=True)[:8]
        assert scores.tolist() == pytest.approx(shares)
        assert [counts[row][item_id] / counts[row].total() for item_id in item_ids] == pytest.approx(shares)


def test_other_queries_are_answered_as_without_segments(built: tuple[ExportedModel, PackageManifest], build: Build) -> None:
    exported_model, package = built
    retriever, counts = Retriever.load(package.folder), expected_counts(exported_model)
    without_segments = Retriever.load(build(features=(*USER_FEATURES, *CONTEXT_FEATURES), item_files=ITEM_FILES)[1].folder)
    small_segment_rows = [row for row in range(1, NUM_ROWS) if counts[row].total() < 50]
    value = f"{KEY} {next(row for row in range(1, NUM_ROWS) if row not in small_segment_rows)}"
    rows = [
        {"user_id": USER_IDS[5], COLUMN: value},
        {"history": [ITEM_IDS[3]], COLUMN: value},
        {COLUMN: value, "context.single": "context.single 2"},
        {},
    ]
    request = {"rows": rows, "params": {"k": 7}}
    for answer, expected in zip(respond(retriever, request), respond(without_segments, request), strict=True):
        assert (answer.item_ids, answer.fallback) == (expected.item_ids, expected.fallback)
    (everyone,) = respond(without_segments, {"rows": [{}], "params": {"k": 7}})
    values = ["never seen", *(f"{KEY} {row}" for row in small_segment_rows)]
    for answer in respond(retriever, {"rows": [{COLUMN: value} for value in values], "params": {"k": 7}}):
        assert (answer.item_ids, answer.scores, answer.fallback) == (everyone.item_ids, everyone.scores, "popularity")


def test_an_answer_longer_than_the_segment_continues_with_the_items_of_all_users(
    built: tuple[ExportedModel, PackageManifest],
) -> None:
    exported_model, package = built
    retriever, counts = Retriever.load(package.folder), expected_counts(exported_model)
    row = max(range(1, NUM_ROWS), key=lambda row: counts[row].total())
    query = {"k": NUM_ITEMS, "features": {COLUMN: [f"{KEY} {row}"]}}
    (answer,) = retriever.recommend([None], **query)  # type: ignore[arg-type]
    assert sorted(answer.item_ids) == sorted(ITEM_IDS)
    assert {*answer.item_ids[: len(counts[row])]} == {*counts[row]} and not any(answer.scores[len(counts[row]) :])
    (everyone,) = retriever.recommend([None], k=NUM_ITEMS)
    assert answer.item_ids[len(counts[row]) :] == [item for item in everyone.item_ids if item not in counts[row]]
    excluded = answer.item_ids[:5]
    (allowed,) = retriever.recommend([None], **query, exclude=excluded, filter={"genre": "rock"})  # type: ignore[arg-type]
    genre = dict(zip(ITEM_IDS, ITEM_FILES["item_columns.parquet"]["genre"].to_pylist(), strict=False))
    assert allowed.item_ids == [item for item in answer.item_ids if genre.get(item) == "rock" and item not in excluded]


def test_golden_queries_cover_the_segments(built: tuple[ExportedModel, PackageManifest]) -> None:
    golden = GoldenQueries.model_validate_json((built[1].folder / "package" / "golden.json").read_bytes())
    answers = [
        answer
        for request in golden.requests
        for row, answer in zip(request.request.get("rows", []), request.answers, strict=False)
        if row.keys() == {COLUMN}
    ]
    assert len(answers) > 1 and len({answer.item_ids for answer in answers}) == len(answers)


def test_a_package_without_a_segment_that_is_large_enough_ranks_the_items_of_all_users(build: Build) -> None:
    package = build(features=USER_FEATURES, popularity_by=KEY, popularity_min_events=10**9)[1]
    retriever = Retriever.load(package.folder)
    (everyone,) = retriever.recommend([None], k=7)
    (answer,) = retriever.recommend([None], k=7, features={"single": [f"{KEY} 2"]})
    assert answer == everyone and answer.fallback == "popularity"


def test_segments_with_unknown_items_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "popularity_by.parquet"
    pq.write_table(pa.table({"value_row": [1], "item_rows": [[0, 5]], "shares": [[0.5, 0.1]]}), path)
    assert Segments.read(path, key=KEY, num_items=6).segment_of({}, num_queries=2).tolist() == [-1, -1]
    with pytest.raises(StageError, match=r"popularity_by.parquet: the items do not match their shares or the 5 items"):
        Segments.read(path, key=KEY, num_items=5)
