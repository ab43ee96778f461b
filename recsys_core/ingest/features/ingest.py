"""Stage `features`: features of users, items and events as rows of embedding tables, in the order of the catalogue."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import CONTEXT_FILE, vocabulary_file
from recsys_core.errors import InputError
from recsys_core.ingest.features.checks import reject_bad_table
from recsys_core.ingest.features.config import FeatureConfig, FeaturesConfig
from recsys_core.ingest.features.encoding import encode
from recsys_core.ingest.features.feature_column import BATCH_ROWS, FeatureColumn, PreviousFeature, feature_definition
from recsys_core.ingest.features.feature_schema import FeatureTable, check_feature_vectors, open_feature_tables
from recsys_core.manifests import (
    EmbeddingsManifest,
    FeatureFacts,
    FeaturesManifest,
    FeatureTableFacts,
    IdType,
    InteractionsManifest,
    StageFolder,
    fingerprint_of,
    record_file,
)
from recsys_core.parquet.duckdb_session import SQL_TYPE, database, quoted, scan_all_sql, scan_sql
from recsys_core.parquet.guards import verify_sidecars
from recsys_core.parquet.local_copies import local_files
from recsys_core.parquet.sources import open_sources


def ingest_features(
    config: FeaturesConfig,
    *,
    interactions: InteractionsManifest,
    previous: FeaturesManifest | None,
    memory_limit: str,
    threads: int | None,
    folder: Path,
    embeddings: EmbeddingsManifest | None = None,
    allowed_data_root: Path | None = None,
) -> FeaturesManifest:
    """Write the arrays that FeaturesManifest describes, out of core in DuckDB.

    Args:
        previous: manifest of the previous run. Its feature vocabularies, boundaries and means are used again, unless the
            vocabularies of users and items were rebuilt.
        embeddings: pretrained vectors; a table such as item.brand holds vectors of the values of a feature.
        allowed_data_root: folder that has to contain every file of a feature table.

    Raises:
        InputError: missing files or columns, types that do not fit the config, null or duplicate ids, ids of another type
            than the ids of the log, unusable weights, or vectors that fit no feature.
    """
    if previous is not None and previous.lineage != interactions.lineage:
        previous = None
    context_sources = open_sources([str(interactions.path(CONTEXT_FILE))], setting="features.context") if config.context else ()
    # The path of the workspace may contain a folder named key=value, which is not a hive key of the context columns.
    context_sources = tuple(replace(source, partition_values={}) for source in context_sources)
    tables = open_feature_tables(
        config,
        user_id_type=interactions.user_id_type,
        item_id_type=interactions.item_id_type,
        context_sources=context_sources,
        allowed_data_root=allowed_data_root,
    )
    vector_tables = {} if embeddings is None else embeddings.tables
    check_feature_vectors(tables, id_type_by_table={name: table.id_type for name, table in vector_tables.items()})
    source_records = tuple(source.record for table in tables if table.side != "context" for source in table.sources)
    fingerprint = fingerprint_of("ingest_features", config, interactions, previous, embeddings, source_records)
    stage = StageFolder(folder, FeaturesManifest, fingerprint=fingerprint)
    if stage.manifest is not None:
        return stage.manifest
    with stage.writing() as output_folder:
        scratch_folder = output_folder / "scratch"
        scratch_folder.mkdir()
        facts_by_key: dict[str, FeatureFacts] = {}
        table_facts_by_side: dict[str, FeatureTableFacts] = {}
        for table in tables:
            # One database per side: its memory and its spill files are released before the next side.
            with database(
                memory_limit=memory_limit, num_threads=threads, spill_folder=scratch_folder / "spill", subject="the features"
            ) as connection:
                if table.side == "context":
                    _load_context(connection, table, interactions=interactions, scratch_folder=scratch_folder)
                else:
                    table_facts_by_side[table.side] = _load_table(
                        connection, table, interactions=interactions, scratch_folder=scratch_folder
                    )
                for feature_index, feature in enumerate(table.features):
                    key, value_type = f"{table.side}.{feature.name}", table.value_type_by_feature.get(feature.name)
                    feature_column = FeatureColumn(
                        connection=connection,
                        feature=feature,
                        feature_index=feature_index,
                        key=key,
                        value_type=value_type,
                        num_rows=_num_rows(table, interactions),
                        # Validation and test events do not count for the vocabulary of a context feature.
                        counted_row_sql="in_training" if table.side == "context" else "TRUE",
                        previous=_previous_feature(previous, key, feature, value_type),
                        output_folder=output_folder,
                        vector_ids_path=embeddings.ids_path(key) if embeddings is not None and key in vector_tables else None,
                    )
                    facts_by_key[key] = encode(feature_column)
        shutil.rmtree(scratch_folder)
        return stage.commit(
            lineage=interactions.lineage, features=facts_by_key, tables=table_facts_by_side, sources=source_records
        )


def _load_table(
    connection: duckdb.DuckDBPyConnection, table: FeatureTable, *, interactions: InteractionsManifest, scratch_folder: Path
) -> FeatureTableFacts:
    """Create table `joined` (see FeatureColumn) with the rows of a feature table whose id is in the catalogue."""
    assert table.id_column is not None and table.id_type is not None
    if table.has_sidecars:
        verify_sidecars(table.sources)
    with local_files(table.sources, columns=table.columns, scratch_folder=scratch_folder) as paths:
        reject_bad_table(connection, table, paths=paths)
        catalogue_sql = scan_sql(interactions.path(vocabulary_file(table.side)), options_sql="file_row_number = true")
        connection.execute(
            "CREATE TABLE joined AS "
            "SELECT catalogue.row, catalogue.in_training, feature_table.* EXCLUDE (feature_table_id) "
            f"FROM (SELECT id, file_row_number AS row, train_count > 0 AS in_training FROM {catalogue_sql}) catalogue "
            f"JOIN (SELECT CAST({quoted(table.id_column)} AS {SQL_TYPE[table.id_type]}) AS feature_table_id, "
            f"{_value_columns_sql(table)} FROM {scan_all_sql(paths)}) feature_table "
            "ON catalogue.id = feature_table.feature_table_id"
        )
    ((num_matched,),) = connection.sql("SELECT count(*) FROM joined").fetchall()
    num_rows = sum(source.record.rows for source in table.sources)
    if num_matched == 0:
        raise InputError(
            f"{table.sources[0].name}: column {table.id_column!r}: none of the {num_rows:,} ids is in the {table.side}s of the "
            "log; check that both use the same ids"
        )
    return FeatureTableFacts(
        rows=num_rows,
        not_in_catalogue=num_rows - num_matched,
        without_row=_num_rows(table, interactions) - num_matched,
    )


def _load_context(
    connection: duckdb.DuckDBPyConnection, table: FeatureTable, *, interactions: InteractionsManifest, scratch_folder: Path
) -> None:
    """Create table `joined` (see FeatureColumn) with the context columns of every event."""
    with local_files(table.sources, columns=table.columns, scratch_folder=scratch_folder) as paths:
        reject_bad_table(connection, table, paths=paths)
        connection.register("events", _read_events(paths[0], columns=table.columns, interactions=interactions))
        connection.execute(
            'CREATE TABLE joined AS SELECT "nightjar row" AS row, "nightjar in_training" AS in_training, '
            f"{_value_columns_sql(table)} FROM events"
        )


def _value_columns_sql(table: FeatureTable) -> str:
    """Return SQL for the columns v<n> and w<n> of `joined`, cast to the types in which values and weights are stored."""
    columns = []
    for feature_index, feature in enumerate(table.features):
        value_type = table.value_type_by_feature.get(feature.name)
        sql_type = ("DOUBLE" if value_type is None else SQL_TYPE[value_type]) + ("[]" if feature.is_list else "")
        columns.append(f"CAST({quoted(feature.source_column)} AS {sql_type}) AS v{feature_index}")
        if feature.weight_column is not None:
            columns.append(f"CAST({quoted(feature.weight_column)} AS FLOAT[]) AS w{feature_index}")
    return ", ".join(columns)


def _num_rows(table: FeatureTable, interactions: InteractionsManifest) -> int:
    """Return the number of users, items or events of the side."""
    if table.side == "user":
        return interactions.num_users
    if table.side == "item":
        return interactions.num_items
    return interactions.train_events + interactions.validation_events + interactions.test_events


def _read_events(path: Path, *, columns: Sequence[str], interactions: InteractionsManifest) -> pa.RecordBatchReader:
    """Stream the context columns. Two more columns contain the index of the event, and whether it is a training event."""
    store = EventStore.open(interactions)
    file = pq.ParquetFile(path)
    fields = [file.schema_arrow.field(name) for name in columns]
    schema = pa.schema([*fields, ("nightjar row", pa.int64()), ("nightjar in_training", pa.bool_())])

    def batches() -> Iterator[pa.RecordBatch]:
        start_event = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=list(columns)):
            stop_event = start_event + batch.num_rows
            is_training = store.is_training(slice(start_event, stop_event))
            arrays = [batch.column(name) for name in columns]
            yield pa.RecordBatch.from_arrays(
                [*arrays, pa.array(np.arange(start_event, stop_event)), pa.array(is_training)], schema=schema
            )
            start_event = stop_event

    return pa.RecordBatchReader.from_batches(schema, batches())


def _previous_feature(
    previous: FeaturesManifest | None, key: str, feature: FeatureConfig, value_type: IdType | None
) -> PreviousFeature | None:
    """Return the feature in the previous run; None if its definition differs or its vocabulary file is missing or changed."""
    if previous is None or key not in previous.features:
        return None
    facts = previous.features[key]
    if facts.definition != feature_definition(feature, value_type):
        return None
    vocabulary_name = f"{key}.vocabulary.parquet"
    if vocabulary_name not in previous.files:
        return PreviousFeature(facts, None)
    path = previous.path(vocabulary_name)
    is_intact = path.is_file() and record_file(path) == previous.files[vocabulary_name]
    return PreviousFeature(facts, path) if is_intact else None
