"""Estimated sizes of checkpoints and exports, compared with the files that are written, and disks that are too small."""

from pathlib import Path

import pytest

from recsys_core.errors import InputError
from recsys_core.manifests import Dataset, ExportManifest, TrainManifest
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.index import build_indexes
from recsys_core.training.config import TrainingConfig, ValidationConfig
from recsys_core.training.export.export import export_vectors
from recsys_core.training.setup import TrainingSetup, export_bytes
from recsys_core.training.train import train
from tests.recsys_core.training.forked_training import (
    checkpoint_of,
    export_in_forks,
    generate_dataset,
    make_experiment,
    train_in_forks,
)

CONFIG = TrainingConfig(epochs=1, batch_size=128, validation=None, checkpoint_every_steps=1000, seed=5)
TABLES = {"item": TableConfig(optimizer=TableOptimizer(kind="adagrad"))}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    root = tmp_path_factory.mktemp("experiment")
    return make_experiment(generate_dataset(root), root / "plan", training=CONFIG, tables=TABLES)


def test_the_estimates_are_the_bytes_of_the_arrays_in_a_checkpoint_and_in_an_export(experiment, tmp_path):
    finished_training = train_in_forks(experiment, tmp_path / "work")
    array_by_name = export_in_forks(experiment, checkpoint_of(finished_training), tmp_path / "export")
    bytes_by_table_array = {
        name: array.nbytes for name, array in array_by_name.items() if name.startswith(("table_", "state_"))
    }
    bytes_by_vector_array = {name: array_by_name[name].nbytes for name in ("item_vectors.npy", "history_items.npy")}
    estimated_bytes = TrainingSetup(experiment.spec, CONFIG).checkpoint_bytes(work_folder=tmp_path / "none", steps_per_epoch=10)
    averaging_config = CONFIG.model_copy(update={"averaged_epochs": 2})
    estimated_bytes_with_average = TrainingSetup(experiment.spec, averaging_config).checkpoint_bytes(
        work_folder=tmp_path / "none", steps_per_epoch=10
    )
    weight_bytes = sum(num_bytes for name, num_bytes in bytes_by_table_array.items() if name.startswith("table_"))
    assert estimated_bytes_with_average == estimated_bytes + weight_bytes
    checkpoint_bytes = sum(path.stat().st_size for path in checkpoint_of(finished_training).glob("*.distcp"))
    assert estimated_bytes == sum(bytes_by_table_array.values()) < checkpoint_bytes  # a checkpoint also contains the layers
    bytes_by_array = bytes_by_table_array | bytes_by_vector_array
    largest_bytes = max(num_bytes for name, num_bytes in bytes_by_array.items() if not name.startswith("state_"))
    # While an array is built, its parts are on the disk too.
    assert export_bytes(experiment.spec) == sum(bytes_by_array.values()) + largest_bytes


@pytest.mark.parametrize(
    ("config_changes", "steps_per_epoch", "num_checkpoints"),
    [
        ({"validation": None}, 1000, 1),  # step 1000 is the last step
        ({"validation": None}, 1001, 2),  # steps 1000 and 1001
        ({"validation": None, "epochs": 3}, 1500, 3),  # two are kept (keep_checkpoints) while the third is written
        ({"validation": ValidationConfig()}, 10, 1),
        ({"validation": ValidationConfig(every_epochs=2), "epochs": 4}, 10, 2),  # each of two validations may save a best epoch
    ],
)
def test_the_estimate_counts_the_checkpoints_that_exist_at_the_same_time(
    experiment, tmp_path, config_changes, steps_per_epoch, num_checkpoints
):
    one_checkpoint_bytes = TrainingSetup(experiment.spec, CONFIG).checkpoint_bytes(work_folder=tmp_path, steps_per_epoch=1)
    setup = TrainingSetup(experiment.spec, CONFIG.model_copy(update=config_changes))
    assert (
        setup.checkpoint_bytes(work_folder=tmp_path, steps_per_epoch=steps_per_epoch) == num_checkpoints * one_checkpoint_bytes
    )


def test_files_of_an_earlier_attempt_are_subtracted_from_the_estimate(experiment, tmp_path):
    setup = TrainingSetup(experiment.spec, CONFIG)
    estimated_bytes_without_files = setup.checkpoint_bytes(work_folder=tmp_path, steps_per_epoch=10)
    (tmp_path / "checkpoint").write_bytes(bytes(1_000))
    assert setup.checkpoint_bytes(work_folder=tmp_path, steps_per_epoch=10) == estimated_bytes_without_files - 1_000


def test_training_starts_only_if_its_checkpoints_fit_on_the_disk(experiment, small_disk: Path):
    (small_disk / "other").write_bytes(bytes(2**20 - 2**16))  # 64 KiB of 1 MiB stay free
    config = CONFIG.model_copy(update={"checkpoint_every_steps": 1})
    with pytest.raises(InputError, match=rf"^{small_disk}/train: the train stage takes at least 0\.000 GiB, but the disk has"):
        train(
            TrainingSetup(experiment.spec, config, experiment.loss),
            dataset=experiment.dataset,
            plan=experiment.plan,
            folder=small_disk / "train",
            on_progress=lambda _: pytest.fail("the training has started"),
        )
    assert {path.name for path in small_disk.iterdir()} == {"other"}


def test_export_and_index_start_only_if_their_arrays_fit_on_the_disk(experiment, small_disk: Path):
    spec = ModelSpec.sized(TwoTowerConfig(), num_users=10, num_items=100_000)
    stage_fields = {"fingerprint": "f", "seconds": 1.0, "files": {}, "folder": small_disk}
    train_manifest = TrainManifest(
        world_size=2,
        num_steps=1,
        num_epochs=1,
        num_examples=1,
        final_loss=0.1,
        samples_per_s=1.0,
        num_attempts=1,
        best_epoch=None,
        validation={},
        warm_from=None,
        **stage_fields,
    )
    with pytest.raises(InputError, match=rf"^{small_disk}/export: the export stage takes at least 0\.0\d\d GiB, but the disk"):
        export_vectors(
            TrainingSetup(spec, CONFIG, experiment.loss),
            dataset=Dataset(experiment.dataset.interactions),
            train=train_manifest,
            folder=small_disk / "export",
        )
    export = ExportManifest(num_items=100_000, dim=64, similarity="dot", num_queries={}, **stage_fields)
    with pytest.raises(
        InputError, match=rf"^{small_disk}/index: the build_index stage takes at least 0\.073 GiB, but the disk"
    ):
        build_indexes(IndexConfig(), export=export, folder=small_disk / "index")
