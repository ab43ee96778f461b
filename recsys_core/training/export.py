"""Stage `export`: item vectors, query vectors, tables and dense weights of the trained model."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from recsys_core.launching.config import Launcher, LocalLauncher
from recsys_core.launching.launch import launch
from recsys_core.manifests import (
    Dataset,
    ExportManifest,
    TrainManifest,
    fingerprint_of,
    produce,
)
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.checkpoint import PLAN_COPY
from recsys_core.training.config import TrainingConfig
from recsys_core.training.disk_estimate import export_bytes
from recsys_core.training.export_job import SPLITS
from recsys_core.training.job_spec import ExportJob


def export_vectors(
    config: TrainingConfig,
    *,
    model: ModelSpec,
    loss: LossConfig,
    dataset: Dataset,
    train: TrainManifest,
    folder: Path,
    launcher: Launcher = LocalLauncher(),  # noqa: B008  it is frozen
) -> ExportManifest:
    """Launches the ranks that trained once more; each writes its own rows, no rank gathers a table."""
    work = folder.with_name(folder.name + ".work")

    def build(out: Path) -> dict[str, Any]:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        job = ExportJob(
            work=work,
            out=out,
            spec=model,
            loss=loss,
            training=config,
            interactions=dataset.interactions.folder,
            features=None if dataset.features is None else dataset.features.folder,
            plan=train.path(PLAN_COPY),
            checkpoint=train.folder / "checkpoint",
        )
        (work / "job.json").write_text(job.model_dump_json(indent=2))
        launch(
            work / "job.json",
            plan=PlanFile.read(job.plan),
            logs=work / "logs",
            start_timeout_s=config.start_timeout_s,
            silence_timeout_s=config.silence_timeout_s,
            alive=work / "alive",
            launcher=launcher,
        )
        (out / "model.json").write_text(model.model_dump_json(indent=2))
        queries = {split: len(np.load(out / f"query_users_{split}.npy")) for split in SPLITS}
        return {"items": model.items, "dim": model.config.output_dim, "similarity": model.config.similarity, "queries": queries}

    manifest = produce(
        folder,
        ExportManifest,
        fingerprint=fingerprint_of("export", model, dataset.interactions, train),
        build=build,
        needs_bytes=export_bytes(config.table_optimizer, model=model),
    )
    shutil.rmtree(work, ignore_errors=True)
    return manifest
