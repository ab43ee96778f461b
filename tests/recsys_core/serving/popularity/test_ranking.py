"""Popularity by segment: a request that has only a segment's feature value gets the most popular items of the segment."""

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.errors import StageError
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
    ExportedModel,
    ModelBuilder,
    PackagedModel,
)

COLUMN, KEY = "user.single", "user.single"
"""Column of a request, and key of the feature. They are equal because users and context both have a feature `single`."""

MIN_EVENTS = 50
"""Segments with fewer events have no ranking of their own."""


@pytest.fixture(scope="module")
def packaged_model(build_packaged_model: ModelBuilder) -> PackagedModel:
    return build_packaged_model(
        features=(*USER_FEATURES, *CONTEXT_FEATURES), item_files=ITEM_FILES, popularity_by=KEY, popularity_min_events=MIN_EVENTS
    )


def expected_item_counts(exported_model: ExportedModel) -> dict[int, Counter[str]]:
    """Return the number of training events of each item, by the table row of the user's feature value."""
    counts_by_row: dict[int, Counter[str]] = {row: Counter() for row in range(NUM_ROWS)}
    for user in range(NUM_USERS):
        row = int(exported_model.features.feature_by_key[KEY].table_rows[user])
        counts_by_row[row].update(ITEM_IDS[item] for item in exported_model.train[user])
    return counts_by_row


def test_an_unknown_user_with_a_value_gets_the_most_popular_items_of_its_segment(
    packaged_model: PackagedModel,
) -> None:
    exported_model, package = packaged_model
    retriever, counts_by_row = Retriever.load(package.folder), expected_item_counts(exported_model)
    large_segment_rows = [row for row in range(1, NUM_ROWS) if counts_by_row[row].total() >= MIN_EVENTS]
    assert len(large_segment_rows) > 1
    answers = retriever.recommend(
        [None] * len(large_segment_rows), k=8, features={COLUMN: [f"{KEY} {row}" for row in large_segment_rows]}
    )
    assert answers.fallbacks == ["popularity"] * len(large_segment_rows)
    for row, item_ids, scores in zip(large_segment_rows, answers.item_ids, answers.scores, strict=True):
        shares = sorted((count / counts_by_row[row].total() for count in counts_by_row[row].values()), reverse=True)[:8]
        assert scores.tolist() == pytest.approx(shares)
        assert [counts_by_row[row][item_id] / counts_by_row[row].total() for item_id in item_ids] == pytest.approx(shares)


def test_queries_without_a_large_segment_are_answered_as_without_segments(
    packaged_model: PackagedModel, build_packaged_model: ModelBuilder
) -> None:
    exported_model, package = packaged_model
    retriever, counts_by_row = Retriever.load(package.folder), expected_item_counts(exported_model)
    retriever_without_segments = Retriever.load(
        build_packaged_model(features=(*USER_FEATURES, *CONTEXT_FEATURES), item_files=ITEM_FILES).package.folder
    )
    small_segment_rows = [row for row in range(1, NUM_ROWS) if counts_by_row[row].total() < MIN_EVENTS]
    large_segment_value = f"{KEY} {next(row for row in range(1, NUM_ROWS) if row not in small_segment_rows)}"
    rows = [
        {"user_id": USER_IDS[5], COLUMN: large_segment_value},
        {"history": [ITEM_IDS[3]], COLUMN: large_segment_value},
        {COLUMN: large_segment_value, "context.single": "context.single 2"},
        {},
    ]
    request = {"rows": rows, "params": {"k": 7}}
    for answer, expected_answer in zip(respond(retriever, request), respond(retriever_without_segments, request), strict=True):
        assert (answer.item_ids, answer.fallback) == (expected_answer.item_ids, expected_answer.fallback)
    (expected_answer,) = respond(retriever_without_segments, {"rows": [{}], "params": {"k": 7}})
    values = ["never seen", *(f"{KEY} {row}" for row in small_segment_rows)]
    for answer in respond(retriever, {"rows": [{COLUMN: value} for value in values], "params": {"k": 7}}):
        assert (answer.item_ids, answer.scores, answer.fallback) == (
            expected_answer.item_ids,
            expected_answer.scores,
            "popularity",
        )


def test_an_answer_longer_than_its_segment_continues_with_overall_popular_items(
    packaged_model: PackagedModel,
) -> None:
    exported_model, package = packaged_model
    retriever, counts_by_row = Retriever.load(package.folder), expected_item_counts(exported_model)
    largest_row = max(range(1, NUM_ROWS), key=lambda row: counts_by_row[row].total())
    options = {"k": NUM_ITEMS, "features": {COLUMN: [f"{KEY} {largest_row}"]}}
    (answer,) = retriever.recommend([None], **options)  # type: ignore[arg-type]
    assert sorted(answer.item_ids) == sorted(ITEM_IDS)
    num_segment_items = len(counts_by_row[largest_row])
    assert {*answer.item_ids[:num_segment_items]} == {*counts_by_row[largest_row]}
    assert not any(answer.scores[num_segment_items:])
    (overall_answer,) = retriever.recommend([None], k=NUM_ITEMS)
    ids_outside_segment = [item_id for item_id in overall_answer.item_ids if item_id not in counts_by_row[largest_row]]
    assert answer.item_ids[num_segment_items:] == ids_outside_segment
    excluded_ids = answer.item_ids[:5]
    (filtered_answer,) = retriever.recommend([None], **options, exclude=excluded_ids, filter={"genre": "rock"})  # type: ignore[arg-type]
    genre_by_id = dict(zip(ITEM_IDS, ITEM_FILES["item_columns.parquet"]["genre"].to_pylist(), strict=False))
    assert filtered_answer.item_ids == [
        item_id for item_id in answer.item_ids if genre_by_id.get(item_id) == "rock" and item_id not in excluded_ids
    ]


def test_golden_queries_cover_the_segments(packaged_model: PackagedModel) -> None:
    golden = GoldenQueries.model_validate_json((packaged_model.package.folder / "package" / "golden.json").read_bytes())
    answers = [
        answer
        for request in golden.requests
        for row, answer in zip(request.request.get("rows", []), request.answers, strict=False)
        if row.keys() == {COLUMN}
    ]
    assert len(answers) > 1 and len({answer.item_ids for answer in answers}) == len(answers)  # one for each segment


def test_without_a_large_segment_the_popular_items_of_all_users_are_the_answer(build_packaged_model: ModelBuilder) -> None:
    package = build_packaged_model(features=USER_FEATURES, popularity_by=KEY, popularity_min_events=10**9).package
    retriever = Retriever.load(package.folder)
    (overall_answer,) = retriever.recommend([None], k=7)
    (answer,) = retriever.recommend([None], k=7, features={"single": [f"{KEY} 2"]})
    assert answer == overall_answer and answer.fallback == "popularity"


def test_segments_with_unknown_items_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "popularity_by.parquet"
    pq.write_table(pa.table({"value_row": [1], "item_rows": [[0, 5]], "shares": [[0.5, 0.1]]}), path)
    assert Segments.read(path, key=KEY, num_items=6).segments_of({}, num_queries=2).tolist() == [-1, -1]
    with pytest.raises(StageError, match=r"popularity_by.parquet has 2 items and 2 shares, .* from 0 to 4"):
        Segments.read(path, key=KEY, num_items=5)
