"""Stage `interactions`: the log from parquet into vocabularies and a CSR event store, out of core in DuckDB."""

import shutil
from pathlib import Path
from typing import Any

import duckdb

from recsys_core.data.interactions.column_statistics import bad_rows, column_facts
from recsys_core.data.interactions.config import SPLITS, InteractionsConfig, LogFilter
from recsys_core.data.interactions.event_writer import EventWriter
from recsys_core.data.interactions.filters import check_log, load_log
from recsys_core.data.interactions.incremental import gather_parts
from recsys_core.data.interactions.schema import InteractionsInput, check_interactions
from recsys_core.data.interactions.vocabulary import number, open_ids, write_ids
from recsys_core.errors import InputError
from recsys_core.manifests import EmbeddingsManifest, IdType, InteractionsManifest, fingerprint_of, produce
from recsys_core.parquet.duckdb_session import database


def ingest_interactions(
    config: InteractionsConfig,
    *,
    embeddings: EmbeddingsManifest | None,
    folder: Path,
    previous: InteractionsManifest | None = None,
    data_root: Path | None = None,
) -> InteractionsManifest:
    """The vocabularies and the event store that InteractionsManifest describes.

    DuckDB reads, splits, counts and sorts within config.memory_limit and spills to the stage's own folder; what it returns
    streams into memory maps. The result does not depend on the number of threads.

    Args:
        data_root: where every input file has to lie.
        previous: continued where it may be: an id keeps its row, and only files that it has not read are read.

    Raises:
        InputError: bad rows (see config.on_bad_rows), ids of another type than the vectors', vectors of none of the items, a
            split that leaves nothing to train on or to test with, too little memory or disk.
    """
    found = check_interactions(config, data_root=data_root)
    vectors = embeddings.tables if embeddings is not None else {}
    for table, column, kind in (
        ("item", config.item_column, found.item_id_type),
        ("user", config.user_column, found.user_id_type),
    ):
        if table in vectors and vectors[table].id_type != kind:
            raise InputError(
                f"{found.sources[0].name}: column {column!r} is {kind}, but the ids of the {table} vectors are "
                f"{vectors[table].id_type}; write both as one type"
            )
    records = tuple(source.record for source in found.sources)
    settings = config.result_settings()
    fingerprint = fingerprint_of("interactions", settings, embeddings, records, previous)

    def build(out: Path) -> dict[str, Any]:
        spill = out / "spill"
        with database(
            memory_limit=config.memory_limit, threads=config.threads, spill=spill, subject="interactions"
        ) as connection:
            facts = _ingest(connection, config, found, embeddings, out, previous=previous, fingerprint=fingerprint)
        shutil.rmtree(spill, ignore_errors=True)
        return facts | {"sources": records, "user_id_type": found.user_id_type, "item_id_type": found.item_id_type}

    return produce(folder, InteractionsManifest, fingerprint=fingerprint, build=build)


def _ingest(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    found: InteractionsInput,
    embeddings: EmbeddingsManifest | None,
    out: Path,
    *,
    previous: InteractionsManifest | None,
    fingerprint: str,
) -> dict[str, Any]:
    types = (found.user_id_type, found.item_id_type)
    rebuilt = _why_rebuild(config, types, previous)
    continued = None if rebuilt else previous
    left_out = [
        open_ids(connection, side, kind=kind, previous=continued) for side, kind in zip(("user", "item"), types, strict=True)
    ]
    parts, fresh = gather_parts(connection, config, found, out, continued=continued)
    aside = load_log(connection, config, parts=parts, folder=out, live=found.splits)
    facts: dict[str, Any] = dict(check_log(connection, config, first_file=found.sources[0].name))
    filtered = bool(aside) or any(left_out) or config.filter != LogFilter()
    vector_ids = {table: embeddings.path(f"{table}.ids.parquet") for table in embeddings.tables} if embeddings else {}
    users = number(connection, "user", filtered=filtered, vector_ids=vector_ids.get("user"))
    items = number(connection, "item", filtered=filtered, vector_ids=vector_ids.get("item"), catalogue=True)
    writer = EventWriter(out, users=users, items=items, config=config)
    writer.write_events(connection)
    writer.write_offsets()
    present, with_vector = writer.item_count_IS.any(axis=1), items.vector_row >= 0
    for vocabulary, found_both in ((users, users.vector_row >= 0), (items, with_vector & present)):
        side = vocabulary.side
        if embeddings is not None and side in vector_ids and not found_both.any():
            raise InputError(
                f"embeddings: none of the {embeddings.tables[side].rows:,} {side} vectors belongs to one of the log's {side}s; "
                "do both use the same ids?"
            )
    for vocabulary, counts in ((users, writer.user_count_US), (items, writer.item_count_IS)):
        write_ids(connection, vocabulary, train_count=counts[:, 0], events=counts.sum(axis=1), out=out)
    return facts | {
        "num_users": len(users),
        "num_items": len(items),
        **dict(zip((f"{split}_events" for split in SPLITS), writer.user_count_US.sum(axis=0).tolist(), strict=True)),
        "ordered": config.ordered,
        "id_columns": (config.user_column, config.item_column),
        "items_with_vector": int(with_vector.sum()),
        "items_vector_only": int((with_vector & ~present).sum()),
        "continues": continued.fingerprint if continued else None,
        "lineage": continued.lineage if continued else fingerprint,
        "run_number": continued.run_number + 1 if continued else 1,
        "rebuild_reason": rebuilt,
        "idle_users": int((~writer.user_count_US.any(axis=1)).sum()),
        "idle_items": int((~present & ~with_vector).sum()),
        "rows_read": sum(source.record.rows for source in fresh),
        "files_read": len(fresh),
        "columns": column_facts(connection, config, found, parts=parts, out=out),
        "removed_events": aside,
        "bad_rows": bad_rows(parts, found),
        "parts": parts,
    }


def _why_rebuild(config: InteractionsConfig, types: tuple[IdType, IdType], previous: InteractionsManifest | None) -> str | None:
    """Why the vocabulary has to be built anew, or None where last night's is continued."""
    if previous is None:
        return "there is no earlier night"
    if config.vocabulary.rebuild == "always":
        return "interactions.vocabulary.rebuild is always"
    columns = (config.user_column, config.item_column)
    if columns != previous.id_columns:
        return f"the ids are read from {columns}, and were from {previous.id_columns}"
    if types != (previous.user_id_type, previous.item_id_type):
        return f"the ids are {types[0]} and {types[1]}, and were {previous.user_id_type} and {previous.item_id_type}"
    if previous.run_number >= config.vocabulary.rebuild_after_runs:
        return f"it was continued for {previous.run_number} nights (interactions.vocabulary.rebuild_after_runs)"
    for side, idle, rows in (
        ("users", previous.idle_users, previous.num_users),
        ("items", previous.idle_items, previous.num_items),
    ):
        if idle > config.vocabulary.max_idle_share * rows:
            return f"{idle:,} of {rows:,} {side} had no event last night (interactions.vocabulary.max_idle_share)"
    return None
