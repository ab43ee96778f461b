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
    Kill("step", rank=1, step=2),  # before the first checkpoint
    Kill("staged", rank=0, step=3),
    Kill("written", rank=1, step=6),
    Kill("written", rank=0, step=6),
    Kill("hashed", rank=0, step=6),
    Kill("renaming", rank=0, step=6),
    Kill("renamed", rank=0, step=9),
    Kill("measured", rank=1, step=13),  # at the end of the first epoch
    Kill("line", rank=0, step=16),  # after half of a metrics line
    Kill("removing", rank=0, step=18),
    Kill("step", rank=0, step=20),
    Kill("staged", rank=1, step=24),
    Kill("step", rank=1, step=26),
    Kill("renaming", rank=0, step=30),
    Kill("written", rank=0, step=33),
    Kill("line", rank=0, step=36),
    Kill("result", rank=0),
)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Experiment:
    folder = tmp_path_factory.mktemp("experiment")
    return make_experiment(generate_dataset(folder), folder / "plan", training=TRAINING)


@pytest.fixture(scope="module")
def undisturbed_result(experiment, tmp_path_factory) -> UndisturbedResult:
    return train_undisturbed(experiment, tmp_path_factory.mktemp("undisturbed"))


def test_a_run_whose_ranks_are_killed_at_eighteen_points_ends_like_an_undisturbed_run(experiment, undisturbed_result, tmp_path):
    work_folder = tmp_path / "work"
    for kill in KILLS:
        run_ranks(train_and_die, world_size=2, arguments=(train_job(experiment, work_folder), kill), killed_rank=kill.rank)
    finished_training = train_in_forks(experiment, work_folder)
    assert without_timings(finished_training.lines) == undisturbed_result.lines
    assert state_checksums(checkpoint_of(finished_training)) == undisturbed_result.state
    export_folder = tmp_path / "export"
    export_folder.mkdir()
    killed_export_job = export_job(experiment, checkpoint_of(finished_training), export_folder)
    run_ranks(export_and_die, world_size=2, arguments=(killed_export_job, Kill("export", rank=1)), killed_rank=1)
    export_arrays = export_in_forks(experiment, checkpoint_of(finished_training), tmp_path / "again")
    assert export_arrays.keys() == undisturbed_result.export.keys()
    for name, value in undisturbed_result.export.items():
        np.testing.assert_array_equal(export_arrays[name], value, err_msg=name)


def test_a_run_whose_agent_and_flow_are_killed_ends_like_an_undisturbed_run(experiment, undisturbed_result, tmp_path):
    train_through_kills(experiment, tmp_path / "train", victims=("agent", "flow"))
    assert state_checksums(tmp_path / "train" / "checkpoint") == undisturbed_result.state
    assert not (tmp_path / "train.work").exists()
