"""Stage `ingest_features`: features of users, items and events as rows of embedding tables, in the order of the catalogue."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import duckdb

from recsys_core.dataset.layout import context_paths
from recsys_core.ingest.features.config import FeatureConfig, FeaturesConfig
from recsys_core.ingest.features.encoding import encode
from recsys_core.ingest.features.feature_column import FeatureColumn, PreviousFeature, feature_definition
from recsys_core.ingest.features.feature_schema import check_feature_vectors, open_feature_tables
from recsys_core.ingest.features.sources import FeatureSource, feature_sources
from recsys_core.manifests import (
    Dataset,
    FeaturesManifest,
    FeatureTableStatistics,
    IdType,
    IngestedFeature,
    StageFolder,
    record_file,
)
from recsys_core.parquet.duckdb_session import database
from recsys_core.parquet.sources import open_stage_file


def ingest_features(
    config: FeaturesConfig,
    *,
    dataset: Dataset,
    previous: FeaturesManifest | None,
    memory_limit: str,
    threads: int | None,
    folder: Path,
    allowed_data_root: Path | None = None,
) -> FeaturesManifest:
    """Write the arrays that FeaturesManifest describes. DuckDB spills data beyond `memory_limit` to disk.

    Args:
        dataset: the log and the pretrained vectors. Vectors for a table such as item.brand belong to the values of a feature.
        previous: manifest of the previous run. Its feature vocabularies, boundaries and means are used again, unless the
            vocabularies of users and items were rebuilt.
        allowed_data_root: folder that has to contain every file of a feature table.

    Raises:
        InputError: missing files or columns, types that do not fit the config, null or duplicate ids, ids of another type
            than the ids of the log, unusable weights, or vectors that fit no feature.
    """
    interactions, embeddings = dataset.interactions, dataset.embeddings
    if previous is not None and previous.lineage != interactions.lineage:
        previous = None
    tables = open_feature_tables(
        config,
        user_id_type=interactions.user_id_type,
        item_id_type=interactions.item_id_type,
        context_sources=[open_stage_file(path) for path in context_paths(interactions)] if config.context else (),
        allowed_data_root=allowed_data_root,
    )
    vector_tables = {} if embeddings is None else embeddings.tables
    check_feature_vectors(tables, id_type_by_table={name: table.id_type for name, table in vector_tables.items()})
    source_records = tuple(source.record for table in tables if table.owner_kind != "context" for source in table.sources)
    stage = StageFolder(
        folder, FeaturesManifest, inputs=["ingest_features", config, interactions, previous, embeddings, source_records]
    )
    if stage.manifest is not None:
        return stage.manifest
    with stage.writing() as output_folder:
        scratch_folder = output_folder / "scratch"
        scratch_folder.mkdir()
        feature_by_key: dict[str, IngestedFeature] = {}
        statistics_by_owner_kind: dict[str, FeatureTableStatistics] = {}
        for source in feature_sources(tables, interactions):
            # One database per owner kind: its memory and its spill files are released before the next owner kind.
            with database(
                memory_limit=memory_limit, num_threads=threads, spill_folder=scratch_folder / "spill", subject="the features"
            ) as connection:
                statistics = source.load(connection, output_folder=output_folder, scratch_folder=scratch_folder)
                if statistics is not None:
                    statistics_by_owner_kind[source.table.owner_kind] = statistics
                for feature_column in _feature_columns(source, connection, dataset, previous, output_folder):
                    feature_by_key[feature_column.key] = encode(feature_column)
        shutil.rmtree(scratch_folder)
        return stage.commit(
            lineage=interactions.lineage, features=feature_by_key, tables=statistics_by_owner_kind, sources=source_records
        )


def _feature_columns(
    source: FeatureSource,
    connection: duckdb.DuckDBPyConnection,
    dataset: Dataset,
    previous: FeaturesManifest | None,
    output_folder: Path,
) -> Iterator[FeatureColumn]:
    """Yield each feature of a loaded source, for `encode`."""
    for feature_index, feature in enumerate(source.table.features):
        key, value_type = f"{source.table.owner_kind}.{feature.name}", source.table.value_type_by_feature.get(feature.name)
        has_vectors = dataset.embeddings is not None and key in dataset.embeddings.tables
        yield FeatureColumn(
            connection=connection,
            feature=feature,
            feature_index=feature_index,
            key=key,
            value_type=value_type,
            num_rows=source.num_rows,
            counted_row_sql=source.counted_row_sql,
            previous=_previous_feature(previous, key, feature, value_type),
            output_folder=output_folder,
            vector_ids_path=dataset.embeddings.ids_path(key) if dataset.embeddings is not None and has_vectors else None,
        )


def _previous_feature(
    previous: FeaturesManifest | None, key: str, feature: FeatureConfig, value_type: IdType | None
) -> PreviousFeature | None:
    """Return the feature of the previous run; None if it is new, has another definition, or has a damaged vocabulary file."""
    if previous is None or key not in previous.features:
        return None
    ingested_feature = previous.features[key]
    if ingested_feature.definition != feature_definition(feature, value_type):
        return None
    vocabulary_file_name = f"{key}.vocabulary.parquet"
    if vocabulary_file_name not in previous.files:
        return PreviousFeature(ingested_feature, None)
    vocabulary_path = previous.path(vocabulary_file_name)
    is_intact = vocabulary_path.is_file() and record_file(vocabulary_path) == previous.files[vocabulary_file_name]
    return PreviousFeature(ingested_feature, vocabulary_path) if is_intact else None
