"""Train and export on two hosts (this machine twice, through TorchX) compared with one host: bit for bit the same."""

from pathlib import Path

import numpy as np
import pytest

from recsys_core.launching.config import Launcher
from recsys_core.manifests import Dataset, ExportManifest, PlanManifest, TrainManifest
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.planner import plan_sharding
from recsys_core.training.config import TrainingConfig
from recsys_core.training.export.export import export_vectors
from recsys_core.training.job import Progress
from recsys_core.training.setup import TrainingSetup
from recsys_core.training.train import train
from tests.recsys_core.launching.scripted_launches import ONE_HOST, TWO_HOSTS
from tests.recsys_core.training.forked_training import Experiment, generate_dataset, make_experiment

pytest.importorskip("torchx")
CONFIG = TrainingConfig(epochs=1, batch_size=64, log_every_steps=5, seed=3)


def plan_for(experiment: Experiment, folder: Path, *, nodes: int) -> PlanManifest:
    """Plan two ranks, on one host or two, each with half of the rows of every table."""
    return plan_sharding(
        ShardingConfig(
            cluster=ClusterConfig(device="cpu", num_nodes=nodes, processes_per_node=2 // nodes),
            tables={name: TableConstraint(sharding_types=("row_wise",)) for name in experiment.spec.tables},
        ),
        model=experiment.spec,
        batch_size=CONFIG.batch_size,
        folder=folder,
    )


def run(experiment: Experiment, folder: Path, *, launcher: Launcher) -> tuple[TrainManifest, list[Progress], ExportManifest]:
    setup = TrainingSetup(experiment.spec, CONFIG, experiment.loss, launcher=launcher)
    plan = plan_for(experiment, folder / "plan", nodes=1 if launcher.kind == "local" else 2)
    lines: list[Progress] = []
    trained = train(
        setup,
        dataset=experiment.data,
        plan=plan,
        folder=folder / "train",
        on_progress=lines.append,
    )
    exported = export_vectors(
        setup,
        dataset=Dataset(experiment.data.interactions, features=experiment.data.features),
        train=trained,
        folder=folder / "export",
    )
    return trained, lines, exported


@pytest.mark.drill
def test_two_hosts_with_one_rank_each_train_the_same_model_as_one_host_with_two_ranks(tmp_path: Path) -> None:
    experiment = make_experiment(generate_dataset(tmp_path), tmp_path / "plan", training=CONFIG)
    here, lines_here, one = run(experiment, tmp_path / "here", launcher=ONE_HOST)
    there, lines_there, two = run(experiment, tmp_path / "there", launcher=TWO_HOSTS)
    assert [line.loss for line in lines_there] == [line.loss for line in lines_here] and len(lines_here) > 3
    assert (there.final_loss, there.validation, there.num_attempts) == (here.final_loss, here.validation, 1)
    arrays = [name for name in one.files if name.endswith(".npy")]
    assert "item_vectors.npy" in arrays
    for name in arrays:
        np.testing.assert_array_equal(np.load(two.path(name)), np.load(one.path(name)), err_msg=name)
