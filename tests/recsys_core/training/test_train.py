"""The train and export stages with torchrun, two gloo ranks and real parquet files."""

import signal
import threading
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import UNPOOLED, FeatureStore
from recsys_core.errors import InputError, LaunchError, StageError
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.held_out import ranking_settings
from recsys_core.launching.rank import Process
from recsys_core.manifests import Dataset, PlanManifest, TrainManifest
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import EmbeddingTables, parameter_name
from recsys_core.models.tables.table_config import DenseOptimizer, TableOptimizer
from recsys_core.models.task import RetrievalHead, RetrievalTask
from recsys_core.serving.quantise import build_tower, user_features
from recsys_core.sharding.config import ClusterConfig, ShardingConfig
from recsys_core.sharding.planner import plan_sharding
from recsys_core.training import temperature
from recsys_core.training import train as train_module
from recsys_core.training.config import TrainingConfig
from recsys_core.training.export.encoding import Encoder
from recsys_core.training.export.export import export_vectors
from recsys_core.training.job import JOB_FILE, RESULT_FILE, Progress, TrainJob, TrainResult
from recsys_core.training.setup import TrainingSetup
from recsys_core.training.train import train
from tests.recsys_core.launching.listening_sockets import collect_listening
from tests.recsys_core.training.forked_training import Experiment, generate_dataset, launch_in_forks, make_experiment

CONFIG = TrainingConfig(
    epochs=2,
    batch_size=256,
    log_every_steps=5,
    checkpoint_every_steps=10,
    table_optimizer=TableOptimizer(warmup_steps=5),
    dense_optimizer=DenseOptimizer(warmup_steps=5),
    seed=3,
)
LONG_CONFIG = CONFIG.model_copy(update={"epochs": 8})
"""For trainings that are killed: the signal arrives many steps before the end."""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Experiment:
    root = tmp_path_factory.mktemp("experiment")
    return make_experiment(generate_dataset(root), root / "plan", training=CONFIG)


def run_train(
    experiment: Experiment,
    folder: Path,
    *,
    config: TrainingConfig = CONFIG,
    on_progress=lambda progress: None,
    sharding=None,
) -> TrainManifest:
    """Execute the stage `train` of an experiment."""
    return train(
        TrainingSetup(experiment.spec, config, experiment.loss, sharding or ShardingConfig()),
        dataset=experiment.dataset,
        plan=experiment.plan,
        folder=folder,
        on_progress=on_progress,
    )


@pytest.fixture(scope="module")
def sockets_by_stage():
    """The listening sockets that each stage opens; the fixtures that run the stages fill it."""
    return {}


class ReportedTraining(NamedTuple):
    """The manifest of a training, and the metrics lines that it reported."""

    manifest: TrainManifest
    lines: list[Progress]


@pytest.fixture(scope="module")
def undisturbed_training(experiment, tmp_path_factory, sockets_by_stage) -> ReportedTraining:
    lines: list[Progress] = []
    with collect_listening() as sockets_by_stage["train"]:
        manifest = run_train(experiment, tmp_path_factory.mktemp("run") / "train", on_progress=lines.append)
    return ReportedTraining(manifest, lines)


def run_export(
    experiment: Experiment,
    manifest: TrainManifest,
    folder: Path,
    *,
    evaluation: EvaluationConfig = EvaluationConfig(),  # noqa: B008  it is frozen
):
    """Execute the stage `export` of an experiment."""
    return export_vectors(
        TrainingSetup(experiment.spec, CONFIG, experiment.loss),
        dataset=Dataset(experiment.dataset.interactions, features=experiment.dataset.features),
        train=manifest,
        folder=folder,
        ranking=ranking_settings(evaluation),
    )


@pytest.fixture(scope="module")
def export(experiment, undisturbed_training, tmp_path_factory, sockets_by_stage):
    """The export manifest of the undisturbed training."""
    with collect_listening() as sockets_by_stage["export"]:
        return run_export(experiment, undisturbed_training.manifest, tmp_path_factory.mktemp("run") / "export")


@pytest.mark.parametrize("stage", ["train", "export"])
def test_ranks_listen_only_on_the_loopback_and_their_agent_does_not_listen(export, sockets_by_stage, stage):
    assert {module for module, _ in sockets_by_stage[stage]} == {"recsys_core.training"}
    assert {address for _, address in sockets_by_stage[stage]} <= {"127.0.0.1", "::1"}


def kill_a_rank(_: Progress) -> None:
    """Send SIGKILL to one of the two ranks, which are descendants of this process."""
    ranks = [process for process in psutil.Process().children(recursive=True) if "recsys_core.training" in process.cmdline()]
    ranks[-1].send_signal(signal.SIGKILL)


