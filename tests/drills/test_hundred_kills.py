"""Trainings are killed a hundred times: a rank at a random place (80 times), and the agent, a rank or the flow (20 times)."""

import random
from pathlib import Path

import pytest

from recsys_core.training.checkpoint import latest_checkpoint
from recsys_core.training.job import CHECKPOINTS_FOLDER
from tests.gloo import run_ranks
from tests.recsys_core.training.forked_training import (
    checkpoint_of,
    generate_dataset,
    make_experiment,
    train_in_forks,
    train_job,
    without_timings,
)
from tests.recsys_core.training.kill_points import (
    NUM_STEPS,
    TRAINING,
    Kill,
    state_checksums,
    train_and_die,
    train_through_kills,
    train_undisturbed,
)

pytestmark = pytest.mark.drill
PLACES_OF_ANY_RANK = ("step", "staged", "written", "measured")
PLACES_OF_RANK_0 = ("hashed", "renaming", "renamed", "line", "removing")
NUM_KILLS_AT_PLACES = 80


def test_trainings_that_are_killed_a_hundred_times_end_like_an_undisturbed_training(tmp_path):
    experiment = make_experiment(generate_dataset(tmp_path), tmp_path / "plan", training=TRAINING)
    undisturbed = train_undisturbed(experiment, tmp_path)
    generator, num_kills_left = random.Random(1), NUM_KILLS_AT_PLACES
    while num_kills_left:
        work_folder = tmp_path / f"killed-{num_kills_left}"
        while num_kills_left and (num_steps_done := checkpoint_step(work_folder)) < NUM_STEPS:
            # In the last 9 steps, there may be no old checkpoint to remove, so a kill at "removing" might not happen.
            place = generator.choice(
                PLACES_OF_ANY_RANK + (PLACES_OF_RANK_0 if num_steps_done < NUM_STEPS - 9 else PLACES_OF_RANK_0[:-1])
            )
            victim = generator.randrange(2) if place in PLACES_OF_ANY_RANK else 0
            kill = Kill(place, victim, step=generator.randint(num_steps_done + 1, min(num_steps_done + 3, NUM_STEPS)))
            run_ranks(train_and_die, world_size=2, arguments=(train_job(experiment, work_folder), kill), killed_rank=victim)
            num_kills_left -= 1
        finished_training = train_in_forks(experiment, work_folder)
        assert without_timings(finished_training.lines) == undisturbed.lines
        assert state_checksums(checkpoint_of(finished_training)) == undisturbed.state

    for turn in range(5):
        victims = generator.choices(("agent", "rank", "flow"), k=4)
        folder = tmp_path / f"train-{turn}"
        train_through_kills(experiment, folder, victims=victims)
        assert state_checksums(folder / "checkpoint") == undisturbed.state


def checkpoint_step(work_folder: Path) -> int:
    """Return the step of the newest intact checkpoint."""
    checkpoint = latest_checkpoint(work_folder / CHECKPOINTS_FOLDER, fingerprint="f")
    return checkpoint.step if checkpoint is not None else 0
