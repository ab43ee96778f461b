"""Writer of a part: view `raw` with the code of each user and item in place of its id."""

from collections.abc import Mapping
from pathlib import Path

import duckdb

from recsys_core.ingest.log.config import FileSplit, InteractionsConfig
from recsys_core.ingest.log.duckdb_engine.raw_log import ITEM_HASH_ARGUMENTS_SQL, PAIR_HASH_ARGUMENTS_SQL
from recsys_core.manifests import IdType
from recsys_core.parquet.duckdb_session import SQL_TYPE, quoted, scan_sql


def add_ids(connection: duckdb.DuckDBPyConnection, side: str, *, id_type: IdType, kept_row_sql: str) -> None:
    """Give the new ids of `raw` the next codes, the most frequent id first."""
    ((num_codes,),) = connection.sql(f"SELECT count(*) FROM {side}_ids").fetchall()
    id_counts_sql = (
        f'SELECT TRY_CAST("{side}" AS {SQL_TYPE[id_type]}) AS id, count(*) AS events FROM raw WHERE {kept_row_sql} GROUP BY 1'
    )
    anti_join_sql = f"ANTI JOIN {side}_ids USING (id)" if num_codes else ""
    connection.execute(
        f"INSERT INTO {side}_ids SELECT id, ({num_codes} + row_number() OVER (ORDER BY events DESC, id) - 1)::INTEGER, NULL "
        f"FROM ({id_counts_sql}) {anti_join_sql}"
    ).fetchall()


def write_events(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    *,
    part_path: Path,
    kept_row_sql: str,
    id_types: Mapping[str, IdType],
) -> dict[int, tuple[int, int]]:
    """Write the rows to keep, with codes in place of ids.

    Return, by index of the file, the number of rows written and the number of these rows that have a null.
    """
    # TRY_CAST: DuckDB may cast a bad row before the filter removes it.
    id_sql_by_side = {side: f'TRY_CAST(raw."{side}" AS {SQL_TYPE[id_type]})' for side, id_type in id_types.items()}
    extra_columns_sql = ["TRY_CAST(weight AS FLOAT) AS weight"] if config.weight_column else []
    extra_columns_sql += [f"context_{index}" for index in range(len(config.context_columns))]
    draw_sql = _validation_draw_sql(config)
    extra_columns_sql += [] if draw_sql is None else [f"{draw_sql} AS draw"]
    columns_sql = ", ".join(["source::INTEGER AS source", 'u.code AS "user"', "i.code AS item", "position", *extra_columns_sql])
    joins_sql = [
        f"JOIN {side}_ids {side[0]} ON {_id_condition_sql(connection, side, id_sql=id_sql)}"
        for side, id_sql in id_sql_by_side.items()
    ]
    connection.execute(
        f"COPY (SELECT {columns_sql} FROM raw {' '.join(joins_sql)} WHERE {kept_row_sql}) "
        f"TO {quoted(str(part_path), quote=chr(39))} (FORMAT parquet, COMPRESSION lz4_raw)"
    ).fetchall()
    has_null_sql = "position IS NULL" + (" OR weight IS NULL" if config.weight_column else "")
    query = f"SELECT source, count(*), count(*) FILTER ({has_null_sql}) FROM {scan_sql(part_path)} GROUP BY 1"
    return {source: (num_rows, num_nulls) for source, num_rows, num_nulls in connection.sql(query).fetchall()}


def _validation_draw_sql(config: InteractionsConfig) -> str | None:
    """Return SQL for a number below 1,000,000 that decides whether a training event is held out for validation.

    All events of a pair of user and item, or of an item (see validation_unit), have the same number.
    Return None if no event is held out by a hash.
    """
    if not isinstance(config.split, FileSplit) or config.split.validation_share == 0:
        return None
    hash_arguments_sql = PAIR_HASH_ARGUMENTS_SQL if config.split.validation_unit == "pair" else ITEM_HASH_ARGUMENTS_SQL
    return f"(hash({hash_arguments_sql}, 'validation') % 1000000)::INTEGER"


def _id_condition_sql(connection: duckdb.DuckDBPyConnection, side: str, *, id_sql: str) -> str:
    """Return the SQL condition that joins the ids in `id_sql` with table <side>_ids.

    If all ids have different hashes, the condition compares hashes. This is a third faster.
    """
    ((num_ids, num_hashes),) = connection.sql(f"SELECT count(*), count(DISTINCT hash(id)) FROM {side}_ids").fetchall()
    return f"hash({id_sql}) = hash({side[0]}.id)" if num_hashes == num_ids else f"{id_sql} = {side[0]}.id"
