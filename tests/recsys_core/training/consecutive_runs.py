"""Two runs of a small shop: the second has new users, items, brands and vectors, and other bestsellers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import distributed as dist

from recsys_core.ingest.features.config import FeatureConfig, FeaturesConfig, ItemTableConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import (
    Dataset,
    EmbeddingsManifest,
    ExportManifest,
    FeaturesManifest,
    InteractionsManifest,
    TrainManifest,
)
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableConfig
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.planner import make_plan
from recsys_core.training.config import TrainingConfig
from recsys_core.training.export.export import run_export
from recsys_core.training.job import CHECKPOINTS_FOLDER, RESULT_FILE, ExportJob, TrainJob, TrainResult
from recsys_core.training.loop import run_training
from recsys_core.training.warm.starting_model import Champion
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.ingest.interaction_logs import Event, ingest, write_log
from tests.recsys_core.ingest.parquet_files import write_parquet
from tests.recsys_core.manifests.committed_stage import commit_stage
from tests.recsys_core.training.small_model import with_optimizer

NUM_RANKS, DIM = 2, 8
TRAINING = TrainingConfig(epochs=1, batch_size=16, validation=None, checkpoint_every_steps=1000, seed=3)


@dataclass(frozen=True)
class PreparedRun:
    """The ingested data of a run, and the spec of a model for this data."""

    folder: Path
    interactions: InteractionsManifest
    embeddings: EmbeddingsManifest
    features: FeaturesManifest
    spec: ModelSpec


def prepare_run(
    folder: Path,
    run_number: int,
    *,
    previous: PreparedRun | None = None,
    tables: dict[str, TableConfig] | None = None,
    dim: int = DIM,
) -> PreparedRun:
    """Generate and ingest the files of run 1 or run 2.

    Args:
        previous: the run whose vocabularies are continued. None: new vocabularies.
        dim: width of tables and vectors.
    """
    num_users, num_items = (30, 40) if run_number == 1 else (36, 50)
    log_path = write_log(folder / "data/log.parquet", _events(run_number, num_users=num_users, num_items=num_items))
    items_with_vector = [item for item in range(num_items) if item % 3 == 0]
    vector_VD = np.random.default_rng(run_number).normal(size=(len(items_with_vector), dim)).astype(np.float32)
    vectors_path = write_parquet(
        folder / "data/vectors.parquet", item_id=[f"i{item}" for item in items_with_vector], vector=pa.array(vector_VD.tolist())
    )
    brand_by_item = [f"brand-{(item * run_number) % (4 + run_number)}" for item in range(num_items)]
    items_path = write_parquet(
        folder / "data/items.parquet", item_id=[f"i{item}" for item in range(num_items)], brand=brand_by_item
    )
    vectors_config = EmbeddingsConfig(paths=(vectors_path,), vector_column="vector")
    embeddings = ingest_embeddings((vectors_config,), folder=folder / "embeddings")
    interactions = ingest(
        folder / "interactions",
        log_path,
        split={"kind": "leave_last_out"},
        embeddings=embeddings,
        previous=previous and previous.interactions,
    )
    item_table = ItemTableConfig(paths=(items_path,), id_column="item_id", features=(FeatureConfig(name="brand"),))
    features = ingest_features(
        FeaturesConfig(items=item_table),
        dataset=Dataset(interactions, embeddings),
        previous=previous and previous.features,
        memory_limit="1GB",
        threads=1,
        folder=folder / "features",
    )
    model = TwoTowerConfig.model_validate(
        {"embedding_dim": dim, "learn_user_embedding": True, "history": {"length": 4, "learn_offsets": True}}
    )
    spec = ModelSpec.of(model, dataset=Dataset(interactions, embeddings, features), tables=tables)
    return PreparedRun(folder, interactions, embeddings, features, spec)


def _events(run_number: int, *, num_users: int, num_items: int) -> list[Event]:
    """Return eight events of each user. The first items of the catalogue sell best in run 1, and the last items in run 2."""
    rng = np.random.default_rng(run_number)
    item_UE = (np.sort(rng.beta(1, 3, (num_users, 8)), axis=1) * num_items).astype(int)
    if run_number == 2:
        item_UE = num_items - 1 - item_UE
    return [(f"u{user}", f"i{item}", time) for user in range(num_users) for time, item in enumerate(item_UE[user].tolist())]


def train_job(run: PreparedRun, *, sharding_type: str = "row_wise", training: TrainingConfig = TRAINING) -> TrainJob:
    """Return the job that trains the model of `run` on NUM_RANKS ranks, with `sharding_type` for all tables."""
    sharding = ShardingConfig(
        cluster=ClusterConfig(device="cpu", processes_per_node=NUM_RANKS),
        tables=dict.fromkeys(run.spec.tables, TableConstraint.model_validate({"sharding_types": (sharding_type,)})),
    )
    spec = with_optimizer(run.spec, training.table_optimizer)
    plan = make_plan(sharding, model=spec, batch_size=training.batch_size)
    run.folder.mkdir(exist_ok=True)
    (run.folder / "plan.json").write_text(plan.model_dump_json())
    work_folder = run.folder / "train.work"
    work_folder.mkdir(exist_ok=True)
    return TrainJob(
        work_folder=work_folder,
        fingerprint="f",
        spec=spec,
        loss=LossConfig(num_negatives=8),
        training=training,
        interactions_folder=run.interactions.folder,
        embeddings_folder=run.embeddings.folder,
        features_folder=run.features.folder,
        plan_path=run.folder / "plan.json",
    )


def train_and_export(rank: int, job: TrainJob, export_folder: Path) -> None:
    """Run the train and export stages on one rank."""
    run_training(job, process=cpu_process(rank))
    dist.barrier()
    train_result = TrainResult.model_validate_json((job.work_folder / RESULT_FILE).read_bytes())
    checkpoint_folder = job.work_folder / CHECKPOINTS_FOLDER / train_result.checkpoint
    job_fields = job.model_dump(
        include={"work_folder", "spec", "loss", "training", "interactions_folder", "features_folder", "plan_path"}
    )
    run_export(
        ExportJob(**job_fields, output_folder=export_folder, checkpoint_folder=checkpoint_folder), process=cpu_process(rank)
    )


def train_champion(run: PreparedRun) -> Champion:
    """Train and export the model of `run`, and return it as a champion with the run id "first"."""
    job = train_job(run)

    def train_export_and_return_fields(folder: Path) -> dict[str, Any]:
        run_ranks(train_and_export, world_size=NUM_RANKS, arguments=(job, folder))
        (folder / "model.json").write_text(run.spec.model_dump_json())
        return {"num_items": run.spec.num_items, "dim": DIM, "similarity": "cosine", "num_queries": {}}

    def read_train_fields(folder: Path) -> dict[str, Any]:
        train_result = TrainResult.model_validate_json((job.work_folder / RESULT_FILE).read_bytes())
        return train_result.model_dump(exclude={"checkpoint"}) | {"num_attempts": 1}

    commit_stage(run.folder / "export", ExportManifest, inputs=["export"], build=train_export_and_return_fields)
    commit_stage(run.folder / "train", TrainManifest, inputs=["train"], build=read_train_fields)
    champion = Champion.open(
        "first", **{f"{name}_folder": run.folder / name for name in ("train", "export", "interactions", "features")}
    )
    assert champion is not None
    return champion
