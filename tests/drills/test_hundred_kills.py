"""A training killed a hundred times: eighty ranks at random places, and the agent, a rank or the flow twenty times."""

import random

import pytest

from tests.gloo import run_ranks
from tests.recsys_core.training.faults import (
    TRAINING,
    Kill,
    state_in,
    train_and_die,
    train_through_kills,
    undisturbed_night,
)
from tests.recsys_core.training.stages import checkpoint_of, ingest, night, train_in_forks, train_job, unhurried

pytestmark = pytest.mark.drill
ANY_RANK = ("step", "staged", "written", "measured")
FIRST_RANK = ("hashed", "renaming", "renamed", "line", "removing")
IN_FORKS, LAST_STEP = 80, 36


def test_a_training_killed_a_hundred_times_ends_as_an_undisturbed_one(tmp_path):
    made = night(ingest(tmp_path), tmp_path / "plan", training=TRAINING)
    expected = undisturbed_night(made, tmp_path)
    draw, work = random.Random(1), tmp_path / "killed"
    for number in range(IN_FORKS):
        place = draw.choice(ANY_RANK + FIRST_RANK)
        kill = Kill(place, draw.randrange(2) if place in ANY_RANK else 0, step=1 + number * LAST_STEP // IN_FORKS)
        run_ranks(train_and_die, world_size=2, arguments=(train_job(made, work), kill), dies=kill.rank)
    trained = train_in_forks(made, work)
    assert unhurried(trained.lines) == expected.lines
    assert state_in(checkpoint_of(trained)) == expected.state

    for turn in range(5):
        victims = draw.choices(("agent", "rank", "flow"), k=4)
        folder = tmp_path / f"train-{turn}"
        train_through_kills(made, folder, victims=victims)
        assert state_in(folder / "checkpoint") == expected.state
