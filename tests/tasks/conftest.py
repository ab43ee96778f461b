"""Real stages of a good or a bad model: the items form clusters, and each user has items of one cluster."""

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markupsafe import Markup
from mlflow import MlflowClient

from recsys_core import plots
from recsys_core.data_report.limits import DataReportConfig
from recsys_core.data_report.report import report_data
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.manifests import (
    DataReportManifest,
    Dataset,
    EvaluationManifest,
    ExportManifest,
    IndexManifest,
    PackageManifest,
    PlanManifest,
    TrainManifest,
)
from recsys_core.models.config import PackageConfig, TowerConfig, TwoTowerConfig
from recsys_core.models.history_config import MeanHistory
from recsys_core.models.spec import ModelSpec
from recsys_core.models.towers import QueryTower
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.index import build_indexes
from recsys_core.serving.package import build_package
from recsys_core.training.job import Progress
from tasks.gate import by_hand, version_tester
from tasks.gate.sample import Answers, K, UserSample
from tasks.gate.smoke_test import UnusableVersionError
from tasks.stages import registration
from tests.recsys_core.evaluation.stage_folders import write_export_stage, write_interactions_stage
from tests.recsys_core.manifests.committed_stage import commit_stage

NUM_ITEMS, NUM_USERS, DIM, NUM_CLUSTERS = 120, 30, 8, 4
STEPS = (20, 40, 60)
"""Training steps with a line in metrics.jsonl."""
_PATH_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
)
"""Table and column of each path below the workspace in MLflow's database."""


@pytest.fixture(autouse=True)
def same_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore `sys.path`, to which MLflow adds a folder per loaded model. A long path slows down imports in later tests."""
    monkeypatch.setattr(sys, "path", sys.path)


@pytest.fixture
def workspace(tmp_path: Path, new_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with an empty MLflow database."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(new_database, tmp_path)
    return tmp_path


@pytest.fixture
def in_process_predictions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Load and call models in this process, which is faster than in a new process. Return the model URI of each call."""
    return _predict_in_process(monkeypatch)


def _predict_in_process(patch: pytest.MonkeyPatch) -> list[str]:
    model_uris: list[str] = []

    def predict(sample: UserSample, *, model_uri: str, client: MlflowClient, output_file: Path, **_: Any) -> Answers:
        model_uris.append(model_uri)
        mlflow.set_tracking_uri(client.tracking_uri)
        query_columns = pq.read_table(sample.histories_file).to_pydict()
        try:
            model = mlflow.pyfunc.load_model(model_uri, suppress_warnings=True)  # as in tasks.gate.smoke_process
        except Exception as error:
            raise UnusableVersionError(f"{model_uri}: {error}") from None
        answers = model.predict(pd.DataFrame(query_columns), params={"k": K, "exclude_stored_history": False})
        answer_table = pa.table({name: [answer[name] for answer in answers] for name in ("item_ids", "scores")})
        pq.write_table(answer_table, output_file)
        return Answers(answer_table["item_ids"].combine_chunks(), cpu_s=2.0, num_bytes=10**6)

    for module in (registration, by_hand):
        patch.setattr(module, "ModelProcess", nullcontext)
    patch.setattr(version_tester, "predict_in_subprocess", predict)
    return model_uris


