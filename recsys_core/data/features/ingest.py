"""Stage `features`: features of users, items and events, as rows of their embedding tables, in the order of the catalogue."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.data.features.config import FeaturesConfig
from recsys_core.data.features.encoding import Encoding, LastNight
from recsys_core.data.features.schema import FeatureTable, check_features, refuse_bad_rows, value_sql
from recsys_core.data.features.vectors import check_vectors
from recsys_core.errors import InputError
from recsys_core.manifests import (
    EmbeddingsManifest,
    FeatureFacts,
    FeaturesManifest,
    FeatureTableFacts,
    InteractionsManifest,
    fingerprint_of,
    produce,
    record_file,
)
from recsys_core.parquet.duckdb_session import database, quoted, scan, scan_all
from recsys_core.parquet.guards import verify_sidecars
from recsys_core.parquet.local_copies import local_files
from recsys_core.parquet.sources import open_sources

BATCH_ROWS = 1_000_000
CONTEXT_NAME = "context.parquet"
WANTED = "the features"


def ingest_features(
    config: FeaturesConfig,
    *,
    interactions: InteractionsManifest,
    previous: FeaturesManifest | None,
    memory_limit: str,
    threads: int | None,
    folder: Path,
    embeddings: EmbeddingsManifest | None = None,
    data_root: Path | None = None,
) -> FeaturesManifest:
    """The arrays that FeaturesManifest describes, out of core in DuckDB.

    previous: last night's features, whose vocabularies and boundaries go on where the rows of users and items do.
    embeddings: the pretrained vectors, some of which may be of features (table item.brand).
    data_root: where every file of a table has to lie.

    Raises InputError for missing files and columns, other types than the config says, null and duplicate ids, ids of another
    type than the log's, weights that are not finite, negative or not one per value, and vectors that fit no feature.
    """
    if previous is not None and previous.lineage != interactions.lineage:
        previous = None
    log = open_sources([str(interactions.path(CONTEXT_NAME))], setting="features.context") if config.context else ()
    log = tuple(replace(source, partition={}) for source in log)  # the workspace's folders are no keys, whatever their names
    tables = check_features(
        config, user_id_type=interactions.user_id_type, item_id_type=interactions.item_id_type, log=log, data_root=data_root
    )
    vectors = {} if embeddings is None else embeddings.tables
    check_vectors(tables, id_types={name: found.id_type for name, found in vectors.items()})
    records = tuple(source.record for table in tables if table.side != "context" for source in table.sources)

    def build(out: Path) -> dict[str, Any]:
        scratch = out / "scratch"
        scratch.mkdir()
        features: dict[str, FeatureFacts] = {}
        facts: dict[str, FeatureTableFacts] = {}
        for table in tables:
            # A database of its own for each side: what it holds is let go of before the next.
            with database(memory_limit=memory_limit, threads=threads, spill=scratch / "spill", subject=WANTED) as connection:
                found = _load(connection, table, interactions=interactions, scratch=scratch)
                if found is not None:
                    facts[table.side] = found
                features |= _encode(
                    connection, table, interactions=interactions, previous=previous, embeddings=embeddings, out=out
                )
        shutil.rmtree(scratch)
        return {"lineage": interactions.lineage, "features": features, "tables": facts, "sources": records}

    fingerprint = fingerprint_of("features", config, interactions, previous, embeddings, records)
    return produce(folder, FeaturesManifest, fingerprint=fingerprint, build=build)


def _load(
    connection: duckdb.DuckDBPyConnection, table: FeatureTable, *, interactions: InteractionsManifest, scratch: Path
) -> FeatureTableFacts | None:
    """Table `joined` (see feature_encoding) with what belongs to the catalogue."""
    if table.sidecars:
        verify_sidecars(table.sources)
    values = []
    for number, feature in enumerate(table.features):
        values.append(f"{value_sql(feature, table.value_type.get(feature.name))} AS v{number}")
        if feature.weight_column is not None:
            values.append(f"CAST({quoted(feature.weight_column)} AS FLOAT[]) AS w{number}")
    with local_files(table.sources, columns=table.columns, scratch=scratch) as paths:
        refuse_bad_rows(connection, table, paths=paths)
        if table.id_column is None:
            stream = _events(paths[0], columns=table.columns, interactions=interactions)
            connection.register("events", stream)
            connection.execute(
                'CREATE TABLE joined AS SELECT "nightjar row" AS row, "nightjar trained" AS trained, '
                f"{', '.join(values)} FROM events"
            )
            return None
        catalogue = scan(interactions.path(f"{table.side}s.parquet"), options="file_row_number = true")
        kind = "BIGINT" if table.id_type == "int64" else "VARCHAR"
        connection.execute(
            "CREATE TABLE joined AS SELECT catalogue.row, catalogue.trained, described.* EXCLUDE (described_id) FROM "
            f"(SELECT id, file_row_number AS row, train_count > 0 AS trained FROM {catalogue}) catalogue "
            f"JOIN (SELECT CAST({quoted(table.id_column)} AS {kind}) AS described_id, "
            f"{', '.join(values)} FROM {scan_all(paths)}) described ON catalogue.id = described.described_id"
        )
    matched = int(connection.sql("SELECT count(*) FROM joined").fetchall()[0][0])
    rows = sum(source.record.rows for source in table.sources)
    if matched == 0:
        raise InputError(
            f"{table.sources[0].name}: column {table.id_column!r}: none of the {rows:,} ids is in the {table.side}s of the "
            "log; do both use the same ids?"
        )
    return FeatureTableFacts(rows=rows, not_in_catalogue=rows - matched, without_row=_rows(table, interactions) - matched)


def _rows(table: FeatureTable, interactions: InteractionsManifest) -> int:
    """How many users, items or events there are."""
    if table.side == "user":
        return interactions.num_users
    if table.side == "item":
        return interactions.num_items
    return interactions.train_events + interactions.validation_events + interactions.test_events


def _events(path: Path, *, columns: Sequence[str], interactions: InteractionsManifest) -> pa.RecordBatchReader:
    """The context, streamed, with each event's position and whether it is a training event."""
    user_offset, train_end = (np.load(interactions.path(f"{name}.npy"), mmap_mode="r") for name in ("user_offset", "train_end"))
    file = pq.ParquetFile(path)
    fields = [file.schema_arrow.field(name) for name in columns]
    schema = pa.schema([*fields, ("nightjar row", pa.int64()), ("nightjar trained", pa.bool_())])

    def batches() -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=list(columns)):
            stop = start + batch.num_rows
            users = slice(
                int(np.searchsorted(user_offset, start, side="right")) - 1, int(np.searchsorted(user_offset, stop, side="left"))
            )
            # Each user's training events, then the others, cut at the ends of the batch.
            bounds = np.stack([user_offset[users], train_end[users]], axis=1).reshape(-1)
            lengths = np.diff(np.clip(np.append(bounds, stop), start, stop))
            trained = np.repeat(np.arange(len(lengths)) % 2 == 0, lengths)
            arrays = [batch.column(name) for name in columns]
            yield pa.RecordBatch.from_arrays([*arrays, pa.array(np.arange(start, stop)), pa.array(trained)], schema=schema)
            start = stop

    return pa.RecordBatchReader.from_batches(schema, batches())


