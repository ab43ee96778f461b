"""A refresh: new items get vectors from the trained tower, missing items are removed, and no other vector changes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recsys_core.errors import StageError
from recsys_core.ingest import InputConfig
from recsys_core.retrieval.search import decoded_vectors, map_index, stored_vectors
from recsys_core.serving.description import DESCRIPTION_NAME
from recsys_core.serving.items import Filter
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.ingest.parquet_files import raises_input_error
from tests.recsys_core.refresh.refreshed import TableWriter, package_folder_of, refresh_small, vector_by_id, vector_bytes_by_id
from tests.recsys_core.refresh.small_pipeline import (
    FEATURES,
    ITEMS,
    SmallPipeline,
    build_pipeline,
    inputs_of,
    write_items,
    write_vectors,
)

REMOVED_IDS = range(1200, 1220)
"""Items with events, which tests remove from the tables."""
REMAINING_IDS = [item_id for item_id in ITEMS if item_id not in REMOVED_IDS]


def test_items_that_come_back_get_the_vectors_of_the_trained_tower(
    parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path
) -> None:
    trained_vectors = vector_by_id(parent.package_folder)
    write_tables(REMAINING_IDS)
    smaller_package_folder = package_folder_of(refresh_small(parent, tmp_path / "without"))
    assert not {*REMOVED_IDS} & {*vector_bytes_by_id(smaller_package_folder)}
    write_tables(reversed(ITEMS))
    refresh_result = refresh_small(parent, tmp_path / "with", package_folder=smaller_package_folder)
    refreshed_folder = package_folder_of(refresh_result)
    assert refresh_result is not None and refresh_result.changes.counts == {"added": 20, "removed": 0, "changed": 0}
    assert refresh_result.problems == ()
    for item_id in REMOVED_IDS:
        np.testing.assert_allclose(vector_by_id(refreshed_folder)[item_id], trained_vectors[item_id], atol=1e-5)
    assert list(vector_bytes_by_id(refreshed_folder))[-20:] == list(REMOVED_IDS)


def test_an_ensemble_gives_new_items_the_vectors_of_all_members(tmp_path: Path) -> None:
    parent = build_pipeline(tmp_path / "parent", model={"num_members": 2, "history": {"learn_offsets": True}})
    trained_vectors = vector_by_id(parent.package_folder)
    write_vectors(parent.input_folder, REMAINING_IDS)
    write_items(parent.input_folder, REMAINING_IDS)
    smaller_package_folder = package_folder_of(refresh_small(parent, tmp_path / "without"))
    write_vectors(parent.input_folder, ITEMS)
    write_items(parent.input_folder, ITEMS)
    refresh_result = refresh_small(parent, tmp_path / "with", package_folder=smaller_package_folder)
    assert refresh_result is not None and refresh_result.changes.counts == {"added": 20, "removed": 0, "changed": 0}
    refreshed_vectors = vector_by_id(package_folder_of(refresh_result))
    for item_id in REMOVED_IDS:
        assert len(refreshed_vectors[item_id]) == 2 * 8  # two members of width 8
        np.testing.assert_allclose(refreshed_vectors[item_id], trained_vectors[item_id], atol=1e-5)


@pytest.mark.parametrize("output_dim", [None, 12])
def test_the_spectral_block_of_a_new_item_is_zero(output_dim: int | None, tmp_path: Path) -> None:
    block_settings = {"dim": 8, "weights": [0.5], "output_dim": output_dim}
    parent = build_pipeline(tmp_path / "parent", model={"spectral_block": block_settings}, quantization="fp32")
    write_vectors(parent.input_folder, [*REMAINING_IDS, 1300])
    write_items(parent.input_folder, [*REMAINING_IDS, 1300])
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.problems == ()
    refreshed_folder = package_folder_of(refresh_result)
    old_retriever, new_retriever = (
        Retriever.load(package_folder) for package_folder in (parent.package_folder, refreshed_folder)
    )
    new_vector, vector_without_events = vector_by_id(refreshed_folder)[1300], vector_by_id(parent.package_folder)[ITEMS[-1]]
    assert len(new_vector) == len(vector_without_events) == (output_dim or 8 + 8)  # the width of the tower and of the block
    if output_dim is None:
        assert not new_vector[8:].any() and not vector_without_events[8:].any()
    old_block_weights, new_block_weights = (
        load_file(package_folder / "tower.safetensors")["tables.spectral_block.weight"]
        for package_folder in (parent.package_folder, refreshed_folder)
    )
    rows_of_remaining_items = [
        list(vector_by_id(parent.package_folder)).index(item_id) for item_id in list(vector_by_id(refreshed_folder))[:-1]
    ]
    assert torch.equal(new_block_weights, torch.cat([old_block_weights[rows_of_remaining_items], torch.zeros(1, 8)]))
    (old_answer,), (new_answer,) = (
        retriever.recommend(["new"], k=300, histories=[REMAINING_IDS[:6]]) for retriever in (old_retriever, new_retriever)
    )
    old_score_by_id, new_score_by_id = (
        dict(zip(answer.item_ids, answer.scores, strict=True)) for answer in (old_answer, new_answer)
    )
    for item_id in {*old_score_by_id} & {*new_score_by_id}:
        assert new_score_by_id[item_id] == pytest.approx(old_score_by_id[item_id], abs=1e-5)


def test_the_vectors_of_other_items_and_the_space_id_stay_the_same(
    parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path
) -> None:
    write_tables([*range(1300, 1310), *REMAINING_IDS])
    refreshed_folder = package_folder_of(refresh_small(parent, tmp_path / "new"))
    old_bytes_by_id, new_bytes_by_id = vector_bytes_by_id(parent.package_folder), vector_bytes_by_id(refreshed_folder)
    assert all(new_bytes_by_id[item_id] == old_bytes_by_id[item_id] for item_id in REMAINING_IDS)
    assert {*new_bytes_by_id} == {*REMAINING_IDS, *range(1300, 1310)}
    old_retriever, new_retriever = (
        Retriever.load(package_folder) for package_folder in (parent.package_folder, refreshed_folder)
    )
    assert new_retriever.space_id == old_retriever.space_id and new_retriever.package.max_k == len(new_bytes_by_id)
    old_history_codes, new_history_codes = (
        load_file(package_folder / "tower.safetensors")["tables.history.code"]
        for package_folder in (parent.package_folder, refreshed_folder)
    )
    old_rows = old_retriever.item_ids.rows(list(new_bytes_by_id)[:-10])
    assert np.array_equal(new_history_codes[:-10].numpy(), old_history_codes[old_rows].numpy())
    assert len(new_history_codes) == len(new_bytes_by_id)


@pytest.mark.parametrize("index_kind", ["hnsw", "ivf_flat"])
def test_the_vectors_in_the_index_stay_the_same_although_the_item_table_has_rounded_vectors(
    index_kind: str, tmp_path: Path
) -> None:
    def indexed_vectors(package_folder: Path) -> np.ndarray:
        faiss_index = map_index([package_folder / "index.faiss"])
        return (stored_vectors(faiss_index) or decoded_vectors(faiss_index)).take(
            Retriever.load(package_folder).item_ids.rows(ITEMS)
        )

    parent = build_pipeline(tmp_path / "parent", index=index_kind, item_vectors="fp16")
    write_vectors(parent.input_folder, [*ITEMS, 1300])
    write_items(parent.input_folder, [*ITEMS, 1300])
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.problems == ()
    assert np.array_equal(indexed_vectors(package_folder_of(refresh_result)), indexed_vectors(parent.package_folder))


def test_a_new_item_has_the_popularity_of_an_item_without_events(tmp_path: Path) -> None:
    parent = build_pipeline(tmp_path / "parent", model={"popularity": {"kind": "fixed", "weight": 0.2}})
    assert max(vector[-1] for vector in vector_by_id(parent.package_folder).values()) == 1
    write_vectors(parent.input_folder, [*ITEMS, 1300])
    write_items(parent.input_folder, [*ITEMS, 1300])
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.problems == ()
    refreshed_vectors = vector_by_id(package_folder_of(refresh_result))
    # A vector has 8 numbers of the tower, then the popularity.
    assert len(refreshed_vectors[1300]) == 9 and refreshed_vectors[1300][-1] == refreshed_vectors[1299][-1] == 0
    assert np.linalg.norm(refreshed_vectors[1300]) == pytest.approx(1)


def test_a_refreshed_index_has_the_shards_of_its_parent(tmp_path: Path) -> None:
    parent = build_pipeline(tmp_path / "parent", index_shards=3, item_vectors="none")
    write_vectors(parent.input_folder, [*ITEMS, 1300])
    write_items(parent.input_folder, [*ITEMS, 1300])
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.problems == ()
    old_retriever, new_retriever = Retriever.load(parent.package_folder), Retriever.load(package_folder_of(refresh_result))
    index_file_names_by_folder = [
        sorted(path.name for path in folder.glob("*.faiss"))
        for folder in (parent.package_folder, package_folder_of(refresh_result))
    ]
    assert index_file_names_by_folder == [["index.0.faiss", "index.1.faiss", "index.2.faiss"]] * 2
    assert np.array_equal(
        new_retriever.item_vectors(new_retriever.item_ids.rows(ITEMS)),
        old_retriever.item_vectors(old_retriever.item_ids.rows(ITEMS)),
    )
    assert {*new_retriever.similar([1000], k=300)[0].item_ids} == {*ITEMS, 1300} - {1000}


def test_removed_items_are_never_recommended_and_leave_the_histories(
    parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path
) -> None:
    write_tables(REMAINING_IDS)
    old_retriever, new_retriever = (
        Retriever.load(parent.package_folder),
        Retriever.load(package_folder_of(refresh_small(parent, tmp_path / "new"))),
    )
    users = old_retriever.user_ids.ids(np.arange(len(old_retriever.user_ids))).tolist()
    answers = new_retriever.recommend([*users, "unknown"], k=1_000, exclude_seen=False)
    assert not {*REMOVED_IDS} & {item_id for answer in answers for item_id in answer.item_ids}
    assert {len(answer.item_ids) for answer in answers} == {len(REMAINING_IDS)}
    old_seen_ids, new_seen_ids = (
        [{*REMAINING_IDS} - {*answer.item_ids} for answer in retriever.recommend(users, k=1_000)]
        for retriever in (old_retriever, new_retriever)
    )
    assert old_seen_ids == new_seen_ids and any(new_seen_ids)
    old_popularity_answer, new_popularity_answer = (
        retriever.recommend(["unknown"], k=1_000)[0] for retriever in (old_retriever, new_retriever)
    )
    expected_pairs = [
        (item_id, score)
        for item_id, score in zip(old_popularity_answer.item_ids, old_popularity_answer.scores, strict=True)
        if item_id not in REMOVED_IDS
    ]
    assert list(zip(new_popularity_answer.item_ids, new_popularity_answer.scores, strict=True)) == expected_pairs
    (answer,) = new_retriever.recommend(histories=[[1001, 1002, REMOVED_IDS[10]]], k=3)
    assert answer.num_unknown_items == 1


def test_new_items_are_recommended_filtered_and_read_in_histories(
    parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path
) -> None:
    write_tables(range(1000, 1320))
    new_retriever = Retriever.load(package_folder_of(refresh_small(parent, tmp_path / "new")))
    jazz_filter: Filter = {"genre": "jazz"}
    answer = new_retriever.recommend(histories=[[1310, 1315]], k=400, filter=jazz_filter)[0]
    assert {1302, 1306} <= {*answer.item_ids} and answer.fallback == "history" and answer.num_unknown_items == 0
    assert new_retriever.similar([1310], k=5)[0].item_ids
    popularity_answer = new_retriever.recommend(["unknown"], k=320)[0]
    assert {*popularity_answer.item_ids[-20:]} == {*range(1300, 1320)} and {*popularity_answer.scores[-20:]} == {0.0}
    (row,) = new_retriever.item_ids.rows([1311])
    assert new_retriever.items.titles(np.array([row])) == ["item 1311"]


def test_an_item_that_is_missing_in_one_table_is_removed(
    parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path
) -> None:
    write_tables(ITEMS, item_ids=[item_id for item_id in ITEMS if item_id != 1005])
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.changes.removed_ids.to_pylist() == [1005]


def test_titles_and_filter_columns_are_updated(parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path) -> None:
    write_tables(ITEMS, title={1003: "new title"}, in_stock={1014: True, 1013: False}, genre={1016: "unseen"})
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.changes.counts == {"added": 0, "removed": 0, "changed": 4}
    refreshed_folder = package_folder_of(refresh_result)
    assert vector_bytes_by_id(refreshed_folder) == vector_bytes_by_id(parent.package_folder)
    new_retriever = Retriever.load(refreshed_folder)
    assert new_retriever.items.titles(new_retriever.item_ids.rows([1003, 1004])) == ["new title", "item 1004"]
    assert 1013 not in new_retriever.recommend(["unknown"], k=400, filter={"in_stock": True})[0].item_ids
    assert new_retriever.recommend(["unknown"], filter={"genre": "unseen"})[0].item_ids == [1016]


def test_two_items_that_differ_only_in_unknown_feature_values_get_the_same_vector(
    parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path
) -> None:
    tags_by_id = {1301: ["tag 1", "tag 99"], 1302: ["tag 1", "tag 98"]}
    equal_columns = {"price": {1301: 7.0, 1302: 7.0}, "brand": {1301: "brand 1", 1302: "brand 1"}}
    write_tables(range(1000, 1303), genre={1301: "polka", 1302: "waltz"}, tags=tags_by_id, **equal_columns)
    write_vectors(parent.input_folder, range(1000, 1303), seed_by_id={1301: 5, 1302: 5})
    refreshed_vectors = vector_by_id(package_folder_of(refresh_small(parent, tmp_path / "new")))
    assert np.array_equal(refreshed_vectors[1301], refreshed_vectors[1302])
    assert not np.allclose(refreshed_vectors[1301], refreshed_vectors[1300])


def test_tables_in_another_order_give_no_new_package(parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path) -> None:
    write_tables(reversed(ITEMS))
    assert refresh_small(parent, tmp_path / "new") is None
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["scratch"]


def test_too_many_missing_items_are_rejected(parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path) -> None:
    write_tables(range(1000, 1200))
    with raises_input_error("100 of 300 items of the served model (33.3 %) are missing", "refresh.max_removed_share is 20.0 %"):
        refresh_small(parent, tmp_path / "new")
    refresh_result = refresh_small(parent, tmp_path / "allowed", max_removed_share=0.5)
    assert refresh_result is not None and refresh_result.changes.counts["removed"] == 100


def test_an_error_about_the_format_of_the_parent_package_names_both_formats(parent: SmallPipeline, tmp_path: Path) -> None:
    package_folder = tmp_path / "package"
    package_folder.mkdir()
    description = json.loads((parent.package_folder / DESCRIPTION_NAME).read_bytes()) | {"format_version": 7}
    (package_folder / DESCRIPTION_NAME).write_text(json.dumps(description))
    with pytest.raises(StageError, match=r"has format 7, but .* reads format 8; run the pipeline again"):
        refresh_small(parent, tmp_path / "new", package_folder=package_folder)


@pytest.mark.parametrize(
    ("input_settings", "message"),
    [
        ({"has_vectors": False}, "the served model was trained with vectors of items, but the config has none"),
        ({"features": None}, "the served model reads ['item.genre', 'item.tags'"),
        ({"features": FEATURES[1:]}, "reads the feature item.genre, but the config does not declare it"),
        ({"features": ({"name": "genre", "hash_rows": 9}, *FEATURES[1:])}, "feature 'genre' has the definition"),
        ({"features": (FEATURES[0], {**FEATURES[1], "max_values": 1}, *FEATURES[2:])}, "feature 'tags' has the max_values 1"),
    ],
    ids=["no vectors", "no table", "no feature", "another definition", "another length"],
)
def test_a_config_that_does_not_fit_the_model_is_rejected(
    parent: SmallPipeline, tmp_path: Path, input_settings: dict[str, Any], message: str
) -> None:
    with raises_input_error(message):
        refresh_small(parent, tmp_path / "new", inputs=inputs_of(parent.input_folder, **input_settings))


def test_a_feature_that_the_model_does_not_read_is_ignored(
    parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path
) -> None:
    write_tables(range(1000, 1301))
    inputs_with_unread_feature = inputs_of(parent.input_folder, features=({"name": "stock", "column": "in_stock"}, *FEATURES))
    refresh_result = refresh_small(parent, tmp_path / "new", inputs=inputs_with_unread_feature)
    assert refresh_result is not None and refresh_result.changes.counts["added"] == 1


def test_vectors_of_another_width_or_with_a_projection_are_rejected(
    parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path
) -> None:
    write_tables()
    write_vectors(parent.input_folder, ITEMS, dim=16)
    with raises_input_error(
        "vectors.parquet: the vectors have 16 numbers, but the served model was trained with vectors of 12"
    ):
        refresh_small(parent, tmp_path / "wide")
    (vectors_config,) = parent.inputs.embeddings
    inputs_with_projection = InputConfig(
        parent.inputs.interactions, (vectors_config.model_copy(update={"pca_dim": 12}),), parent.inputs.features, None
    )
    with raises_input_error("embeddings.pca_dim: a refresh is not possible with a projection"):
        refresh_small(parent, tmp_path / "projected", inputs=inputs_with_projection)


@pytest.mark.parametrize(
    "pipeline_settings",
    [
        {"transfer": "residual", "index": "hnsw", "quantization": "int4"},
        {"index": {"kind": "ivf_sq8", "nlist": 4}, "users": "none", "model": {"history": {"length": 5}}},
        {
            "index": {"kind": "ivf_flat", "nlist": 4},
            "features": None,
            "model": {"similarity": "dot", "learn_user_embedding": True},
        },
        {"has_vectors": False, "quantization": "fp16", "exports": ("pt2",)},
    ],
    ids=["residual hnsw int4", "no users", "vectors alone", "features alone"],
)
def test_the_refreshed_package_of_every_kind_of_model_passes_its_checks(
    tmp_path: Path, pipeline_settings: dict[str, Any]
) -> None:
    parent = build_pipeline(tmp_path / "files", **pipeline_settings)
    parent_ids = {*vector_bytes_by_id(parent.package_folder)}
    removed_ids = sorted(parent_ids)[:5]
    current_ids = [*(item_id for item_id in ITEMS if item_id not in removed_ids), *range(1300, 1320)]
    write_vectors(tmp_path / "files", current_ids)
    write_items(tmp_path / "files", current_ids)
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.problems == (), refresh_result
    new_bytes_by_id = vector_bytes_by_id(package_folder_of(refresh_result))
    assert {*new_bytes_by_id} == {*current_ids}
    old_bytes_by_id = vector_bytes_by_id(parent.package_folder)
    assert all(new_bytes_by_id[item_id] == old_bytes_by_id[item_id] for item_id in parent_ids - {*removed_ids})
    assert refresh_small(parent, tmp_path / "again", package_folder=package_folder_of(refresh_result)) is None