@pytest.fixture
def empty_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save plots as empty pictures, because drawing takes a third of the time of a registration."""
    _save_empty_plots(monkeypatch)


def _save_empty_plots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plots, "to_svg", lambda figure: Markup("<svg></svg>"))
    patch.setattr(plots, "save_png", lambda figure, path: path.touch() or path)


class Stages(NamedTuple):
    """The stages that are arguments of `register`."""

    dataset: Dataset
    data_report: DataReportManifest
    plan: PlanManifest
    train_manifest: TrainManifest
    evaluation: EvaluationManifest
    index: IndexManifest
    package: PackageManifest
    export: ExportManifest


BuildStages = Callable[..., Stages]
AddVersions = Callable[..., None]


@pytest.fixture(scope="session")
def build_stages(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Stages]:
    """A function that returns the stages of a good model. With `shuffled=True`, swapped item vectors make it bad."""
    stages_by_shuffled: dict[bool, Stages] = {}

    def build(*, shuffled: bool = False) -> Stages:
        if shuffled not in stages_by_shuffled:
            stages_by_shuffled[shuffled] = _build_stages(tmp_path_factory.mktemp("stages"), shuffled=shuffled)
        return stages_by_shuffled[shuffled]

    return build


@pytest.fixture(scope="session")
def register_once(
    tmp_path_factory: pytest.TempPathFactory, new_database: Path, build_stages: Callable[..., Stages]
) -> Callable[..., Path]:
    """A function that returns a workspace with versions of good or bad models. Equal arguments give the same workspace."""
    from tests.tasks.registration import prepare_run, register_version

    workspace_by_qualities: dict[tuple[str, ...], Path] = {}

    def register(*qualities: str) -> Path:
        if qualities not in workspace_by_qualities:
            workspace = tmp_path_factory.mktemp("versions")
            shutil.copy(new_database, workspace)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MLFLOW_TRACKING_URI", "")  # so that the patch removes the value that MLflow sets
                _predict_in_process(patch)
                _save_empty_plots(patch)
                for quality, run_id in zip(qualities, ("one", "two", "three"), strict=False):
                    register_version(build_stages(shuffled=quality == "bad"), prepare_run(workspace, run_id))
            workspace_by_qualities[qualities] = workspace
        return workspace_by_qualities[qualities]

    return register


@pytest.fixture
def add_versions(workspace: Path, register_once: Callable[..., Path]) -> Callable[..., None]:
    """A function that fills the workspace with the versions of good or bad models.

    `add_versions("good", "bad")` gives the state after two registrations, of a good model in run `one` and of a bad model in
    run `two`. The versions are registered once and copied, because a registration takes a third of a second.
    """

    def add(*qualities: str) -> None:
        workspace_with_versions = register_once(*qualities)
        shutil.copytree(workspace_with_versions, workspace, dirs_exist_ok=True)
        with closing(sqlite3.connect(workspace / "mlflow.db")) as database, database:
            for table, column in _PATH_COLUMNS:
                paths = [str(workspace_with_versions), str(workspace)]
                database.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", paths)

    return add


def _build_stages(folder: Path, *, shuffled: bool) -> Stages:
    """Build the stages of a run up to the package. Shuffled item vectors give a model with a low recall."""
    random = np.random.default_rng(5)
    cluster_I = np.arange(NUM_ITEMS) % NUM_CLUSTERS
    item_vector_ID = (np.eye(DIM)[cluster_I] + random.normal(0, 0.1, (NUM_ITEMS, DIM))).astype(np.float32)
    item_rows_by_user = [
        random.permutation(np.flatnonzero(cluster_I == user % NUM_CLUSTERS)).tolist() for user in range(NUM_USERS)
    ]
    interactions = write_interactions_stage(
        folder / "interactions",
        train=[item_rows[:6] for item_rows in item_rows_by_user],
        validation=[[] for _ in item_rows_by_user],
        test=[item_rows[6:9] for item_rows in item_rows_by_user],
        num_items=NUM_ITEMS,
        item_ids=[5000 + 3 * row for row in range(NUM_ITEMS)],
        user_ids=[f"user-{user}" for user in range(NUM_USERS)],
    )
    if shuffled:
        item_vector_ID = item_vector_ID[random.permutation(NUM_ITEMS)]
    config = TwoTowerConfig(embedding_dim=DIM, query=TowerConfig(layers=()), history=MeanHistory(length=5))
    spec = ModelSpec.sized(config, num_users=NUM_USERS, num_items=NUM_ITEMS)
    unit_vector_ID = item_vector_ID / np.linalg.norm(item_vector_ID, axis=1, keepdims=True)
    query_UD = np.stack([unit_vector_ID[item_rows[1:6]].mean(axis=0) for item_rows in item_rows_by_user])
    export = write_export_stage(
        folder / "export",
        item_vectors=unit_vector_ID,
        queries={"test": (range(NUM_USERS), query_UD)},
        spec=spec,
        tables={"item": item_vector_ID},
        history_items=item_vector_ID,
        dense={f"query.{name}": weight for name, weight in QueryTower(spec).state_dict().items()},
    )
    index = build_indexes(IndexConfig(served="flat"), export=export, folder=folder / "index")
    evaluation = evaluate(EvaluationConfig(), export=export, dataset=Dataset(interactions), folder=folder / "evaluation")
    package = build_package(
        PackageConfig(),
        export=export,
        index=index,
        dataset=Dataset(interactions),
        evaluation=evaluation,
        folder=folder / "package",
    )
    data_report = report_data(
        DataReportConfig(),
        split=FileSplit(test_paths=("test.parquet",)),
        interactions=interactions,
        previous=None,
        folder=folder / "data_report",
    )
    return Stages(
        Dataset(interactions),
        data_report,
        _write_plan_stage(folder / "plan"),
        _write_train_stage(folder / "train"),
        evaluation,
        index,
        package,
        export,
    )


def _write_plan_stage(folder: Path) -> PlanManifest:
    def build(output_folder: Path) -> dict[str, object]:
        (output_folder / "plan.json").write_text("{}")
        return {"world_size": 2, "device": "cpu"}

    return commit_stage(folder, PlanManifest, inputs=["plan"], build=build)


def progress(step: int) -> Progress:
    """Return the content of a line of metrics.jsonl."""
    return Progress(step=step, total_steps=STEPS[-1], epoch=1, loss=1 / step, learning_rate=0.1, samples_per_s=10.0)


def _write_train_stage(folder: Path) -> TrainManifest:
    def build(output_folder: Path) -> dict[str, object]:
        (output_folder / "metrics.jsonl").write_text("".join(json.dumps(progress(step).model_dump()) + "\n" for step in STEPS))
        return {
            "world_size": 2,
            "num_steps": STEPS[-1],
            "num_epochs": 1,
            "num_examples": 600,
            "final_loss": 0.5,
            "samples_per_s": 10.0,
            "num_attempts": 1,
            "best_epoch": 1,
            "validation": {"ndcg@10": 0.5},
        }

    return commit_stage(folder, TrainManifest, inputs=["train"], build=build)
