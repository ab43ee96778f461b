"""A refresh: new items get the vectors of the trained tower, items that are gone leave, all others stay bit by bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recsys_core.errors import StageError
from recsys_core.ingest import InputConfig
from recsys_core.serving.description import DESCRIPTION_NAME
from recsys_core.serving.items import Filter
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.ingest.parquet_files import input_error
from tests.recsys_core.refresh.refreshed import Tables, folder_of, refresh_small, values_of, vectors_of
from tests.recsys_core.refresh.small_pipeline import (
    FEATURES,
    ITEMS,
    SmallPipeline,
    build_pipeline,
    inputs_of,
    write_items,
    write_vectors,
)

LEFT = range(1200, 1220)
"""Items that leave; they have events."""


def test_items_that_come_back_get_the_vectors_of_the_trained_tower(
    parent: SmallPipeline, tables: Tables, tmp_path: Path
) -> None:
    trained = values_of(parent.package_folder)
    tables([item_id for item_id in ITEMS if item_id not in LEFT])
    without = folder_of(refresh_small(parent, tmp_path / "without"))
    assert not {*LEFT} & {*vectors_of(without)}
    tables(reversed(ITEMS))
    refresh_result = refresh_small(parent, tmp_path / "with", package_folder=without)
    folder = folder_of(refresh_result)
    assert refresh_result is not None and refresh_result.changes.counts == {"added": 20, "removed": 0, "changed": 0}
    assert refresh_result.problems == ()
    for item_id in LEFT:
        np.testing.assert_allclose(values_of(folder)[item_id], trained[item_id], atol=1e-5)
    assert list(vectors_of(folder))[-20:] == list(LEFT)


def test_an_ensemble_gives_new_items_the_vectors_of_all_members(tmp_path: Path) -> None:
    parent = build_pipeline(tmp_path / "parent", model={"num_members": 2})
    trained = values_of(parent.package_folder)
    write_vectors(parent.files, [item_id for item_id in ITEMS if item_id not in LEFT])
    write_items(parent.files, [item_id for item_id in ITEMS if item_id not in LEFT])
    without = folder_of(refresh_small(parent, tmp_path / "without"))
    write_vectors(parent.files, ITEMS)
    write_items(parent.files, ITEMS)
    refresh_result = refresh_small(parent, tmp_path / "with", package_folder=without)
    assert refresh_result is not None and refresh_result.changes.counts == {"added": 20, "removed": 0, "changed": 0}
    vectors = values_of(folder_of(refresh_result))
    for item_id in LEFT:
        assert len(vectors[item_id]) == 2 * 8
        np.testing.assert_allclose(vectors[item_id], trained[item_id], atol=1e-5)


@pytest.mark.parametrize("output_dim", [None, 12])
def test_a_new_item_has_no_spectral_block(output_dim: int | None, tmp_path: Path) -> None:
    block = {"dim": 8, "weights": [0.5], "output_dim": output_dim}
    parent = build_pipeline(tmp_path / "parent", model={"spectral_block": block}, quantization="fp32")
    write_vectors(parent.files, [*(item_id for item_id in ITEMS if item_id not in LEFT), 1300])
    write_items(parent.files, [*(item_id for item_id in ITEMS if item_id not in LEFT), 1300])
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.problems == ()
    folder = folder_of(refresh_result)
    old, new = (Retriever.load(path) for path in (parent.package_folder, folder))
    without_events = values_of(parent.package_folder)[ITEMS[-1]]
    assert len(values_of(folder)[1300]) == len(without_events) == (output_dim or 16)
    if output_dim is None:
        assert not values_of(folder)[1300][8:].any() and not without_events[8:].any()
    before, vectors = (
        load_file(path / "tower.safetensors")["tables.spectral_block.weight"] for path in (parent.package_folder, folder)
    )
    kept_rows = [list(values_of(parent.package_folder)).index(item_id) for item_id in list(values_of(folder))[:-1]]
    assert torch.equal(vectors, torch.cat([before[kept_rows], torch.zeros(1, 8)]))
    history = [item_id for item_id in ITEMS if item_id not in LEFT][:6]
    scores = [retriever.recommend(["new"], k=300, histories=[history]) for retriever in (old, new)]
    score_by_id = [dict(zip(answer.item_ids[0].tolist(), answer.scores[0].tolist(), strict=True)) for answer in scores]
    for item_id in {*score_by_id[0]} & {*score_by_id[1]}:
        assert score_by_id[1][item_id] == pytest.approx(score_by_id[0][item_id], abs=1e-5)


def test_other_items_and_the_space_stay_bit_by_bit(parent: SmallPipeline, tables: Tables, tmp_path: Path) -> None:
    tables([*range(1300, 1310), *(item_id for item_id in ITEMS if item_id not in LEFT)])
    folder = folder_of(refresh_small(parent, tmp_path / "new"))
    before, after = vectors_of(parent.package_folder), vectors_of(folder)
    assert {item_id: after[item_id] for item_id in before if item_id not in LEFT} == {
        item_id: vector for item_id, vector in before.items() if item_id not in LEFT
    }
    assert {*after} == {*before} - {*LEFT} | {*range(1300, 1310)}
    old, new = (Retriever.load(path) for path in (parent.package_folder, folder))
    assert new.space_id == old.space_id and new.package.max_k == len(after)
    code, new_code = (load_file(path / "tower.safetensors")["tables.history.code"] for path in (parent.package_folder, folder))
    rows = old.item_ids.rows(list(after)[:-10])
    assert np.array_equal(new_code[:-10].numpy(), code[rows].numpy())
    assert len(new_code) == len(after)


def test_a_new_item_has_the_popularity_of_an_item_without_events(tmp_path: Path) -> None:
    parent = build_pipeline(tmp_path / "parent", model={"popularity": {"kind": "fixed", "weight": 0.2}})
    assert max(vector[-1] for vector in values_of(parent.package_folder).values()) == 1
    write_vectors(parent.files, [*ITEMS, 1300])
    write_items(parent.files, [*ITEMS, 1300])
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.problems == ()
    vectors = values_of(folder_of(refresh_result))
    assert len(vectors[1300]) == 9 and vectors[1300][-1] == vectors[1299][-1] == 0
    assert np.linalg.norm(vectors[1300]) == pytest.approx(1)


def test_a_refreshed_index_has_the_shards_of_its_parent(tmp_path: Path) -> None:
    parent = build_pipeline(tmp_path / "parent", index_shards=3, item_vectors="none")
    write_vectors(parent.files, [*ITEMS, 1300])
    write_items(parent.files, [*ITEMS, 1300])
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.problems == ()
    old, new = Retriever.load(parent.package_folder), Retriever.load(folder_of(refresh_result))
    names = [
        sorted(path.name for path in folder.glob("*.faiss")) for folder in (parent.package_folder, folder_of(refresh_result))
    ]
    assert names == [["index.0.faiss", "index.1.faiss", "index.2.faiss"]] * 2
    assert np.array_equal(new.item_vectors(new.item_ids.rows(ITEMS)), old.item_vectors(old.item_ids.rows(ITEMS)))
    assert {*new.similar([1000], k=300)[0].item_ids} == {*ITEMS, 1300} - {1000}


def test_items_that_left_are_never_answered_and_leave_the_histories(
    parent: SmallPipeline, tables: Tables, tmp_path: Path
) -> None:
    tables([item_id for item_id in ITEMS if item_id not in LEFT])
    old, new = Retriever.load(parent.package_folder), Retriever.load(folder_of(refresh_small(parent, tmp_path / "new")))
    users = old.user_ids.ids(np.arange(len(old.user_ids))).tolist()
    answers = new.recommend([*users, "unknown"], k=1_000, exclude_seen=False)
    assert not {*LEFT} & {item_id for answer in answers for item_id in answer.item_ids}
    assert {len(answer.item_ids) for answer in answers} == {len(ITEMS) - len(LEFT)}
    seen_before, seen_after = (
        [{*ITEMS} - {*LEFT} - {*answer.item_ids} for answer in retriever.recommend(users, k=1_000)] for retriever in (old, new)
    )
    assert seen_before == seen_after and any(seen_after)
    popular_before, popular_after = (retriever.recommend(["unknown"], k=1_000)[0] for retriever in (old, new))
    shares = [pair for pair in zip(popular_before.item_ids, popular_before.scores, strict=True) if pair[0] not in LEFT]
    assert list(zip(popular_after.item_ids, popular_after.scores, strict=True)) == shares
    known_history = [1001, 1002, 1210]
    answer = new.recommend(histories=[known_history], k=3)[0]
    assert answer.num_unknown_items == 1


def test_new_items_are_recommended_filtered_and_read_in_histories_but_the_least_popular(
    parent: SmallPipeline, tables: Tables, tmp_path: Path
) -> None:
    tables(range(1000, 1320))
    new = Retriever.load(folder_of(refresh_small(parent, tmp_path / "new")))
    jazz: Filter = {"genre": "jazz"}
    answer = new.recommend(histories=[[1310, 1315]], k=400, filter=jazz)[0]
    assert {1302, 1306} <= {*answer.item_ids} and answer.fallback == "history" and answer.num_unknown_items == 0
    assert new.similar([1310], k=5)[0].item_ids
    popular = new.recommend(["unknown"], k=320)[0]
    assert {*popular.item_ids[-20:]} == {*range(1300, 1320)} and set(popular.scores[-20:]) == {0.0}
    (row,) = new.item_ids.rows([1311])
    assert new.items.titles(np.array([row])) == ["item 1311"]


def test_an_item_is_removed_if_one_of_the_tables_that_had_it_lacks_it(
    parent: SmallPipeline, tables: Tables, tmp_path: Path
) -> None:
    tables(ITEMS, items=[item_id for item_id in ITEMS if item_id != 1005])
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.changes.removed_ids.to_pylist() == [1005]


def test_titles_and_filter_columns_are_those_of_today(parent: SmallPipeline, tables: Tables, tmp_path: Path) -> None:
    tables(ITEMS, title={1003: "new title"}, in_stock={1014: True, 1013: False}, genre={1016: "unseen"})
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.changes.counts == {"added": 0, "removed": 0, "changed": 4}
    folder = folder_of(refresh_result)
    assert vectors_of(folder) == vectors_of(parent.package_folder)
    new = Retriever.load(folder)
    assert new.items.titles(new.item_ids.rows([1003, 1004])) == ["new title", "item 1004"]
    assert 1013 not in new.recommend(["unknown"], k=400, filter={"in_stock": True})[0].item_ids
    assert new.recommend(["unknown"], filter={"genre": "unseen"})[0].item_ids == [1016]


def test_a_value_that_the_training_has_not_seen_counts_as_unknown(
    parent: SmallPipeline, tables: Tables, tmp_path: Path
) -> None:
    tags = {1301: ["tag 1", "tag 99"], 1302: ["tag 1", "tag 98"]}
    same = {"price": {1301: 7.0, 1302: 7.0}, "brand": {1301: "brand 1", 1302: "brand 1"}}
    tables(range(1000, 1303), genre={1301: "polka", 1302: "waltz"}, tags=tags, **same)
    write_vectors(parent.files, range(1000, 1303), same={1301: 5, 1302: 5})
    values = values_of(folder_of(refresh_small(parent, tmp_path / "new")))
    assert np.array_equal(values[1301], values[1302])
    assert not np.allclose(values[1301], values[1300])


def test_without_a_change_there_is_no_package(parent: SmallPipeline, tables: Tables, tmp_path: Path) -> None:
    tables(reversed(ITEMS))
    assert refresh_small(parent, tmp_path / "new") is None
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["scratch"]


def test_too_many_missing_items_are_rejected(parent: SmallPipeline, tables: Tables, tmp_path: Path) -> None:
    tables(range(1000, 1200))
    with input_error("100 of 300 items of the served model (33.3%) are missing", "refresh.max_removed_share is 20.0%"):
        refresh_small(parent, tmp_path / "new")
    refresh_result = refresh_small(parent, tmp_path / "allowed", max_removed_share=0.5)
    assert refresh_result is not None and refresh_result.changes.counts["removed"] == 100


def test_the_error_names_the_format_of_a_parent_package(parent: SmallPipeline, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    described = json.loads((parent.package_folder / DESCRIPTION_NAME).read_bytes()) | {"format_version": 6}
    (package / DESCRIPTION_NAME).write_text(json.dumps(described))
    with pytest.raises(StageError, match=r"has format 6, but .* reads format 7; run the pipeline again"):
        refresh_small(parent, tmp_path / "new", package_folder=package)


@pytest.mark.parametrize(
    ("settings", "message"),
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
    parent: SmallPipeline, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with input_error(message):
        refresh_small(parent, tmp_path / "new", inputs=inputs_of(parent.files, **settings))


def test_a_feature_that_the_model_does_not_read_is_ignored(parent: SmallPipeline, tables: Tables, tmp_path: Path) -> None:
    tables(range(1000, 1301))
    inputs = inputs_of(parent.files, features=({"name": "stock", "column": "in_stock"}, *FEATURES))
    refresh_result = refresh_small(parent, tmp_path / "new", inputs=inputs)
    assert refresh_result is not None and refresh_result.changes.counts["added"] == 1


def test_vectors_of_another_width_or_with_a_projection_are_rejected(
    parent: SmallPipeline, tables: Tables, tmp_path: Path
) -> None:
    tables()
    write_vectors(parent.files, ITEMS, dim=16)
    with input_error("vectors.parquet: the vectors have 16 numbers, but the served model was trained with vectors of 12"):
        refresh_small(parent, tmp_path / "wide")
    (vectors,) = parent.inputs.embeddings
    inputs = InputConfig(
        parent.inputs.interactions, (vectors.model_copy(update={"pca_dim": 12}),), parent.inputs.features, None
    )
    with input_error("embeddings.pca_dim: a refresh is not possible with a projection"):
        refresh_small(parent, tmp_path / "projected", inputs=inputs)


@pytest.mark.parametrize(
    "variant",
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
def test_every_kind_of_model_is_refreshed_and_passes_its_checks(tmp_path: Path, variant: dict[str, Any]) -> None:
    parent = build_pipeline(tmp_path / "files", **variant)
    old_ids = {*vectors_of(parent.package_folder)}
    left = sorted(old_ids)[:5]
    ids = [*(item_id for item_id in ITEMS if item_id not in left), *range(1300, 1320)]
    write_vectors(tmp_path / "files", ids)
    write_items(tmp_path / "files", ids)
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.problems == (), refresh_result
    after = vectors_of(folder_of(refresh_result))
    assert {*after} == {*ids}
    before = vectors_of(parent.package_folder)
    assert all(after[item_id] == before[item_id] for item_id in old_ids - {*left})
    assert refresh_small(parent, tmp_path / "again", package_folder=folder_of(refresh_result)) is None
