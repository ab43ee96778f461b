"""Settings of model, loss and learning rate schedules: defaults, and combinations that are rejected."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from recsys_core.models.config import TowerConfig, TwoTowerConfig
from recsys_core.models.history_config import MeanHistory
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.tables.table_config import Schedule
from tests.recsys_core.models.error_messages import raises_message


def two_tower_config(**settings: Any) -> TwoTowerConfig:
    return TwoTowerConfig.model_validate({"embedding_dim": 8, **settings})


def test_by_default_the_query_tower_has_one_layer_and_the_candidate_tower_has_none() -> None:
    config = two_tower_config()
    assert (config.query_layers, config.candidate_layers, config.output_dim) == ((8,), (), 8)
    config = two_tower_config(candidate={"layers": (16, 12)}, query={"skip_connection": False})
    assert (config.query_layers, config.candidate_layers, config.output_dim) == ((12,), (16, 12), 12)
    assert two_tower_config(query={"layers": ()}).query_layers == ()


def test_the_width_of_a_history_depends_on_the_item_representation() -> None:
    settings = {"candidate": {"layers": (12,)}, "query": {"skip_connection": False}}
    assert two_tower_config(**settings).history_dim == 8
    assert two_tower_config(**settings, history={"item_representation": "candidate_tower"}).history_dim == 12


@pytest.mark.parametrize("setting_name", ["last_item_feature", "learn_offsets"])
def test_settings_that_need_a_history_are_rejected_without_a_history(setting_name: str) -> None:
    settings = {"last_item_feature": False, "learn_offsets": False, setting_name: True}
    with raises_message(f"{setting_name} is true, but length is 0; set length to 1 or more, or {setting_name} to false"):
        MeanHistory(length=0, **settings)


@pytest.mark.parametrize("tower_name", ["query", "candidate"])
def test_a_skip_connection_needs_a_last_layer_of_width_embedding_dim(tower_name: str) -> None:
    settings_by_tower = {"query": {"layers": (16, 12)}, "candidate": {"layers": (16, 12)}}
    assert two_tower_config(**settings_by_tower).output_dim == 12
    settings_by_tower[tower_name] = {"layers": (16, 12), "skip_connection": True}
    with raises_message(
        f"{tower_name}.skip_connection adds features of width 8 (embedding_dim) to the last layer, which has width 12; "
        f"end {tower_name}.layers in 8, or set skip_connection to false"
    ):
        two_tower_config(**settings_by_tower)
    valid_settings = {"layers": (16, 8), "skip_connection": True}
    assert two_tower_config(query=valid_settings, candidate=valid_settings).output_dim == 8


@pytest.mark.parametrize(
    ("query_layers", "candidate_layers", "query_width", "candidate_width"),
    [((12,), None, 12, 8), ((12,), (), 12, 8), ((), (12,), 8, 12), ((16, 12), (12, 16), 12, 16)],
)
def test_towers_of_different_output_widths_are_rejected(
    query_layers: Any, candidate_layers: Any, query_width: int, candidate_width: int
) -> None:
    with raises_message(
        f"the towers have different output widths: query.layers end in {query_width}, candidate.layers in {candidate_width}; "
        "give both the same last width, or leave query.layers out"
    ):
        two_tower_config(query={"layers": query_layers}, candidate={"layers": candidate_layers})


@given(
    embedding_dim=st.sampled_from([4, 8, 64]),
    candidate_layers=st.none() | st.lists(st.integers(1, 99), max_size=3).map(tuple),
    skip_connection=st.booleans(),
)
def test_the_default_query_tower_ends_in_the_width_of_the_candidate_tower(
    embedding_dim: int, candidate_layers: tuple[int, ...] | None, skip_connection: bool
) -> None:
    try:
        config = TwoTowerConfig(
            embedding_dim=embedding_dim,
            query=TowerConfig(skip_connection=skip_connection),
            candidate=TowerConfig(layers=candidate_layers),
        )
    except ValidationError as error:
        assert skip_connection and candidate_layers and candidate_layers[-1] != embedding_dim, error
    else:
        assert config.query_layers == (config.output_dim,)


@pytest.mark.parametrize("loss_kind", ["bce", "bpr", "cosine_contrastive"])
def test_losses_other_than_softmax_need_sampled_or_in_batch_negatives(loss_kind: Any) -> None:
    assert LossConfig(kind=loss_kind, num_negatives=1).uses_in_batch_negatives is False
    assert LossConfig(kind=loss_kind, num_negatives=0, in_batch_negatives=True).uses_in_batch_negatives is True
    for settings in ({}, {"in_batch_negatives": False}):
        with raises_message(
            f"loss.kind is {loss_kind}, which needs negatives, but num_negatives is 0 and in_batch_negatives is not true; "
            "set num_negatives"
        ):
            LossConfig(kind=loss_kind, num_negatives=0, **settings)


def test_softmax_uses_in_batch_negatives_by_default() -> None:
    assert LossConfig(num_negatives=0).uses_in_batch_negatives is True
    assert LossConfig(in_batch_negatives=False).uses_in_batch_negatives is False
    with raises_message("loss.kind is softmax, which needs negatives"):
        LossConfig(in_batch_negatives=False, num_negatives=0)


def test_cross_rank_negatives_need_in_batch_negatives() -> None:
    assert LossConfig(cross_rank_negatives=True).uses_in_batch_negatives
    with raises_message(
        "loss.cross_rank_negatives shares in-batch negatives between ranks, but in_batch_negatives is false for loss.kind bpr; "
        "set in_batch_negatives to true"
    ):
        LossConfig(kind="bpr", cross_rank_negatives=True)


@given(
    warmup_steps=st.integers(0, 50),
    total_steps=st.integers(1, 200),
    lr_decay=st.sampled_from(["none", "linear", "cosine"]),
    data=st.data(),
)
def test_the_learning_rate_rises_during_the_warmup_and_never_afterwards(
    warmup_steps: int, total_steps: int, lr_decay: Any, data: st.DataObject
) -> None:
    schedule = Schedule(learning_rate=1.0, warmup_steps=warmup_steps, lr_decay=lr_decay)
    step = data.draw(st.integers(0, total_steps - 1))
    scale, next_scale = (schedule.scale(schedule_step, total_steps=total_steps) for schedule_step in (step, step + 1))
    assert 0 < scale <= 1
    if step < warmup_steps:
        assert scale < next_scale
    else:
        assert next_scale <= scale
    if lr_decay == "none" and step >= warmup_steps:
        assert scale == 1


def test_the_number_of_attention_heads_must_divide_the_width_of_an_item_in_a_history() -> None:
    history_settings = {"pooling": "self_attention", "num_heads": 3}
    TwoTowerConfig.model_validate({"embedding_dim": 12, "history": history_settings})
    with raises_message(
        "history.num_heads is 3, which does not divide the width of an item's vector in a history, 20 (embedding_dim); set "
        "num_heads to one of 1, 2, 4, 5, 10, 20"
    ):
        TwoTowerConfig.model_validate({"embedding_dim": 20, "history": history_settings})
    model_settings = {"candidate": {"layers": [8]}, "query": {"skip_connection": False}, "embedding_dim": 12}
    TwoTowerConfig.model_validate(model_settings | {"history": history_settings})
    with raises_message("does not divide the width of an item's vector in a history, 8 (candidate.layers)"):
        TwoTowerConfig.model_validate(
            model_settings | {"history": history_settings | {"item_representation": "candidate_tower"}}
        )


@pytest.mark.parametrize("num_blocks", [0, 4])
def test_self_attention_has_one_to_three_blocks(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=r"num_blocks"):
        TwoTowerConfig.model_validate({"history": {"pooling": "self_attention", "num_blocks": num_blocks}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "bce"}, "but loss.kind is bce; set loss.kind to softmax"),
        ({"in_batch_negatives": True}, "but in_batch_negatives is true; leave in_batch_negatives out"),
        ({"cross_rank_negatives": True}, "but cross_rank_negatives is true; leave cross_rank_negatives out"),
        ({"distillation": {}}, "but loss.distillation compares sampled items; leave distillation out"),
    ],
    ids=["loss kind", "in-batch negatives", "cross-rank negatives", "distillation"],
)
def test_a_softmax_over_the_whole_catalogue_rejects_settings_of_sampled_negatives(
    settings: dict[str, Any], message: str
) -> None:
    valid_config = LossConfig(negatives="all", num_negatives=0)
    assert not valid_config.uses_in_batch_negatives and valid_config.num_sampled_negatives == 0
    with raises_message(message):
        LossConfig.model_validate({"negatives": "all"} | settings)