def once_at_step(step: int, action):
    """Return a function for `on_progress` that calls `action` once, at the first line of `step` or a later step."""
    was_called = threading.Event()

    def on_progress(progress: Progress) -> None:
        if progress.step >= step and not was_called.is_set():
            was_called.set()
            action(progress)

    return on_progress


def test_metrics_are_relayed_in_order_while_training_and_the_loss_falls(undisturbed_training):
    manifest, lines = undisturbed_training
    steps = [line.step for line in lines]
    assert steps == sorted(set(steps)) and steps[-1] == manifest.num_steps == lines[0].total_steps
    assert lines[-1].loss == pytest.approx(manifest.final_loss) and lines[-1].loss < lines[0].loss
    assert all(line.samples_per_s > 0 for line in lines)
    ndcg_by_epoch = {line.epoch: line.validation["ndcg@10"] for line in lines if line.validation}
    assert set(ndcg_by_epoch) == {1, 2}
    assert manifest.validation["ndcg@10"] == ndcg_by_epoch[manifest.best_epoch] == max(ndcg_by_epoch.values())


def with_automatic_temperature(experiment: Experiment) -> Experiment:
    """Return the experiment with `model.temperature: auto`."""
    config = experiment.spec.config.model_copy(update={"temperature": "auto"})
    return experiment._replace(spec=experiment.spec.model_copy(update={"config": config}))


def test_temperature_auto_trains_the_same_model_as_a_config_with_the_chosen_temperature(
    experiment, undisturbed_training, tmp_path, monkeypatch
):
    monkeypatch.setattr(temperature, "CANDIDATE_TEMPERATURES", (50.0, 0.1))  # 0.1 is the default of model.temperature
    monkeypatch.setattr(train_module, "launch_job", launch_in_forks)
    lines: list[Progress] = []
    automatic_manifest = run_train(with_automatic_temperature(experiment), tmp_path / "train", on_progress=lines.append)
    configured_manifest, configured_lines = undisturbed_training
    assert (automatic_manifest.temperature, configured_manifest.temperature) == (0.1, 0.1)
    assert automatic_manifest.temperature_trials["0.1"] > automatic_manifest.temperature_trials["50"]
    assert configured_manifest.temperature_trials == {}
    assert (automatic_manifest.validation, automatic_manifest.final_loss) == (
        configured_manifest.validation,
        configured_manifest.final_loss,
    )
    assert ModelSpec.model_validate_json(automatic_manifest.path("model.json").read_bytes()) == experiment.spec
    assert [line.step for line in lines] == [line.step for line in configured_lines]  # trials report no lines


def test_a_resumed_training_repeats_only_the_interrupted_trial_of_the_temperature(experiment, tmp_path, monkeypatch):
    experiment = with_automatic_temperature(experiment)
    trained_temperatures: list[float] = []

    def interrupt_third_call(job: TrainJob, **_: object) -> TrainJob:
        trained_temperatures.append(job.spec.config.start_temperature)
        if len(trained_temperatures) == 3:
            raise KeyboardInterrupt
        trial_result = TrainResult(
            num_steps=1, num_epochs=1, num_examples=1, final_loss=1, samples_per_s=1, world_size=2,
            checkpoint="step-1", best_epoch=1, validation={"ndcg@10": 0.1},
        )  # fmt: skip
        (job.work_folder / RESULT_FILE).write_text(trial_result.model_dump_json())
        return job

    monkeypatch.setattr(train_module, "run_attempts", interrupt_third_call)
    with pytest.raises(KeyboardInterrupt):
        run_train(experiment, tmp_path / "train")
    with pytest.raises(FileNotFoundError):  # after the trials, the fake training writes no checkpoint
        run_train(experiment, tmp_path / "train")
    assert trained_temperatures[:3] == list(temperature.CANDIDATE_TEMPERATURES[:3])  # the third trial was interrupted
    assert trained_temperatures[3:5] == list(temperature.CANDIDATE_TEMPERATURES[2:])


def test_an_interrupted_trial_of_the_temperature_is_launched_again_with_the_same_log_folder(experiment, tmp_path, monkeypatch):
    experiment = with_automatic_temperature(experiment)
    log_folders: list[Path] = []

    def fail_to_launch(job_path: Path, *, folder: Path, **_: object) -> None:
        folder.mkdir(parents=True)  # as `launch` does
        log_folders.append(folder)
        raise KeyboardInterrupt if len(log_folders) == 1 else StageError("second launch")

    monkeypatch.setattr(train_module, "launch", fail_to_launch)
    with pytest.raises(KeyboardInterrupt):
        run_train(experiment, tmp_path / "train")
    with pytest.raises(StageError, match="second launch"):
        run_train(experiment, tmp_path / "train")
    assert log_folders == [tmp_path / "train.work" / "temperature" / "0.07" / "logs" / "attempt-1"] * 2


