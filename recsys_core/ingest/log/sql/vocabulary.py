"""Vocabularies of users and items: every id that was ever read has a code, and every id in the vocabulary also has a row.

Codes and rows stay the same until the vocabularies are rebuilt. Each side (user, item) has two tables:

- <side>_ids (id, code, previous_row): every id that was ever read; `previous_row` is its row in the previous run, or null.
- <side>s (id, code, row, vector_row): the ids that have a row in this run.

Shapes: R rows of a vocabulary.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from recsys_core.dataset.layout import codes_file, row_dtype
from recsys_core.ingest.log.engine import Vocabulary
from recsys_core.ingest.log.sql.session import SqlSession, fetch_count
from recsys_core.manifests import IdType, InteractionsManifest
from recsys_core.parquet.duckdb_session import SQL_TYPE


def create_id_table(session: SqlSession, side: str, *, id_type: IdType, continued_manifest: InteractionsManifest | None) -> int:
    """Create table <side>_ids with the ids of `continued_manifest`; return the number of these ids that have no row.

    Args:
        continued_manifest: manifest of the previous run; None if the vocabulary is built from scratch. The table is then empty.
    """
    session.create_id_table(f"{side}_ids", id_type=SQL_TYPE[id_type])
    if continued_manifest is None:
        return 0
    previous_ids_sql = session.scan_sql(continued_manifest.path(codes_file(side)), with_row_number=True)
    session.append(f"{side}_ids", f'SELECT id, file_row_number::BIGINT, "row"::BIGINT FROM {previous_ids_sql}')
    return fetch_count(session, f"SELECT count(*) FROM {side}_ids WHERE previous_row IS NULL")


def add_ids(session: SqlSession, side: str, *, id_type: IdType, is_part_row_sql: str, positive_row_sql: str | None) -> None:
    """Give the new ids of `raw` the next codes, the id with the most events first.

    Args:
        is_part_row_sql: SQL that is true for the rows of `raw` that are written to the part.
        positive_row_sql: SQL that is true for a row that is an event; None: each row is an event.
    """
    first_code = num_codes(session, side)
    count_sql = "count(*)" if positive_row_sql is None else f"count(*) FILTER ({positive_row_sql})"
    new_ids_sql = (
        f'SELECT TRY_CAST("{side}" AS {SQL_TYPE[id_type]}) AS id, {count_sql} AS events FROM raw '
        f"WHERE {is_part_row_sql} GROUP BY 1"
    )
    if first_code:
        new_ids_sql = f"SELECT * FROM ({new_ids_sql}) ANTI JOIN {side}_ids USING (id)"
    _append_ids(session, side, new_ids_sql, order_sql="events DESC, id", first_code=first_code)


def num_codes(session: SqlSession, side: str) -> int:
    """Return the number of codes of a side, which is also the next free code."""
    return fetch_count(session, f"SELECT coalesce(max(code), -1) + 1 FROM {side}_ids")


def row_sql_type(session: SqlSession, side: str) -> str:
    """Return the SQL type in which the codes and rows of events are stored and sorted: 32 bits as long as every code fits."""
    return "INTEGER" if row_dtype(num_codes(session, side)) is np.int32 else "BIGINT"


def _append_ids(session: SqlSession, side: str, ids_sql: str, *, order_sql: str, first_code: int) -> None:
    numbered_sql = session.numbered(ids_sql, order_sql=order_sql)
    session.append(f"{side}_ids", f"SELECT id, ({first_code} + number)::BIGINT, NULL::BIGINT FROM {numbered_sql}")


def assign_rows(
    session: SqlSession,
    side: str,
    *,
    may_have_idle_ids: bool,
    vector_ids_path: Path | None = None,
    add_vector_ids: bool = False,
) -> tuple[Vocabulary, bool]:
    """Create table <side>s: ids of the previous run keep their row, and new ids follow in the order of their codes.

    Return the content of the table, and whether the code of every id equals its row.

    Args:
        may_have_idle_ids: whether some ids may have no event in `log`. A new id without an event gets no row.
        vector_ids_path: parquet file with the column `id`, one row per pretrained vector; None if there are no vectors.
        add_vector_ids: whether an id that has a vector, but no event, also gets a row.
    """
    vector_rows_sql = ""
    if vector_ids_path is not None:
        vector_rows_sql = (
            f"(SELECT id, file_row_number AS vector_row FROM {session.scan_sql(vector_ids_path, with_row_number=True)})"
        )
    if add_vector_ids and vector_ids_path is not None:
        new_ids_sql = f"SELECT * FROM {vector_rows_sql} ANTI JOIN {side}_ids USING (id)"
        _append_ids(session, side, new_ids_sql, order_sql="vector_row", first_code=num_codes(session, side))
    joins_sql = f" LEFT JOIN {vector_rows_sql} USING (id)" if vector_ids_path is not None else ""
    vector_row_sql = "coalesce(vector_row, -1)" if vector_ids_path is not None else "-1"
    ids_sql = f"SELECT id, code, previous_row, ({vector_row_sql})::BIGINT AS vector_row FROM {side}_ids{joins_sql}"
    if may_have_idle_ids:
        ids_sql += f' LEFT JOIN (SELECT DISTINCT "{side}" AS code, true AS has_event FROM log) USING (code)'
        ids_sql += " WHERE previous_row IS NOT NULL OR has_event" + (f" OR {vector_row_sql} >= 0" if add_vector_ids else "")
        rows_sql = _numbered_rows_sql(session, side, ids_sql=ids_sql)
    else:  # every id has a row, so the row of a new id is its code
        row_type = row_sql_type(session, side)
        rows_sql = f'SELECT id, code, coalesce(previous_row, code)::{row_type} AS "row", vector_row FROM ({ids_sql})'
    session.create_table(f"{side}s", rows_sql)
    table = pa.Table.from_batches(session.stream(f'SELECT id, code, vector_row FROM {side}s ORDER BY "row"'))
    code_R, vector_row_R = (table.column(name).to_numpy() for name in ("code", "vector_row"))
    vocabulary = Vocabulary(side, ids=table.column("id"), vector_row_R=vector_row_R.astype(np.int64))
    return vocabulary, bool((code_R == np.arange(len(code_R))).all())


def _numbered_rows_sql(session: SqlSession, side: str, *, ids_sql: str) -> str:
    """Return SQL for the ids of `ids_sql` with their rows. The rows of new ids follow the rows of the previous run."""
    num_previous_rows = fetch_count(session, f"SELECT coalesce(max(previous_row), -1) + 1 FROM {side}_ids")
    row_type = row_sql_type(session, side)
    if num_previous_rows:
        session.create_table(f"{side}_ids_with_row", ids_sql)
        ids_sql = f"SELECT * FROM {side}_ids_with_row"
    new_ids_sql = session.numbered(f"SELECT * FROM ({ids_sql}) WHERE previous_row IS NULL", order_sql="code")
    rows_sql = f'SELECT id, code, ({num_previous_rows} + number)::{row_type} AS "row", vector_row FROM {new_ids_sql}'
    if num_previous_rows:
        rows_sql += (
            f' UNION ALL SELECT id, code, previous_row::{row_type} AS "row", vector_row FROM {side}_ids_with_row '
            "WHERE previous_row IS NOT NULL"
        )
    return rows_sql


def write_codes(session: SqlSession, side: str, path: Path) -> None:
    """Write every id that was ever read with its row, or null, in the order of the codes."""
    session.write_file(
        f'SELECT ids.id, vocabulary."row" FROM {side}_ids AS ids LEFT JOIN {side}s AS vocabulary USING (code) ORDER BY code',
        path,
    )
