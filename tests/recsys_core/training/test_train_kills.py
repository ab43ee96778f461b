"""Training and export killed at 20 points and resumed at each: what comes out is bit-identical to an undisturbed night.

Eighteen times a rank of a fork kills itself exactly where it says; twice torchrun's agent or the whole flow is killed.
"""

import numpy as np
import pytest

from tests.gloo import run_ranks
from tests.recsys_core.training.forked_training import (
    Night,
    checkpoint_of,
    export_in_forks,
    export_job,
    ingest,
    night,
    train_in_forks,
    train_job,
    unhurried,
)
from tests.recsys_core.training.kill_points import (
    TRAINING,
    Kill,
    Undisturbed,
    export_and_die,
    state_in,
    train_and_die,
    train_through_kills,
    undisturbed_night,
)

KILLS = (
    Kill("step", 1, 2),  # before the first checkpoint
    Kill("staged", 0, 3),
    Kill("written", 1, 6),
    Kill("written", 0, 6),
    Kill("hashed", 0, 6),
    Kill("renaming", 0, 6),
    Kill("renamed", 0, 9),
    Kill("measured", 1, 13),  # at the end of the first epoch
    Kill("line", 0, 16),
    Kill("removing", 0, 18),
    Kill("step", 0, 20),
    Kill("staged", 1, 24),
    Kill("step", 1, 26),
    Kill("renaming", 0, 30),
    Kill("written", 0, 33),
    Kill("line", 0, 36),
    Kill("result", 0),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Night:
    root = tmp_path_factory.mktemp("night")
    return night(ingest(root), root / "plan", training=TRAINING)


@pytest.fixture(scope="module")
def undisturbed(made, tmp_path_factory) -> Undisturbed:
    return undisturbed_night(made, tmp_path_factory.mktemp("undisturbed"))


def test_ranks_killed_at_eighteen_points_leave_a_run_that_ends_as_an_undisturbed_one(made, undisturbed, tmp_path):
    work = tmp_path / "work"
    for kill in KILLS:
        run_ranks(train_and_die, world_size=2, arguments=(train_job(made, work), kill), dies=kill.rank)
    trained = train_in_forks(made, work)
    assert unhurried(trained.lines) == undisturbed.lines
    assert state_in(checkpoint_of(trained)) == undisturbed.state
    out = tmp_path / "export"
    out.mkdir()
    job = export_job(made, checkpoint_of(trained), out)
    run_ranks(export_and_die, world_size=2, arguments=(job, Kill("export", 1)), dies=1)
    exported = export_in_forks(made, checkpoint_of(trained), tmp_path / "again")
    assert exported.keys() == undisturbed.export.keys()
    for name, value in undisturbed.export.items():
        np.testing.assert_array_equal(exported[name], value, err_msg=name)


def test_the_agent_and_the_flow_killed_leave_a_run_that_ends_as_an_undisturbed_one(made, undisturbed, tmp_path):
    train_through_kills(made, tmp_path / "train", victims=("agent", "flow"))
    assert state_in(tmp_path / "train" / "checkpoint") == undisturbed.state
    assert not (tmp_path / "train.work").exists()
