"""Stage `ingest_interactions`: vocabularies and a CSR event store from the parquet log, out of core.

Shapes: U users, I items, R rows of a vocabulary.
"""

import shutil
from pathlib import Path
from typing import Any

from recsys_core.dataset.layout import codes_file
from recsys_core.errors import InputError
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine import LogEngine
from recsys_core.ingest.log.event_writer import EventWriter
from recsys_core.ingest.log.incremental import gather_parts
from recsys_core.ingest.log.log_schema import InteractionsInput, open_interactions
from recsys_core.ingest.log.log_statistics import (
    bad_row_counts,
    column_statistics,
    current_files,
    iso_time,
    reject_unusable_log,
)
from recsys_core.manifests import SPLITS, EmbeddingsManifest, InteractionsManifest, StageFolder
from recsys_core.parquet.columns import require_equal_types


def ingest_interactions(
    config: InteractionsConfig,
    *,
    embeddings: EmbeddingsManifest | None,
    folder: Path,
    previous: InteractionsManifest | None = None,
    allowed_data_root: Path | None = None,
) -> InteractionsManifest:
    """Write the vocabularies and the event store that InteractionsManifest describes.

    The LogEngine of config.engine reads, splits, counts and sorts the events, and spills to the folder of the stage. Its
    results stream into memory maps.

    Args:
        embeddings: pretrained vectors. An item with a vector is in the catalogue even without an event.
        previous: manifest of the previous run. Unless a rebuild is due, ids keep their rows, and only new files are read.
        allowed_data_root: folder that has to contain every input file.

    Raises:
        InputError: bad rows (see config.on_bad_rows), ids of another type than the ids of the vectors, vectors that
            share no id with the log, an empty training or test split, or too little memory or disk.
    """
    log = open_interactions(config, allowed_data_root=allowed_data_root)
    _check_vector_id_types(config, log, embeddings)
    source_records = tuple(source.record for source in log.sources)
    settings = config.result_settings()
    stage = StageFolder(
        folder, InteractionsManifest, inputs=["ingest_interactions", settings, embeddings, source_records, previous]
    )
    if stage.manifest is not None:
        return stage.manifest
    rebuild_reason = _rebuild_reason(config, log, previous)
    continued_manifest = None if rebuild_reason else previous
    with stage.writing() as output_folder:
        spill_folder = output_folder / "spill"
        id_types = {"user": log.user_id_type, "item": log.item_id_type}
        with config.engine.engine_class().open(
            config, id_types=id_types, continued_manifest=continued_manifest, spill_folder=spill_folder
        ) as engine:
            manifest_fields = _write_store(
                engine, config, log, embeddings, output_folder, continued_manifest=continued_manifest
            )
        shutil.rmtree(spill_folder, ignore_errors=True)
        return stage.commit(
            **manifest_fields,
            continued_fingerprint=continued_manifest.fingerprint if continued_manifest else None,
            lineage=continued_manifest.lineage if continued_manifest else stage.fingerprint,
            run_number=continued_manifest.run_number + 1 if continued_manifest else 1,
            rebuild_reason=rebuild_reason,
            user_id_type=log.user_id_type,
            item_id_type=log.item_id_type,
            sources=source_records,
        )


