"""Stages `ingest_embeddings`, `ingest_interactions` and `ingest_features`."""

from collections.abc import Sequence
from pathlib import Path

from recsys_core.ingest.features import ingest as features_core
from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.log import ingest as interactions_core
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.vectors import ingest as embeddings_core
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.manifests import Dataset, EmbeddingsManifest, FeaturesManifest, InteractionsManifest
from tasks.progress.reporting import StageLog
from tasks.runs.run import Run
from tasks.stages.stage import stage


@stage("ingest_embeddings")
def ingest_embeddings(
    configs: Sequence[EmbeddingsConfig], *, allowed_data_root: Path | None, run: Run
) -> EmbeddingsManifest | None:
    """Write the pretrained vectors as one memory-mapped matrix per table."""
    stage_log = StageLog("ingest_embeddings")
    if not configs:
        return stage_log.finish(None, "no pretrained embeddings")
    manifest = embeddings_core.ingest_embeddings(
        configs, folder=run.stage_folder("ingest_embeddings"), allowed_data_root=allowed_data_root
    )
    return stage_log.finish(
        manifest,
        "; ".join(f"{table_name}: {table.rows:,} x {table.dim} vectors" for table_name, table in manifest.tables.items()),
    )


@stage("ingest_interactions")
def ingest_interactions(
    config: InteractionsConfig, *, embeddings: EmbeddingsManifest | None, allowed_data_root: Path | None, run: Run
) -> InteractionsManifest:
    """Write the vocabularies, the split and the event store."""
    stage_log = StageLog("ingest_interactions")
    manifest = interactions_core.ingest_interactions(
        config,
        embeddings=embeddings,
        folder=run.stage_folder("ingest_interactions"),
        previous=run.previous_manifest("ingest_interactions", InteractionsManifest),
        allowed_data_root=allowed_data_root,
    )
    num_events = manifest.train_events + manifest.validation_events + manifest.test_events
    read_files_text = f"{manifest.files_read} of {len(manifest.sources)} files read"
    return stage_log.finish(
        manifest, f"{num_events:,} events, {manifest.num_users:,} users, {manifest.num_items:,} items, {read_files_text}"
    )


@stage("ingest_features")
def ingest_features(
    config: FeaturesConfig | None,
    *,
    interactions_config: InteractionsConfig,
    dataset: Dataset,
    allowed_data_root: Path | None,
    run: Run,
) -> FeaturesManifest | None:
    """Write the features of users, items and events; continue the vocabularies of the previous run."""
    stage_log = StageLog("ingest_features")
    if config is None:
        return stage_log.finish(None, "no features")
    manifest = features_core.ingest_features(
        config,
        interactions=dataset.interactions,
        embeddings=dataset.embeddings,
        previous=run.previous_manifest("ingest_features", FeaturesManifest),
        memory_limit=interactions_config.memory_limit,
        threads=interactions_config.threads,
        folder=run.stage_folder("ingest_features"),
        allowed_data_root=allowed_data_root,
    )
    num_rows = sum(feature.rows for feature in manifest.features.values())
    return stage_log.finish(manifest, f"{len(manifest.features)} features, {num_rows:,} rows in their tables")
