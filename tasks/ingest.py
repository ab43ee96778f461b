"""Stages `ingest_embeddings`, `ingest_interactions` and `ingest_features`."""

from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.data.embeddings import ingest as embeddings_core
from recsys_core.data.embeddings.config import EmbeddingsConfig
from recsys_core.data.features import ingest as features_core
from recsys_core.data.features.config import FeaturesConfig
from recsys_core.data.interactions import ingest as interactions_core
from recsys_core.data.interactions.config import InteractionsConfig
from recsys_core.manifests import EmbeddingsManifest, FeaturesManifest, InteractionsManifest
from tasks.reporting import begin
from tasks.run import Run


@task(name="ingest_embeddings", cache_policy=NO_CACHE)
def ingest_embeddings(configs: Sequence[EmbeddingsConfig], *, data_root: Path | None, run: Run) -> EmbeddingsManifest:
    """Parquet -> a memory-mapped matrix per table."""
    finish = begin("ingest_embeddings")
    manifest = embeddings_core.ingest_embeddings(configs, folder=run.stage_folder("ingest_embeddings"), data_root=data_root)
    finish(manifest, "; ".join(f"{name}: {found.rows:,} x {found.dim} vectors" for name, found in manifest.tables.items()))
    return manifest


@task(name="ingest_interactions", cache_policy=NO_CACHE)
def ingest_interactions(
    config: InteractionsConfig, *, embeddings: EmbeddingsManifest | None, data_root: Path | None, run: Run
) -> InteractionsManifest:
    """Parquet -> vocabularies, splits and the event store."""
    finish = begin("ingest_interactions")
    manifest = interactions_core.ingest_interactions(
        config,
        embeddings=embeddings,
        folder=run.stage_folder("ingest_interactions"),
        previous=run.last_night("ingest_interactions", InteractionsManifest),
        data_root=data_root,
    )
    events = manifest.train_events + manifest.validation_events + manifest.test_events
    read = f"{manifest.files_read} of {len(manifest.sources)} files read"
    finish(manifest, f"{events:,} events, {manifest.users:,} users, {manifest.items:,} items, {read}")
    return manifest


@task(name="ingest_features", cache_policy=NO_CACHE)
def ingest_features(
    config: FeaturesConfig,
    *,
    log: InteractionsConfig,
    interactions: InteractionsManifest,
    embeddings: EmbeddingsManifest | None,
    data_root: Path | None,
    run: Run,
) -> FeaturesManifest:
    """Parquet, and the log's own columns -> rows of the features' tables; last night's vocabularies go on."""
    finish = begin("ingest_features")
    manifest = features_core.ingest_features(
        config,
        interactions=interactions,
        embeddings=embeddings,
        previous=run.last_night("ingest_features", FeaturesManifest),
        memory_limit=log.memory_limit,
        threads=log.threads,
        folder=run.stage_folder("ingest_features"),
        data_root=data_root,
    )
    rows = sum(feature.rows for feature in manifest.features.values())
    finish(manifest, f"{len(manifest.features)} features, {rows:,} rows in their tables")
    return manifest
