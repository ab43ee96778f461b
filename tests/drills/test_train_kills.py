"""Training and export are killed 20 times and resumed, and the result equals the result of an undisturbed run bit for bit.

Eighteen times a forked rank kills itself at a kill point. Once torchrun's agent and once the whole flow is killed.
"""

import numpy as np
import pytest

from tests.gloo import run_ranks
from tests.recsys_core.training.forked_training import (
    Experiment,
    checkpoint_of,
    export_in_forks,
    export_job,
    generate_dataset,
    make_experiment,
    train_in_forks,
    train_job,
    without_timings,
)
from tests.recsys_core.training.kill_points import (
    TRAINING,
    Kill,
    UndisturbedResult,
    export_and_die,
    state_checksums,
    train_and_die,
    train_through_kills,
    train_undisturbed,
)

pytestmark = pytest.mark.drill
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
def experiment(tmp_path_factory) -> Experiment:
    folder = tmp_path_factory.mktemp("experiment")
    return make_experiment(generate_dataset(folder), folder / "plan", training=TRAINING)


@pytest.fixture(scope="module")
def undisturbed(experiment, tmp_path_factory) -> UndisturbedResult:
    return train_undisturbed(experiment, tmp_path_factory.mktemp("undisturbed"))


def test_a_run_whose_ranks_are_killed_at_eighteen_points_ends_like_an_undisturbed_run(experiment, undisturbed, tmp_path):
    work_folder = tmp_path / "work"
    for kill in KILLS:
        run_ranks(train_and_die, world_size=2, arguments=(train_job(experiment, work_folder), kill), killed_rank=kill.rank)
    finished_training = train_in_forks(experiment, work_folder)
    assert without_timings(finished_training.lines) == undisturbed.lines
    assert state_checksums(checkpoint_of(finished_training)) == undisturbed.state
    export_folder = tmp_path / "export"
    export_folder.mkdir()
    killed_export_job = export_job(experiment, checkpoint_of(finished_training), export_folder)
    run_ranks(export_and_die, world_size=2, arguments=(killed_export_job, Kill("export", 1)), killed_rank=1)
    export_arrays = export_in_forks(experiment, checkpoint_of(finished_training), tmp_path / "again")
    assert export_arrays.keys() == undisturbed.export.keys()
    for name, value in undisturbed.export.items():
        np.testing.assert_array_equal(export_arrays[name], value, err_msg=name)


def test_a_run_whose_agent_and_flow_are_killed_ends_like_an_undisturbed_run(experiment, undisturbed, tmp_path):
    train_through_kills(experiment, tmp_path / "train", victims=("agent", "flow"))
    assert state_checksums(tmp_path / "train" / "checkpoint") == undisturbed.state
    assert not (tmp_path / "train.work").exists()
