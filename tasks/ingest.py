"""Stages `ingest_embeddings` and `ingest_interactions`."""

from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.data import embeddings as embeddings_core
from recsys_core.data import interactions as interactions_core
from recsys_core.data.config import InteractionsConfig
from recsys_core.data.embeddings_config import EmbeddingsConfig
from recsys_core.manifests import EmbeddingsManifest, InteractionsManifest
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
        last_night=run.last_night("ingest_interactions", InteractionsManifest),
        data_root=data_root,
    )
    events = manifest.train_events + manifest.validation_events + manifest.test_events
    read = f"{manifest.files_read} of {len(manifest.sources)} files read"
    finish(manifest, f"{events:,} events, {manifest.users:,} users, {manifest.items:,} items, {read}")
    return manifest