def _write_store(
    engine: LogEngine,
    config: InteractionsConfig,
    log: InteractionsInput,
    embeddings: EmbeddingsManifest | None,
    output_folder: Path,
    *,
    continued_manifest: InteractionsManifest | None,
) -> dict[str, Any]:
    """Write the vocabularies and the event store; return the fields of the manifest that describe them."""
    parts, new_sources = gather_parts(engine, config, log, output_folder, continued_manifest=continued_manifest)
    counts = engine.load(parts, folder=output_folder, split_code_by_file=log.split_code_by_file)
    reject_unusable_log(config, counts, first_file_name=log.sources[0].name)
    ids_path_by_table = {table: embeddings.ids_path(table) for table in embeddings.tables} if embeddings else {}
    users, items = (engine.assign_rows(side, vector_ids_path=ids_path_by_table.get(side)) for side in ("user", "item"))

    writer = EventWriter(output_folder, users=users, items=items, config=config)
    writer.write_events(engine.sorted_events(), num_events=sum(counts.num_events_by_split))
    num_negatives = 0
    if config.explicit_negatives:
        num_negatives, negatives = engine.sorted_negatives()
        writer.write_negatives(negatives, num_negatives=num_negatives)
    writer.write_offsets()
    user_count_U, item_count_I = writer.user_count_U3.sum(axis=1), writer.item_count_I3.sum(axis=1)
    has_event_I, has_vector_I = item_count_I > 0, items.vector_row_R >= 0
    _require_match(embeddings, "user", has_match=bool((users.vector_row_R >= 0).any()))
    _require_match(embeddings, "item", has_match=bool((has_vector_I & has_event_I).any()))
    writer.write_vocabularies()
    for side in ("user", "item"):
        engine.write_codes(side, output_folder / codes_file(side))
    time_span = dict(zip(("first_time", "last_time"), map(iso_time, counts.time_span_us or ()), strict=False))
    vocabularies_and_counts = ((users, user_count_U), (items, item_count_I))
    files = current_files(parts, input_files=log.split_code_by_file)
    return {
        **time_span,
        "test_days": counts.test_days,
        "num_users": len(users),
        "num_items": len(items),
        **{f"num_{split}_events": count for split, count in zip(SPLITS, counts.num_events_by_split, strict=True)},
        "num_known_negatives": num_negatives,
        "is_ordered": config.is_ordered,
        "id_columns": (config.user_column, config.item_column),
        "num_items_with_vector": int(has_vector_I.sum()),
        "num_items_vector_only": int((has_vector_I & ~has_event_I).sum()),
        "num_idle_users": int((user_count_U == 0).sum()),
        "num_idle_items": int((~has_event_I & ~has_vector_I).sum()),
        "num_rows_read": sum(source.record.num_rows for source in new_sources),
        "num_files_read": len(new_sources),
        "columns": column_statistics(
            config,
            files,
            vocabularies_and_counts=vocabularies_and_counts,
            num_nulls_by_context_column=writer.num_nulls_by_context_column,
            num_events=sum(counts.num_events_by_split),
        ),
        "num_removed_events_by_filter": counts.num_removed_by_reason,
        "num_bad_rows_by_reason": bad_row_counts(files),
        "parts": parts,
        "shards": writer.shards,
    }


def _check_vector_id_types(config: InteractionsConfig, log: InteractionsInput, embeddings: EmbeddingsManifest | None) -> None:
    for table, column, id_type in (
        ("item", config.item_column, log.item_id_type),
        ("user", config.user_column, log.user_id_type),
    ):
        if embeddings is not None and table in embeddings.tables:
            require_equal_types(
                id_type,
                subject=f"{log.sources[0].name}: column {column!r}",
                other_type=embeddings.tables[table].id_type,
                other_subject=f"the id of the {table} vectors",
            )


def _require_match(embeddings: EmbeddingsManifest | None, side: str, *, has_match: bool) -> None:
    if embeddings is not None and side in embeddings.tables and not has_match:
        raise InputError(
            f"embeddings: none of the {embeddings.tables[side].num_rows:,} ids of the {side} vectors is an id of the "
            f"{side}s of the log; check that both use the same ids"
        )


def _rebuild_reason(config: InteractionsConfig, log: InteractionsInput, previous: InteractionsManifest | None) -> str | None:
    """Return why the vocabularies are built from scratch; None to continue the vocabularies of the previous run."""
    if previous is None:
        return "there is no previous run that this version of nightjar reads"
    if config.vocabulary.rebuild == "always":
        return "interactions.vocabulary.rebuild is always"
    id_columns = (config.user_column, config.item_column)
    if id_columns != previous.id_columns:
        return f"the ids come from the columns {id_columns}, but came from {previous.id_columns} in the previous run"
    id_types, previous_id_types = (log.user_id_type, log.item_id_type), (previous.user_id_type, previous.item_id_type)
    if id_types != previous_id_types:
        return f"the id types are {id_types}, but were {previous_id_types} in the previous run"
    if previous.run_number >= config.vocabulary.rebuild_after_runs:
        return f"number of runs with the same vocabularies: {previous.run_number} (interactions.vocabulary.rebuild_after_runs)"
    for ids_noun, num_idle_ids, num_ids, idle_text in (
        ("users", previous.num_idle_users, previous.num_users, "no event"),
        ("items", previous.num_idle_items, previous.num_items, "neither an event nor a vector"),
    ):
        if num_idle_ids > config.vocabulary.max_idle_share * num_ids:
            return (
                f"{num_idle_ids:,} of {num_ids:,} {ids_noun} had {idle_text} in the previous run "
                "(interactions.vocabulary.max_idle_share)"
            )
    return None
