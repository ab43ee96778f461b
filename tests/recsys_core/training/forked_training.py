"""Training and export of a small model on a generated log, in ranks that are forked instead of launched by torchrun."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from recsys_core.ingest.features.config import FeatureConfig, FeaturesConfig, FeatureTableConfig, ItemTableConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.ingest.log.split_config import TimeSplit
from recsys_core.ingest.synthetic import generate
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import Dataset, ExportManifest, PlanManifest, RankingSettings, commit_folder
from recsys_core.models.config import TowerConfig, TwoTowerConfig
from recsys_core.models.history_config import RecencyHistory
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableConfig
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import plan_sharding
from recsys_core.training import loop
from recsys_core.training.checkpoint import latest_checkpoint
from recsys_core.training.config import TrainingConfig
from recsys_core.training.export.export import run_export
from recsys_core.training.job import (
    CHECKPOINTS_FOLDER,
    JOB_FILE,
    METRICS_FILE,
    RESULT_FILE,
    ExportJob,
    Progress,
    TrainJob,
    TrainResult,
)
from recsys_core.training.validation import Validator
from tests.gloo import cpu_process, run_ranks

NUM_USERS, NUM_ITEMS, DIM = 200, 150, 16
MODEL = TwoTowerConfig(
    embedding_dim=DIM,
    learn_user_embedding=True,
    history=RecencyHistory(length=8, learn_offsets=True),
    query=TowerConfig(layers=(DIM,), skip_connection=True, dropout=0.2),
)


def generate_dataset(root: Path, *, num_shards: int = 1) -> Dataset:
    """Generate and ingest a log of ten days with features.

    The last day is the test split, and the day before it is the validation split. Ten items have no training event.
    """
    generate(root / "data", num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=4_000, num_days=10, dim=DIM, num_cold_items=10)
    random = np.random.default_rng(0)
    num_described_users = NUM_USERS - 20
    users = {
        "user_id": [f"u{user}" for user in range(num_described_users)],
        "country": random.choice(["at", "de", "ch"], num_described_users),
        "groups": [random.choice(12, random.integers(0, 4)).tolist() for _ in range(num_described_users)],
        "age": random.normal(40, 10, num_described_users),
    }
    items = {
        "item_id": np.arange(NUM_ITEMS) + 1000,
        "brand": np.arange(NUM_ITEMS) % 7,
        "price": random.lognormal(size=NUM_ITEMS),
    }
    pq.write_table(pa.table(users), root / "users.parquet")
    pq.write_table(pa.table(items), root / "items.parquet")
    vectors = EmbeddingsConfig(paths=(str(root / "data/item_embeddings.parquet"),), vector_column="embedding")
    log = InteractionsConfig(
        paths=(str(root / "data/interactions/*.parquet"),),
        timestamp_column="timestamp",
        split=TimeSplit(test_days=1, validation_days=1),
        shards=num_shards,
    )
    embeddings = ingest_embeddings((vectors,), folder=root / "embeddings")
    interactions = ingest_interactions(log, embeddings=embeddings, folder=root / "interactions")
    features = FeaturesConfig(
        users=FeatureTableConfig(
            paths=(str(root / "users.parquet"),),
            id_column="user_id",
            features=(
                FeatureConfig(name="country"),
                FeatureConfig(name="groups", kind="list"),
                FeatureConfig(name="age", kind="numeric", standardise=True),
            ),
        ),
        items=ItemTableConfig(
            paths=(str(root / "items.parquet"),),
            id_column="item_id",
            features=(FeatureConfig(name="brand"), FeatureConfig(name="price", kind="numeric", standardise=True)),
        ),
    )
    ingested_features = ingest_features(
        features,
        dataset=Dataset(interactions, embeddings),
        previous=None,
        memory_limit="1GB",
        threads=1,
        folder=root / "features",
    )
    return Dataset(interactions, embeddings, ingested_features)


class Experiment(NamedTuple):
    """A dataset, a model, a sharding plan and training settings."""

    dataset: Dataset
    spec: ModelSpec
    plan: PlanManifest
    loss: LossConfig
    training: TrainingConfig


def make_experiment(
    dataset: Dataset,
    plan_folder: Path,
    *,
    training: TrainingConfig,
    model: TwoTowerConfig = MODEL,
    tables: dict[str, TableConfig] | None = None,
    loss: LossConfig = LossConfig(num_negatives=32),  # noqa: B008  it is frozen
    constraints: dict[str, TableConstraint] | None = None,
    world_size: int = 2,
) -> Experiment:
    """Return an experiment with a sharding plan for `world_size` ranks."""
    spec = ModelSpec.of(model, dataset=dataset, tables=tables, loss=loss, optimizer=training.table_optimizer)
    plan = plan_sharding(
        ShardingConfig(cluster=ClusterConfig(device="cpu", processes_per_node=world_size), tables=constraints or {}),
        model=spec,
        batch_size=training.batch_size,
        folder=plan_folder,
    )
    return Experiment(dataset, spec, plan, loss, training)


class FinishedTraining(NamedTuple):
    """The folder, the result and the metrics lines of a training that has ended."""

    work_folder: Path
    result: TrainResult
    lines: list[Progress]


def train_in_forks(
    experiment: Experiment, work_folder: Path, *, stop_after_step: int | None = None, metric_values: list[float] | None = None
) -> FinishedTraining:
    """Train in `work_folder`, from the newest checkpoint of an earlier call if there is one.

    Args:
        stop_after_step: step after which all ranks exit at once, as if they were killed. The returned `result`
            and `lines` are then empty.
        metric_values: values that the validations return one after another instead of measuring the metric.
    """
    job = train_job(experiment, work_folder)
    run_ranks(_train_rank, world_size=experiment.plan.world_size, arguments=(job, stop_after_step, metric_values))
    if stop_after_step is not None:
        assert not (work_folder / RESULT_FILE).exists()
        return FinishedTraining(work_folder, TrainResult.model_construct(), [])
    train_result = TrainResult.model_validate_json((work_folder / RESULT_FILE).read_bytes())
    lines = [Progress.model_validate_json(line) for line in (work_folder / METRICS_FILE).read_text().splitlines()]
    return FinishedTraining(work_folder, train_result, lines)


def train_job(experiment: Experiment, work_folder: Path) -> TrainJob:
    """Return the job of the next attempt in `work_folder`, which resumes from the newest checkpoint."""
    work_folder.mkdir(exist_ok=True)
    dataset = experiment.dataset
    checkpoint = latest_checkpoint(work_folder / CHECKPOINTS_FOLDER, fingerprint="f")
    return TrainJob(
        work_folder=work_folder,
        fingerprint="f",
        spec=experiment.spec,
        loss=experiment.loss,
        training=experiment.training,
        interactions_folder=dataset.interactions.folder,
        embeddings_folder=None if dataset.embeddings is None else dataset.embeddings.folder,
        features_folder=None if dataset.features is None else dataset.features.folder,
        plan_path=experiment.plan.path("plan.json"),
        resume_folder=checkpoint.folder if checkpoint is not None else None,
    )


def _train_rank(rank: int, job: TrainJob, stop_after_step: int | None = None, metric_values: list[float] | None = None) -> None:
    check_loss = loop.raise_if_not_finite  # called after each step

    def check_loss_and_stop(loss: torch.Tensor, *, step: int, **options: Any) -> None:
        check_loss(loss, step=step, **options)
        if step == stop_after_step:
            os._exit(0)

    loop.raise_if_not_finite = check_loss_and_stop  # type: ignore[assignment]
    if metric_values is not None:
        remaining_metric_values = iter(metric_values)
        Validator.measure = lambda self: {self.metric_name: next(remaining_metric_values)}  # type: ignore[method-assign]
    loop.run_training(job, process=cpu_process(rank))


def export_in_forks(
    experiment: Experiment, checkpoint_folder: Path, output_folder: Path, *, ranking: RankingSettings | None = None
) -> dict[str, np.ndarray]:
    """Export the checkpoint and return all exported arrays and layers by name."""
    output_folder.mkdir()
    job = export_job(experiment, checkpoint_folder, output_folder).model_copy(update={"ranking": ranking})
    run_ranks(_export_rank, world_size=experiment.plan.world_size, arguments=(job,))
    array_by_name = {path.name: np.load(path) for path in sorted(output_folder.glob("*.npy"))}
    return array_by_name | {name: layer.numpy() for name, layer in load_file(output_folder / "dense.safetensors").items()}


def write_export(
    experiment: Experiment, finished_training: FinishedTraining, folder: Path, *, ranking: RankingSettings | None = None
) -> ExportManifest:
    """Write the files and the manifest of the export stage to `folder`, and return the manifest."""
    staging_folder = folder.with_name("staging")
    array_by_name = export_in_forks(experiment, checkpoint_of(finished_training), staging_folder, ranking=ranking)
    (staging_folder / "model.json").write_text(experiment.spec.model_dump_json())
    return commit_folder(
        staging_folder,
        folder,
        ExportManifest,
        fingerprint="export",
        seconds=0.0,
        num_items=experiment.spec.num_items,
        dim=experiment.spec.config.output_dim,
        similarity=experiment.spec.config.similarity,
        num_queries={split: len(array_by_name[f"query_users_{split}.npy"]) for split in ("validation", "test")},
        ranking=ranking,
    )


def export_job(experiment: Experiment, checkpoint_folder: Path, output_folder: Path) -> ExportJob:
    """Return the job that exports the checkpoint to `output_folder`."""
    return ExportJob(
        work_folder=output_folder,
        output_folder=output_folder,
        spec=experiment.spec,
        loss=experiment.loss,
        training=experiment.training,
        interactions_folder=experiment.dataset.interactions.folder,
        embeddings_folder=None if experiment.dataset.embeddings is None else experiment.dataset.embeddings.folder,
        features_folder=None if experiment.dataset.features is None else experiment.dataset.features.folder,
        plan_path=experiment.plan.path("plan.json"),
        checkpoint_folder=checkpoint_folder,
    )


def _export_rank(rank: int, job: ExportJob) -> None:
    run_export(job, process=cpu_process(rank))


def launch_in_forks(job: TrainJob | ExportJob, *, poll: Callable[[], None] = lambda: None, **_: object) -> None:
    """Do what `launch_job` does, without torchrun and the seconds of its imports."""
    (job.work_folder / JOB_FILE).write_text(job.model_dump_json(indent=2))
    rank_function = _export_rank if isinstance(job, ExportJob) else _train_rank
    run_ranks(rank_function, world_size=PlanFile.read(job.plan_path).world_size, arguments=(job,))
    poll()


def checkpoint_of(finished_training: FinishedTraining) -> Path:
    """Return the folder of the checkpoint that the training result names."""
    return finished_training.work_folder / CHECKPOINTS_FOLDER / finished_training.result.checkpoint


def without_timings(lines: list[Progress]) -> list[dict[str, Any]]:
    """Return the metrics lines as dictionaries without the fields that depend on the machine."""
    machine_dependent_fields = {"samples_per_s", "ms_per_step", "embedding_bytes_per_s", "memory_bytes"}
    return [json.loads(line.model_dump_json(exclude=machine_dependent_fields)) for line in lines]
