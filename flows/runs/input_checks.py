"""Input checks before a run: existence of the files, columns, types, and the values of one row group."""

from flows.settings.environment import require_writable
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError
from recsys_core.ingest.features.feature_schema import check_feature_vectors, open_feature_tables
from recsys_core.ingest.first_row_group import check_shared_ids, check_time_unit, stored_vector_dim
from recsys_core.ingest.log.log_schema import open_interactions
from recsys_core.ingest.vectors.vector_schema import open_embeddings
from recsys_core.models.tables.table_config import check_width


def check_inputs(config: PipelineConfig) -> dict[str, str]:
    """Check the footers and one row group of all inputs; return one line about each input. Raises InputError."""
    require_writable(config.workspace)
    log = open_interactions(config.interactions_with_context, allowed_data_root=config.allowed_data_root)
    check_time_unit(config.interactions_with_context, log.sources_by_split["train"])
    num_rows = sum(source.record.rows for source in log.sources)
    facts = {
        "interactions": f"{num_rows:,} rows in {len(log.sources)} files, users {log.user_id_type}, items {log.item_id_type}"
    }
    embeddings = open_embeddings(config.embeddings, allowed_data_root=config.allowed_data_root)
    for vectors in embeddings:
        table = vectors.config.table
        expected_type = {"item": log.item_id_type, "user": log.user_id_type}.get(table, vectors.id_type)
        if vectors.id_type != expected_type:
            raise InputError(
                f"{vectors.setting}: the ids of the vectors are {vectors.id_type}, but the ids of the log's {table}s are "
                f"{expected_type}; write both with the same type"
            )
        dim = stored_vector_dim(vectors)
        if dim is not None:
            check_width(dim, config.tables[table].dim if table in config.tables else None, table=table)
        width_text = f"{dim} numbers each" if dim else "lengths differ in the first rows"
        facts[vectors.setting] = f"{vectors.num_rows:,} vectors of {table} in {len(vectors.sources)} files, {width_text}"
    id_column_by_table = {
        "item": config.interactions_with_context.item_column,
        "user": config.interactions_with_context.user_column,
    }
    check_shared_ids(config.interactions_with_context, log.sources, embeddings, id_column_by_table=id_column_by_table)
    if config.features is not None:
        feature_tables = open_feature_tables(
            config.features,
            user_id_type=log.user_id_type,
            item_id_type=log.item_id_type,
            context_sources=log.sources,
            allowed_data_root=config.allowed_data_root,
        )
        check_feature_vectors(
            feature_tables, id_type_by_table={vectors.config.table: vectors.id_type for vectors in embeddings}
        )
        facts["features"] = ", ".join(
            f"{len(table.features)} of {table.side}s" if table.side != "context" else f"{len(table.features)} of the context"
            for table in feature_tables
        )
    return facts
