"""Stages that read the input: `ingest_embeddings`, `ingest_interactions`, `ingest_features` and `embed_log`."""

from recsys_core.closed_form import log_vectors
from recsys_core.errors import counted
from recsys_core.ingest import InputConfig
from recsys_core.ingest.features import ingest as feature_ingest
from recsys_core.ingest.log import ingest as log_ingest
from recsys_core.ingest.vectors import ingest as vector_ingest
from recsys_core.manifests import (
    Dataset,
    EmbeddingsManifest,
    FeaturesManifest,
    InteractionsManifest,
    LogVectorsManifest,
)
from tasks.runs.context import StageContext
from tasks.stages.stage import stage


def ingest(context: StageContext, config: InputConfig) -> Dataset:
    """Ingest pretrained embeddings, the interaction log and features, and compute vectors from the log."""
    ingest_embeddings(context, config)
    ingest_interactions(context, config)
    ingest_features(context, config)
    embed_log(context, config)
    return context.dataset


@stage(EmbeddingsManifest)
def ingest_embeddings(context: StageContext, config: InputConfig) -> tuple[EmbeddingsManifest | None, str]:
    """Write the pretrained vectors as one memory-mapped matrix per table."""
    if not config.has_vector_files:
        return None, "no pretrained embeddings"
    manifest = vector_ingest.ingest_embeddings(
        config.embeddings, folder=context.folder(EmbeddingsManifest), allowed_data_root=config.allowed_data_root
    )
    summaries = (f"{table_name}: {table.num_rows:,} x {table.dim} vectors" for table_name, table in manifest.tables.items())
    return manifest, "; ".join(summaries)


@stage(InteractionsManifest)
def ingest_interactions(context: StageContext, config: InputConfig) -> tuple[InteractionsManifest, str]:
    """Write the vocabularies, the split and the event store."""
    manifest = log_ingest.ingest_interactions(
        config.interactions,
        embeddings=context.results.get(EmbeddingsManifest),
        folder=context.folder(InteractionsManifest),
        previous=context.previous_manifest(InteractionsManifest),
        allowed_data_root=config.allowed_data_root,
    )
    summary = f"{manifest.num_events:,} events, {manifest.num_users:,} users, {manifest.num_items:,} items"
    if config.interactions.explicit_negatives:
        summary += f", {manifest.num_known_negatives:,} known negatives"
    summary += f", {manifest.num_files_read} of {counted(len(manifest.sources), config.interactions.source_noun)} read"
    return manifest, summary


@stage(FeaturesManifest)
def ingest_features(context: StageContext, config: InputConfig) -> tuple[FeaturesManifest | None, str]:
    """Write the features of users, items and events; continue the vocabularies of the previous run."""
    if config.features is None:
        return None, "no features"
    dataset = context.dataset
    manifest = feature_ingest.ingest_features(
        config.features,
        dataset=dataset,
        previous=context.previous_manifest(FeaturesManifest),
        memory_limit=config.interactions.memory_limit,
        threads=config.interactions.threads,
        folder=context.folder(FeaturesManifest),
        allowed_data_root=config.allowed_data_root,
    )
    num_rows = sum(feature.num_rows for feature in manifest.features.values())
    return manifest, f"{counted(len(manifest.features), 'feature')}, {counted(num_rows, 'row')} in their tables"


@stage(LogVectorsManifest)
def embed_log(context: StageContext, config: InputConfig) -> tuple[LogVectorsManifest | None, str]:
    """Compute item vectors from the training events in closed form."""
    if config.log_vectors is None:
        return None, "no vectors from the log"
    interactions = context.results[InteractionsManifest]
    manifest = log_vectors.embed_log(config.log_vectors, interactions=interactions, folder=context.folder(LogVectorsManifest))
    return manifest, f"item: {manifest.num_vectors:,} x {manifest.dim} vectors, {config.log_vectors.method}"