def test_a_training_with_an_empty_job_file_starts_from_scratch(experiment, tmp_path, monkeypatch):
    work_folder = tmp_path / "train.work"
    (work_folder / "checkpoints").mkdir(parents=True)
    (work_folder / JOB_FILE).write_bytes(b"")
    monkeypatch.setattr(train_module, "launch", Mock(side_effect=StageError("launched")))
    with pytest.raises(StageError, match="launched"):
        run_train(experiment, tmp_path / "train")
    assert not (work_folder / "checkpoints").exists()


def test_a_finished_stage_is_kept_and_nothing_is_launched(experiment, undisturbed_training):
    manifest, _ = undisturbed_training
    assert run_train(experiment, manifest.folder, on_progress=lambda progress: pytest.fail("trained again")) == manifest


def test_a_work_folder_that_is_a_link_is_rejected_and_the_files_behind_it_remain(experiment, tmp_path):
    old_log_folder = tmp_path / "archive" / "logs" / "attempt-1"
    old_log_folder.mkdir(parents=True)
    for stage in ("train", "export"):
        (tmp_path / f"{stage}.work").symlink_to(tmp_path / "archive")
    with pytest.raises(InputError, match=r"train\.work is a link"):
        run_train(experiment, tmp_path / "train")
    with pytest.raises(InputError, match=r"export\.work is a link"):
        run_export(experiment, experiment.plan, tmp_path / "export")
    assert old_log_folder.is_dir()


@pytest.mark.drill
def test_after_the_last_attempt_the_error_names_rank_and_signal(experiment, tmp_path):
    config = LONG_CONFIG.model_copy(update={"max_attempts": 1})
    with pytest.raises(LaunchError, match=r"rank [01] was the first to fail, with signal SIGKILL"):
        run_train(experiment, tmp_path / "train", config=config, on_progress=once_at_step(5, kill_a_rank))
    nightjar_modules = {"recsys_core.training", "recsys_core.launching"}
    assert not [process for process in psutil.Process().children(recursive=True) if nightjar_modules & set(process.cmdline())]
    assert not (tmp_path / "train").exists()


@pytest.mark.drill
def test_a_run_resumed_with_other_settings_starts_from_scratch_and_reports_its_own_steps(experiment, tmp_path):
    config_of_one_attempt = LONG_CONFIG.model_copy(update={"max_attempts": 1})
    with pytest.raises(LaunchError):
        run_train(experiment, tmp_path / "train", config=config_of_one_attempt, on_progress=once_at_step(20, kill_a_rank))
    assert any((tmp_path / "train.work" / "checkpoints").glob("step-*[0-9]"))
    lines: list[Progress] = []
    config_of_one_epoch = CONFIG.model_copy(update={"epochs": 1, "keep_checkpoints": 1})
    manifest = run_train(experiment, tmp_path / "train", config=config_of_one_epoch, on_progress=lines.append)
    assert lines[0].step == CONFIG.log_every_steps
    assert {line.total_steps for line in lines} == {manifest.num_steps}


@pytest.mark.drill
def test_an_input_error_in_a_rank_is_raised_and_not_retried(experiment, tmp_path):
    spec = experiment.spec
    larger_table = spec.tables["item"].model_copy(update={"num_rows": spec.num_items + 1})
    spec_of_more_items = spec.model_copy(update={"tables": spec.tables | {"item": larger_table}})
    with pytest.raises(InputError, match="made for tables"):
        run_train(experiment._replace(spec=spec_of_more_items), tmp_path / "train")


