"""Vocabularies of users and items in DuckDB: every id ever read has a code, and every id in the catalogue also has a row.

Codes and rows stay the same from run to run. Each side (user, item) has two tables:
<side>_ids (id, code, previous_row): every id ever read; previous_row is null for an id without a row in the previous run.
<side>s (id, code, row, vector_row): the ids that have a row in this run.
"""

from pathlib import Path

import duckdb
import numpy as np

from recsys_core.dataset.layout import codes_file, row_dtype
from recsys_core.ingest.log.engine import Vocabulary
from recsys_core.manifests import IdType, InteractionsManifest
from recsys_core.parquet.duckdb_session import SQL_TYPE, fetch_count, quoted, scan_sql


def create_id_table(
    connection: duckdb.DuckDBPyConnection, side: str, *, id_type: IdType, continued_run: InteractionsManifest | None
) -> int:
    """Create table <side>_ids with the ids of `continued_run`; return the number of these ids that have no row.

    Args:
        continued_run: the previous run; None if the vocabulary is built from scratch, so that the table starts empty.
    """
    connection.execute(
        f"CREATE TABLE {side}_ids (id {SQL_TYPE[id_type]} NOT NULL, code BIGINT, previous_row BIGINT)"
    ).fetchall()
    if continued_run is None:
        return 0
    previous_ids_sql = scan_sql(continued_run.path(codes_file(side)), options_sql="file_row_number = true")
    connection.execute(f'INSERT INTO {side}_ids SELECT id, file_row_number, "row" FROM {previous_ids_sql}').fetchall()
    return fetch_count(connection, f"SELECT count(*) FROM {side}_ids WHERE previous_row IS NULL")


def add_ids(
    connection: duckdb.DuckDBPyConnection, side: str, *, id_type: IdType, kept_row_sql: str, positive_row_sql: str | None
) -> None:
    """Give the new ids of `raw` the next codes, the id with the most events first.

    Args:
        kept_row_sql: SQL that is true for the rows of the part.
        positive_row_sql: SQL that is true for those of them that are events; None: all of them.
    """
    first_code = num_codes(connection, side)
    count_sql = "count(*)" if positive_row_sql is None else f"count(*) FILTER ({positive_row_sql})"
    id_counts_sql = (
        f'SELECT TRY_CAST("{side}" AS {SQL_TYPE[id_type]}) AS id, {count_sql} AS events FROM raw '
        f"WHERE {kept_row_sql} GROUP BY 1"
    )
    anti_join_sql = f"ANTI JOIN {side}_ids USING (id)" if first_code else ""
    connection.execute(
        f"INSERT INTO {side}_ids SELECT id, {first_code} + row_number() OVER (ORDER BY events DESC, id) - 1, NULL "
        f"FROM ({id_counts_sql}) {anti_join_sql}"
    ).fetchall()


def num_codes(connection: duckdb.DuckDBPyConnection, side: str) -> int:
    """Return the number of codes of a side: the first code that no id has."""
    return fetch_count(connection, f"SELECT coalesce(max(code), -1) + 1 FROM {side}_ids")


def row_sql_type(connection: duckdb.DuckDBPyConnection, side: str) -> str:
    """Return the SQL type in which the codes and rows of events are stored and sorted: 32 bits while every code fits."""
    return "INTEGER" if row_dtype(num_codes(connection, side)) is np.int32 else "BIGINT"


def id_condition_sql(connection: duckdb.DuckDBPyConnection, side: str, *, id_sql: str) -> str:
    """Return the SQL condition that joins the ids in `id_sql` with table <side>_ids.

    If all ids have different hashes, the condition compares hashes. This is a third faster.
    """
    ((num_ids, num_hashes),) = connection.sql(f"SELECT count(*), count(DISTINCT hash(id)) FROM {side}_ids").fetchall()
    return f"hash({id_sql}) = hash({side[0]}.id)" if num_hashes == num_ids else f"{id_sql} = {side[0]}.id"


def assign_rows(
    connection: duckdb.DuckDBPyConnection,
    side: str,
    *,
    is_filtered: bool,
    vector_ids_path: Path | None = None,
    add_vector_ids: bool = False,
) -> tuple[Vocabulary, bool]:
    """Create table <side>s: ids of the previous run keep their row, and new ids follow in the order of their codes.

    Return the content of the table, and whether the code of every id equals its row.

    Args:
        is_filtered: whether some ids may have no event in `log`; a new id without an event gets no row.
        vector_ids_path: parquet file with the column `id`, one row per pretrained vector; None without vectors.
        add_vector_ids: whether an id with a vector and without an event gets a row too.
    """
    vector_rows_sql = ""
    if vector_ids_path is not None:
        vector_rows_sql = (
            f"(SELECT id, file_row_number AS vector_row FROM {scan_sql(vector_ids_path, options_sql='file_row_number = true')})"
        )
    if add_vector_ids and vector_ids_path is not None:
        first_code = num_codes(connection, side)
        connection.execute(
            f"INSERT INTO {side}_ids SELECT id, {first_code} + row_number() OVER (ORDER BY vector_row) - 1, NULL "
            f"FROM {vector_rows_sql} ANTI JOIN {side}_ids USING (id)"
        ).fetchall()
    num_previous_rows = fetch_count(connection, f"SELECT coalesce(max(previous_row), -1) + 1 FROM {side}_ids")
    joins_sql = f" LEFT JOIN {vector_rows_sql} USING (id)" if vector_ids_path is not None else ""
    vector_row_sql = "coalesce(vector_row, -1)" if vector_ids_path is not None else "-1"
    has_row_sql = "true"
    if is_filtered:
        joins_sql += f' LEFT JOIN (SELECT DISTINCT "{side}" AS code, true AS has_event FROM log) USING (code)'
        has_row_sql = "previous_row IS NOT NULL OR has_event" + (f" OR {vector_row_sql} >= 0" if add_vector_ids else "")
    new_row_sql = f"{num_previous_rows} + row_number() OVER (PARTITION BY previous_row IS NULL ORDER BY code) - 1"
    row_sql = f"coalesce(previous_row, {new_row_sql})::{row_sql_type(connection, side)}"
    connection.execute(
        f'CREATE TABLE {side}s AS SELECT id, code, {row_sql} AS "row", {vector_row_sql} AS vector_row '
        f"FROM {side}_ids{joins_sql} WHERE {has_row_sql}"
    ).fetchall()
    table = connection.sql(f'SELECT id, code, vector_row FROM {side}s ORDER BY "row"').to_arrow_table()
    code_R, vector_row_R = (table.column(name).to_numpy() for name in ("code", "vector_row"))
    vocabulary = Vocabulary(side, ids=table.column("id"), vector_row_R=vector_row_R.astype(np.int64))
    return vocabulary, bool((code_R == np.arange(len(code_R))).all())


def write_codes(connection: duckdb.DuckDBPyConnection, side: str, path: Path) -> None:
    """Write every id ever read, with its row if it has one, in the order of the codes."""
    connection.execute(
        f'COPY (SELECT ids.id, vocabulary."row" FROM {side}_ids ids LEFT JOIN {side}s vocabulary USING (code) ORDER BY code) '
        f"TO {quoted(str(path), quote=chr(39))} (FORMAT parquet)"
    ).fetchall()