def _encode(
    connection: duckdb.DuckDBPyConnection,
    table: FeatureTable,
    *,
    interactions: InteractionsManifest,
    previous: FeaturesManifest | None,
    embeddings: EmbeddingsManifest | None,
    out: Path,
) -> dict[str, FeatureFacts]:
    made = {}
    for number, feature in enumerate(table.features):
        key = f"{table.side}.{feature.name}"
        encoding = Encoding(
            connection=connection,
            feature=feature,
            number=number,
            key=key,
            value_type=table.value_type.get(feature.name),
            rows=_rows(table, interactions),
            # Users and items count whether or not training sees them; what was known of an event after training does not.
            counted="trained" if table.side == "context" else "TRUE",
            last_night=_last_night(previous, key),
            out=out,
            vector_ids=embeddings.ids(key) if embeddings is not None and key in embeddings.tables else None,
        )
        made[key] = encoding.run()
    return made


def _last_night(previous: FeaturesManifest | None, key: str) -> LastNight | None:
    """The feature in `previous`; none where its vocabulary is no longer what was written."""
    if previous is None or key not in previous.features:
        return None
    name = f"{key}.vocabulary.parquet"
    if name not in previous.files:
        return LastNight(previous.features[key], None)
    path = previous.path(name)
    intact = path.is_file() and record_file(path) == previous.files[name]
    return LastNight(previous.features[key], path) if intact else None