def test_exported_vectors_equal_the_vectors_of_the_unsharded_model(experiment, export):
    store = EventStore.open(experiment.dataset.interactions)
    spec, cpu = experiment.spec, torch.device("cpu")
    task = RetrievalTask(
        RetrievalHead(
            spec, loss=experiment.loss, item_count_I=store.train_count_I, popularity_rank={}, weight_decay={}, group=None
        ),
        device=cpu,
    )
    task.embedding_tables = EmbeddingTables(spec, device=cpu)
    for name in spec.tables:
        weight_RD = torch.from_numpy(np.load(export.path(f"table_{name}.npy")))
        task.embedding_tables.get_parameter(parameter_name(spec, name)).data.copy_(weight_RD)
    task.head.load_state_dict(load_file(export.path("dense.safetensors")))
    assembler = Assembler(user_batch_key=UNPOOLED, features=FeatureStore.open(experiment.dataset.features))
    encoder = Encoder(task.eval(), store, assembler, Process(rank=0, world_size=1, device=cpu))
    with torch.no_grad():
        history_vector_ID, item_vector_ID = encoder.encode_items(np.arange(spec.num_items))
        tolerances = {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(np.load(export.path("history_items.npy")), history_vector_ID, **tolerances)
        np.testing.assert_allclose(np.load(export.path("item_vectors.npy")), item_vector_ID, **tolerances)
        for split in ("validation", "test"):
            user_U = np.load(export.path(f"query_users_{split}.npy"))
            np.testing.assert_array_equal(user_U, store.users_with_targets(split))
            query_BD = np.load(export.path(f"query_vectors_{split}.npy"))
            np.testing.assert_allclose(query_BD, encoder.encode_queries(user_U, split=split), **tolerances)


def test_an_export_is_reused_if_the_evaluation_has_other_cut_offs_and_metrics(experiment, undisturbed_training, export):
    assert {"ranking_test_top.npy", "ranking_test_positions.npy", "ranking_test_cold_positions.npy"} <= export.files.keys()
    other_evaluation = EvaluationConfig(ks=(5,), metrics=("recall",))
    assert export.ranking == ranking_settings(EvaluationConfig()) != ranking_settings(other_evaluation)
    assert run_export(experiment, undisturbed_training.manifest, export.folder, evaluation=other_evaluation) == export


def test_the_served_tower_with_fp32_computes_the_exported_query_vectors(experiment, export):
    spec, store = experiment.spec, EventStore.open(experiment.dataset.interactions)
    tower = build_tower(
        spec,
        history_items=np.load(export.path("history_items.npy")),
        tables={name: np.load(export.path(f"table_{name}.npy")) for name in spec.on_side("query")},
        dense=load_file(export.path("dense.safetensors")),
        quantization="fp32",
    )
    assert set(user_features(spec)) == {"user.country", "user.groups", "user.age"}
    features = FeatureStore.read(experiment.dataset.features.folder, user_features(spec))
    for split in ("validation", "test"):
        user_U = np.load(export.path(f"query_users_{split}.npy"))
        query_BD = tower(user_U, store.items_before(user_U, split), features=features)
        np.testing.assert_allclose(query_BD, np.load(export.path(f"query_vectors_{split}.npy")), rtol=1e-4, atol=1e-5)


def test_a_plan_for_more_gpus_than_the_host_has_is_rejected_before_the_launch(experiment, tmp_path):
    if torch.cuda.device_count() >= 64:
        pytest.skip("there are that many GPUs")
    cluster = ClusterConfig(device="cuda", processes_per_node=64)
    plan = plan_sharding(
        ShardingConfig(cluster=cluster), model=experiment.spec, batch_size=CONFIG.batch_size, folder=tmp_path / "plan"
    )
    assert isinstance(plan, PlanManifest)
    with pytest.raises(InputError, match=r"needs 64 GPUs on this host, but there are \d+"):
        run_train(experiment._replace(plan=plan), tmp_path / "train")
    assert not (tmp_path / "train").exists() and not (tmp_path / "train.work" / "logs").exists()


def test_a_catalogue_above_the_limit_catalogue_gb_is_rejected_before_the_launch(experiment, tmp_path):
    loss = LossConfig(negatives="all", catalogue_gb=1e-6)
    with pytest.raises(InputError, match=r"loss.negatives is all, but .* items / 2 ranks x .* set loss.negatives to sampled"):
        run_train(experiment._replace(loss=loss), tmp_path / "train")
    assert not list(tmp_path.iterdir())


@pytest.mark.drill
def test_after_a_second_failure_training_continues_with_fewer_ranks(experiment, tmp_path, monkeypatch):
    config = LONG_CONFIG.model_copy(update={"max_attempts": 3, "min_processes": 1})
    lines: list[Progress] = []
    kill_steps: list[int] = []

    def kill_twice(progress: Progress) -> None:
        lines.append(progress)
        if progress.step >= 20 * (len(kill_steps) + 1) and len(kill_steps) < 2:
            kill_steps.append(progress.step)
            kill_a_rank(progress)

    sharding = ShardingConfig(cluster=ClusterConfig(device="cpu", processes_per_node=2))
    manifest = run_train(experiment, tmp_path / "train", config=config, on_progress=kill_twice, sharding=sharding)
    assert (manifest.num_attempts, manifest.world_size) == (3, 1)

    undisturbed_lines: list[Progress] = []
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "launch_job", launch_in_forks)
        undisturbed_manifest = run_train(
            experiment, tmp_path / "undisturbed", config=LONG_CONFIG, on_progress=undisturbed_lines.append
        )
    assert (manifest.num_steps, manifest.num_examples) == (undisturbed_manifest.num_steps, undisturbed_manifest.num_examples)
    assert [line.step for line in lines] == sorted({line.step for line in undisturbed_lines})
    assert manifest.final_loss == pytest.approx(undisturbed_manifest.final_loss, rel=0.05)
    run_export(experiment, manifest, tmp_path / "export")
