"""Training and export on two hosts compared bit by bit with one host. Both hosts are this machine."""

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
TRAINING_CONFIG = TrainingConfig(epochs=1, batch_size=64, log_every_steps=5, seed=3)


def plan_for(experiment: Experiment, folder: Path, *, num_hosts: int) -> PlanManifest:
    """Plan two ranks on one host or on two hosts. Each rank has half of the rows of every table."""
    return plan_sharding(
        ShardingConfig(
            cluster=ClusterConfig(device="cpu", num_nodes=num_hosts, processes_per_node=2 // num_hosts),
            tables={name: TableConstraint(sharding_types=("row_wise",)) for name in experiment.spec.tables},
        ),
        model=experiment.spec,
        batch_size=TRAINING_CONFIG.batch_size,
        folder=folder,
    )


def train_and_export(
    experiment: Experiment, folder: Path, *, launcher: Launcher
) -> tuple[TrainManifest, list[Progress], ExportManifest]:
    """Train and export. Return the manifest of the training, its metrics lines, and the manifest of the export."""
    setup = TrainingSetup(experiment.spec, TRAINING_CONFIG, experiment.loss, launcher=launcher)
    plan = plan_for(experiment, folder / "plan", num_hosts=1 if launcher.kind == "local" else 2)
    metrics_lines: list[Progress] = []
    train_manifest = train(
        setup,
        dataset=experiment.dataset,
        plan=plan,
        folder=folder / "train",
        on_progress=metrics_lines.append,
    )
    export_manifest = export_vectors(
        setup,
        dataset=Dataset(experiment.dataset.interactions, features=experiment.dataset.features),
        train=train_manifest,
        folder=folder / "export",
    )
    return train_manifest, metrics_lines, export_manifest


@pytest.mark.drill
def test_two_hosts_with_one_rank_each_train_the_same_model_as_one_host_with_two_ranks(tmp_path: Path) -> None:
    experiment = make_experiment(generate_dataset(tmp_path), tmp_path / "plan", training=TRAINING_CONFIG)
    expected_train_manifest, expected_metrics_lines, expected_export_manifest = train_and_export(
        experiment, tmp_path / "one host", launcher=ONE_HOST
    )
    train_manifest, metrics_lines, export_manifest = train_and_export(experiment, tmp_path / "two hosts", launcher=TWO_HOSTS)
    assert [line.loss for line in metrics_lines] == [line.loss for line in expected_metrics_lines] and len(metrics_lines) > 3
    assert (train_manifest.final_loss, train_manifest.num_attempts) == (expected_train_manifest.final_loss, 1)
    assert train_manifest.validation == expected_train_manifest.validation
    array_names = [name for name in expected_export_manifest.files if name.endswith(".npy")]
    assert "item_vectors.npy" in array_names
    for name in array_names:
        np.testing.assert_array_equal(
            np.load(export_manifest.path(name)), np.load(expected_export_manifest.path(name)), err_msg=name
        )
