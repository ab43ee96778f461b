"""Table settings: the share of rows trained per epoch, and settings that contradict each other."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.models.tables.table_config import TableConfig
from tests.recsys_core.models.error_messages import raises_message


def gradual_table(*steps: tuple[int, float]) -> TableConfig:
    """Return the config of a gradual table with the steps (epoch, trained share)."""
    return TableConfig.model_validate(
        {"transfer": "gradual", "unfreeze": [{"epoch": epoch, "share": share} for epoch, share in steps]}
    )


@pytest.mark.parametrize(("transfer", "share"), [("full", 1.0), ("frozen", 0.0), ("residual", 0.0)])
def test_a_table_that_is_not_gradual_trains_all_rows_or_none_in_every_epoch(transfer: Any, share: float) -> None:
    assert {TableConfig(transfer=transfer).trained_share(epoch) for epoch in (1, 2, 99)} == {share}


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[int, float]]:
    """Draw steps (epoch, share) in which both numbers rise."""
    epochs = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=5)))
    shares = sorted(draw(st.sets(st.integers(0, 100), min_size=len(epochs), max_size=len(epochs))))
    return [(epoch, share / 100) for epoch, share in zip(epochs, shares, strict=True)]


@given(schedules())
def test_the_trained_share_is_the_share_of_the_last_step_and_never_falls(steps: list[tuple[int, float]]) -> None:
    table = gradual_table(*steps)
    shares = [table.trained_share(epoch) for epoch in range(1, 15)]
    for epoch, share in enumerate(shares, 1):
        past_shares = [step_share for step_epoch, step_share in steps if step_epoch <= epoch]
        assert share == (past_shares[-1] if past_shares else 0.0)
    assert all(share <= next_share for share, next_share in pairwise(shares))


@given(schedules(), st.data())
def test_a_schedule_that_does_not_rise_is_rejected(steps: list[tuple[int, float]], data: st.DataObject) -> None:
    step_index = data.draw(st.integers(0, len(steps) - 1))
    epoch, share = steps[step_index]
    if data.draw(st.booleans()):
        next_step = (data.draw(st.integers(1, epoch)), min(1.0, share + 0.5))
    else:
        next_step = (epoch + 1, data.draw(st.floats(0, share)))
    with raises_message("unfreeze does not rise: epoch "):
        gradual_table(*steps[: step_index + 1], next_step)


def test_the_error_of_a_falling_schedule_names_both_steps_and_the_reason() -> None:
    with raises_message(
        "unfreeze does not rise: epoch 3 share 0.5 is followed by epoch 5 share 0.25; make both rise, because a trained "
        "row cannot be frozen again"
    ):
        gradual_table((3, 0.5), (5, 0.25))


def test_only_gradual_tables_have_a_schedule() -> None:
    with raises_message("transfer is gradual, but unfreeze is empty; give it steps such as {epoch: 2, share: 0.25}"):
        gradual_table()
    for transfer in ("full", "frozen", "residual"):
        with raises_message(
            f"unfreeze is not empty, but transfer is {transfer}; set transfer to gradual, or leave unfreeze out"
        ):
            TableConfig.model_validate({"transfer": transfer, "unfreeze": [{"epoch": 1, "share": 1}]})


@pytest.mark.parametrize("transfer", ["full", "frozen"])
def test_only_offsets_can_be_dropped(transfer: Any) -> None:
    assert TableConfig(transfer="residual", id_dropout=0.3).id_dropout == 0.3
    with raises_message(f"id_dropout drops the offsets of transfer residual, but transfer is {transfer}"):
        TableConfig(transfer=transfer, id_dropout=0.3)
