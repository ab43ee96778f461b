"""The train and export stages as they are: torchrun, two gloo ranks, real parquet behind them."""

import signal
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from recsys_core.data.events import EventStore
from recsys_core.data.log.config import InteractionsConfig, TimeSplit
from recsys_core.data.log.ingest import ingest_interactions
from recsys_core.data.synthetic import generate
from recsys_core.data.vectors.config import EmbeddingsConfig
from recsys_core.data.vectors.ingest import ingest_embeddings
from recsys_core.errors import InputError
from recsys_core.manifests import PlanManifest, TrainManifest
from recsys_core.models.config import LossConfig, ModelSpec, PretrainedConfig, TwoTowerConfig
from recsys_core.models.two_tower import TwoTower
from recsys_core.sharding.config import ClusterConfig, ShardingConfig
from recsys_core.sharding.planner import plan_sharding
from recsys_core.training.config import TrainingConfig
from recsys_core.training.export import export_vectors
from recsys_core.training.job import Progress
from recsys_core.training.launch import LaunchError
from recsys_core.training.train import _MetricsTail, train

CONFIG = TrainingConfig(epochs=2, batch_size=64, log_every_steps=5, checkpoint_every_steps=15, warmup_steps=5, seed=3)
MODEL = TwoTowerConfig(embedding_dim=16, query_layers=(16,), user_id=True, max_history=8, dropout=0.2)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Both ingests and a plan for two ranks."""
    root = tmp_path_factory.mktemp("stages")
    generate(root / "data", users=200, items=150, events=4_000, days=10, dim=16, cold_items=10)
    vectors = EmbeddingsConfig(paths=(str(root / "data/item_embeddings.parquet"),), vector_column="embedding")
    log = InteractionsConfig(
        paths=(str(root / "data/interactions/*.parquet"),), timestamp_column="timestamp", split=TimeSplit()
    )
    embeddings = ingest_embeddings((vectors,), folder=root / "embeddings")
    interactions = ingest_interactions(log, embeddings=embeddings, folder=root / "interactions")
    model = ModelSpec(config=MODEL, users=interactions.users, items=interactions.items)
    cluster = ClusterConfig(device="cpu", processes_per_node=2)
    plan = plan_sharding(ShardingConfig(cluster=cluster), model=model, batch_size=CONFIG.batch_size, folder=root / "plan")
    return {"model": model, "interactions": interactions, "embeddings": embeddings, "plan": plan}


def run_train(stages, folder: Path, *, config: TrainingConfig = CONFIG, on_progress=lambda progress: None) -> TrainManifest:
    return train(
        config,
        **stages,
        loss=LossConfig(uniform_negatives=32),
        pretrained=PretrainedConfig(),
        folder=folder,
        on_progress=on_progress,
    )


@pytest.fixture(scope="module")
def trained(stages, tmp_path_factory):
    """An undisturbed training and the lines it reported."""
    lines: list[Progress] = []
    manifest = run_train(stages, tmp_path_factory.mktemp("run") / "train", on_progress=lines.append)
    return manifest, lines


def export(stages, manifest: TrainManifest, folder: Path):
    names = ("model", "interactions", "plan")
    return export_vectors(CONFIG, **{name: stages[name] for name in names}, train=manifest, folder=folder)


@pytest.fixture(scope="module")
def exported(stages, trained, tmp_path_factory):
    return export(stages, trained[0], tmp_path_factory.mktemp("run") / "export")


def kill_a_rank(_: Progress) -> None:
    """SIGKILL to one of the two trainers below this process."""
    ranks = [p for p in psutil.Process().children(recursive=True) if "recsys_core.training" in p.cmdline()]
    ranks[-1].send_signal(signal.SIGKILL)


def once_at(step: int, action):
    """An on_progress that calls `action` at the first line at or after `step`."""
    done = threading.Event()

    def on_progress(progress: Progress) -> None:
        if progress.step >= step and not done.is_set():
            done.set()
            action(progress)

    return on_progress


def test_metrics_are_relayed_in_order_while_training_and_the_loss_falls(trained):
    manifest, lines = trained
    steps = [line.step for line in lines]
    assert steps == sorted(set(steps)) and steps[-1] == manifest.steps == lines[0].total_steps
    assert lines[-1].loss == pytest.approx(manifest.final_loss) and lines[-1].loss < lines[0].loss
    assert all(line.samples_per_s > 0 for line in lines)


def test_a_finished_stage_is_kept_and_nothing_is_launched(stages, trained):
    assert run_train(stages, trained[0].folder, on_progress=lambda progress: pytest.fail("trained again")) == trained[0]


def test_a_run_whose_rank_is_killed_ends_bit_identical_to_an_undisturbed_one(stages, trained, exported, tmp_path):
    manifest = run_train(stages, tmp_path / "train", on_progress=once_at(40, kill_a_rank))
    assert manifest.attempts == 2
    assert manifest.final_loss == trained[0].final_loss
    again = export(stages, manifest, tmp_path / "export")
    for name in ("item_vectors.npy", "query_vectors_test.npy", "table_item.npy", "table_user.npy"):
        np.testing.assert_array_equal(np.load(again.path(name)), np.load(exported.path(name)))


def test_after_the_last_attempt_the_error_names_rank_and_signal_and_no_process_is_left(stages, tmp_path):
    config = CONFIG.model_copy(update={"attempts": 1})
    with pytest.raises(LaunchError, match=r"rank [01] was the first to fail, with signal SIGKILL"):
        run_train(stages, tmp_path / "train", config=config, on_progress=once_at(5, kill_a_rank))
    ours = {"recsys_core.training", "recsys_core.training.agent"}
    assert not [p for p in psutil.Process().children(recursive=True) if ours & set(p.cmdline())]
    assert not (tmp_path / "train").exists()


def test_a_run_resumed_with_other_settings_starts_anew_and_reports_its_own_steps(stages, tmp_path):
    once = CONFIG.model_copy(update={"attempts": 1})
    with pytest.raises(LaunchError):
        run_train(stages, tmp_path / "train", config=once, on_progress=once_at(20, kill_a_rank))
    assert any((tmp_path / "train.work" / "checkpoints").glob("step-*[0-9]"))
    lines: list[Progress] = []
    shorter = CONFIG.model_copy(update={"epochs": 1, "keep_checkpoints": 1})
    manifest = run_train(stages, tmp_path / "train", config=shorter, on_progress=lines.append)
    assert lines[0].step == CONFIG.log_every_steps
    assert {line.total_steps for line in lines} == {manifest.steps}


def test_bad_input_that_only_the_ranks_can_see_is_an_input_error_and_is_not_tried_again(stages, tmp_path):
    other = stages["model"].model_copy(update={"items": stages["model"].items + 1})
    with pytest.raises(InputError, match="made for tables"):
        run_train(stages | {"model": other}, tmp_path / "train")


def test_exported_vectors_are_those_of_the_unsharded_model(stages, exported):
    store = EventStore.open(stages["interactions"])
    tables = {name: torch.from_numpy(np.load(exported.path(f"table_{name}.npy"))) for name in ("item", "user")}
    towers = TwoTower(stages["model"]).eval()
    towers.load_state_dict(load_file(exported.path("dense.safetensors")))
    users = np.load(exported.path("query_users_test.npy"))
    assert set(users) == set(store.users_with_targets("test"))
    history = store.before(users, "test", last=MODEL.max_history)
    rows, ends = torch.from_numpy(history.row_T), history.offset[1:]
    pooled = torch.zeros(len(users), 16)
    last = torch.zeros(len(users), 16)
    for index, (length, end) in enumerate(zip(history.length_N, ends, strict=True)):
        if length:
            pooled[index], last[index] = tables["item"][rows[end - length : end]].mean(0), tables["item"][rows[end - 1]]
    with torch.no_grad():
        queries = towers.query({"user": tables["user"][users], "history": pooled, "last_item": last})
        items = towers.candidate(tables["item"])
    torch.testing.assert_close(
        queries, torch.from_numpy(np.load(exported.path("query_vectors_test.npy"))), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(items, torch.from_numpy(np.load(exported.path("item_vectors.npy"))), rtol=1e-4, atol=1e-5)


def test_a_plan_for_more_gpus_than_there_are_is_refused_before_anything_starts(stages, tmp_path):
    if torch.cuda.device_count() >= 64:
        pytest.skip("there are that many GPUs")
    cluster = ClusterConfig(device="cuda", processes_per_node=64)
    plan = plan_sharding(ShardingConfig(cluster=cluster), model=stages["model"], batch_size=64, folder=tmp_path / "plan")
    assert isinstance(plan, PlanManifest)
    with pytest.raises(InputError, match=r"wants 64 GPUs on this host, but there are \d+"):
        run_train(stages | {"plan": plan}, tmp_path / "train")
    assert not (tmp_path / "train").exists() and not (tmp_path / "train.work" / "logs").exists()


def test_a_file_that_a_new_attempt_puts_in_place_is_followed_from_its_start_even_when_it_is_longer(tmp_path):
    def write(path: Path, *, losses: list[float]) -> None:
        lines = [
            Progress(step=step, total_steps=9, epoch=0, loss=loss, learning_rate=0.1, samples_per_s=1.0).model_dump_json()
            + "\n"
            for step, loss in enumerate(losses, 1)
        ]
        path.write_text("".join(lines))

    seen: list[tuple[int, float]] = []
    tail = _MetricsTail(tmp_path / "metrics.jsonl", lambda line: seen.append((line.step, line.loss)))
    write(tmp_path / "metrics.jsonl", losses=[0.25])
    tail.relay()
    write(tmp_path / "new", losses=[0.5, 0.125])  # its first line is shorter than what was read
    (tmp_path / "new").replace(tmp_path / "metrics.jsonl")
    tail.relay()
    assert seen == [(1, 0.25), (2, 0.125)]
