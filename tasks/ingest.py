"""Stages `ingest_embeddings` and `ingest_interactions`."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.data import embeddings as embeddings_core
from recsys_core.data import interactions as interactions_core
from recsys_core.data.config import EmbeddingsConfig, InteractionsConfig
from recsys_core.manifests import EmbeddingsManifest, InteractionsManifest
from tasks.reporting import begin
from tasks.run import Run


@task(name="ingest_embeddings", cache_policy=NO_CACHE)
def ingest_embeddings(config: EmbeddingsConfig, *, run: Run) -> EmbeddingsManifest:
    """Parquet -> memory-mapped matrix."""
    finish = begin("ingest_embeddings")
    manifest = embeddings_core.ingest_embeddings(config, folder=run.stage_folder("ingest_embeddings"))
    finish(manifest, f"{manifest.rows:,} x {manifest.dim} vectors")
    return manifest


@task(name="ingest_interactions", cache_policy=NO_CACHE)
def ingest_interactions(config: InteractionsConfig, *, embeddings: EmbeddingsManifest | None, run: Run) -> InteractionsManifest:
    """Parquet -> vocabularies, splits and the event store."""
    finish = begin("ingest_interactions")
    manifest = interactions_core.ingest_interactions(
        config,
        embeddings=embeddings,
        folder=run.stage_folder("ingest_interactions"),
        last_night=run.last_night("ingest_interactions", InteractionsManifest),
    )
    events = manifest.train_events + manifest.validation_events + manifest.test_events
    read = f"{manifest.files_read} of {len(manifest.sources)} files read"
    finish(manifest, f"{events:,} events, {manifest.users:,} users, {manifest.items:,} items, {read}")
    return manifest
