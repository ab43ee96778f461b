"""Execution of one experiment: the stages from parquet to metrics, without a Prefect flow and without the registry."""

import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from flows.settings.pipeline import PipelineConfig
from recsys_core.closed_form.log_vectors import embed_log
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.evaluation.held_out import ranking_settings
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import Dataset
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.planner import plan_sharding
from recsys_core.training.export.export import export_vectors
from recsys_core.training.job import Progress
from recsys_core.training.setup import TrainingSetup
from recsys_core.training.train import train

Settings = dict[str, Any]
ONE_RANK: Settings = {"sharding": {"cluster": {"device": "cpu", "processes_per_node": 1}}}


def without_folders(settings: Any) -> Any:
    """Return the settings with file names instead of paths.

    >>> without_folders({"paths": "/data/beauty/items.parquet", "dim": 4})
    {'paths': 'items.parquet', 'dim': 4}
    """
    if isinstance(settings, Mapping):
        return {name: without_folders(value) for name, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [without_folders(value) for value in settings]
    return Path(settings).name if isinstance(settings, str) and "/" in settings else settings


def train_only(settings: Settings, *, folder: Path) -> list[tuple[float, Progress]]:
    """Train without evaluation. Return each reported progress with the time (perf_counter) at which it was received."""
    config = PipelineConfig.model_validate(settings)
    interactions = ingest_interactions(config.interactions_with_context, embeddings=None, folder=folder / "interactions")
    model_spec = ModelSpec.of(
        config.model,
        dataset=Dataset(interactions),
        tables=config.tables,
        loss=config.loss,
        optimizer=config.training.table_optimizer,
    )
    shutil.rmtree(folder / "train", ignore_errors=True)
    plan = plan_sharding(
        config.sharding,
        model=model_spec,
        batch_size=config.training.batch_size,
        folder=folder / "plan",
    )
    timed_progress: list[tuple[float, Progress]] = []
    train(
        TrainingSetup(model_spec, config.training, config.loss),
        dataset=Dataset(interactions),
        plan=plan,
        folder=folder / "train",
        on_progress=lambda progress: timed_progress.append((time.perf_counter(), progress)),
    )
    return timed_progress


@dataclass(frozen=True)
class Experiment:
    """The settings of one training run. The part of the report, the variant and the seed identify the experiment."""

    part: str
    variant: str
    seed: int
    settings: Settings

    @property
    def key(self) -> str:
        """Key of the result in results.json."""
        return f"{self.part}/{self.variant}/{self.seed}"


def merge_settings(*settings_layers: Mapping[str, Any]) -> Settings:
    """Return the settings of all layers. Later layers override single settings of earlier layers.

    >>> merge_settings({"model": {"learn_user_embedding": True}}, {"model": {"embedding_dim": 8}})
    {'model': {'learn_user_embedding': True, 'embedding_dim': 8}}
    """
    result: Settings = {}
    for layer in settings_layers:
        for name, value in layer.items():
            is_nested = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
            result[name] = merge_settings(result[name], value) if is_nested else value
    return result


def run(experiment: Experiment, *, folder: Path, free_cores: "Queue[int]") -> dict[str, Any]:
    """Execute an experiment on one of the `free_cores`. Each core executes one experiment at a time."""
    core = free_cores.get()
    try:
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)  # one thread per core
        return _train_and_evaluate(experiment, folder=folder, core=core)
    finally:
        free_cores.put(core)


def _train_and_evaluate(experiment: Experiment, *, folder: Path, core: int) -> dict[str, Any]:
    """Return the validation metrics of each epoch and the test metrics of the best epoch."""
    config = PipelineConfig.model_validate(
        merge_settings(ONE_RANK, experiment.settings, {"training": {"seed": experiment.seed}})
    )
    # Experiments with the same input share the ingested data. Each core has its own copy, so that no core waits.
    input_settings_json = config.model_dump_json(include={"interactions", "embeddings", "features"})
    ingest_folder = folder / f"core-{core}" / hashlib.sha256(input_settings_json.encode()).hexdigest()[:12]
    run_folder = folder / f"core-{core}" / "run"
    shutil.rmtree(run_folder, ignore_errors=True)
    embeddings = None
    if config.input_config.has_vector_files:
        embeddings = ingest_embeddings(config.embeddings, folder=ingest_folder / "embeddings")
    interactions = ingest_interactions(
        config.interactions_with_context, embeddings=embeddings, folder=ingest_folder / "interactions"
    )
    log_vectors = None
    if config.input_config.log_vectors is not None:
        log_vectors = embed_log(
            config.input_config.log_vectors, interactions=interactions, folder=ingest_folder / "log_vectors"
        )
    features = None
    if config.features is not None:
        features = ingest_features(
            config.features,
            dataset=Dataset(interactions, embeddings),
            previous=None,
            memory_limit="1GB",
            threads=1,
            folder=ingest_folder / "features",
        )
    model_spec = ModelSpec.of(
        config.model,
        dataset=Dataset(interactions, embeddings, features, log_vectors),
        tables=config.tables,
        loss=config.loss,
        optimizer=config.training.table_optimizer,
    )
    plan = plan_sharding(
        config.sharding,
        model=model_spec,
        batch_size=config.training.batch_size,
        folder=run_folder / "plan",
    )
    progress_lines: list[Progress] = []
    train_manifest = train(
        TrainingSetup(model_spec, config.training, config.loss),
        dataset=Dataset(interactions, embeddings, features, log_vectors),
        plan=plan,
        folder=run_folder / "train",
        on_progress=progress_lines.append,
    )
    export = export_vectors(
        TrainingSetup(model_spec, config.training, config.loss),
        dataset=Dataset(interactions, features=features),
        train=train_manifest,
        folder=run_folder / "export",
        ranking=ranking_settings(config.evaluation),
    )
    evaluation = evaluate(
        config.evaluation, export=export, dataset=Dataset(interactions, embeddings), folder=run_folder / "evaluation"
    )
    return {
        "validation": [progress.validation for progress in progress_lines if progress.validation],
        "best_epoch": train_manifest.best_epoch,
        "metrics": {name: value for name, value in evaluation.metrics.items() if not name.startswith("validation/")},
        "samples_per_s": max(progress.samples_per_s for progress in progress_lines),
        "settings": without_folders(experiment.settings),
    }
