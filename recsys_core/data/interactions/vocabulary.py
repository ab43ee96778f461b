"""Raw ids -> codes -> rows, in DuckDB.

A code is given to every id ever read, a row only to the ids that count; both are kept from night to night.
Tables per side: <side>_ids (id, code, known: the row it had last night, or null) and <side>s (id, code, row, vector_row).
"""

from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.manifests import IdType, InteractionsManifest
from recsys_core.parquet.duckdb_session import SQL_TYPE, quoted, scan


@dataclass(frozen=True)
class Vocabulary:
    """What <side>s holds, in row order."""

    side: str
    id: pa.ChunkedArray
    vector_row: NDArray[np.int64]
    """int64 [rows]: row of the id's pretrained vector, -1 without."""
    codes_are_rows: bool
    """Every id has a row and its code is that row: no event has to be renumbered."""

    def __len__(self) -> int:
        return len(self.id)

    def joined(self, column: str) -> tuple[str, str]:
        """SQL for the row of code `column`, and the join that it needs."""
        if self.codes_are_rows:
            return column, ""
        return f"{self.side}s.row", f" JOIN {self.side}s ON {column} = {self.side}s.code"


def open_ids(connection: duckdb.DuckDBPyConnection, side: str, *, kind: IdType, previous: InteractionsManifest | None) -> int:
    """Creates table <side>_ids: empty, or as last night left it; returns how many ids were left without a row."""
    connection.execute(f"CREATE TABLE {side}_ids (id {SQL_TYPE[kind]} NOT NULL, code INTEGER, known INTEGER)").fetchall()
    if previous is None:
        return 0
    read = scan(previous.path(f"{side}_ids.parquet"), options="file_row_number = true")
    connection.execute(f'INSERT INTO {side}_ids SELECT id, file_row_number, "row" FROM {read}').fetchall()
    ((left_out,),) = connection.sql(f"SELECT count(*) FROM {side}_ids WHERE known IS NULL").fetchall()
    return int(left_out)


def number(
    connection: duckdb.DuckDBPyConnection, side: str, *, filtered: bool, vector_ids: Path | None = None, catalogue: bool = False
) -> Vocabulary:
    """Creates table <side>s: known rows as they were, then the new ids in the order of their codes.

    Args:
        filtered: whether ids may have no event in `log`; these get no row.
        vector_ids: parquet with the `id` of each pretrained vector, if there are any.
        catalogue: whether an id with a vector and no event gets a row too.
    """
    vectors = ""
    if vector_ids is not None:
        vectors = f"(SELECT id, file_row_number AS vector_row FROM {scan(vector_ids, options='file_row_number = true')})"
    if catalogue and vector_ids is not None:
        ((codes,),) = connection.sql(f"SELECT count(*) FROM {side}_ids").fetchall()
        connection.execute(
            f"INSERT INTO {side}_ids SELECT id, {codes} + row_number() OVER (ORDER BY vector_row) - 1, NULL "
            f"FROM {vectors} ANTI JOIN {side}_ids USING (id)"
        ).fetchall()
    ((known,),) = connection.sql(f"SELECT count(known) FROM {side}_ids").fetchall()
    joins = f" LEFT JOIN {vectors} USING (id)" if vector_ids is not None else ""
    vector_row = "coalesce(vector_row, -1)" if vector_ids is not None else "-1"
    wanted = "true"
    if filtered:
        joins += f' LEFT JOIN (SELECT DISTINCT "{side}" AS code, true AS present FROM log) USING (code)'
        wanted = "known IS NOT NULL OR present" + (f" OR {vector_row} >= 0" if catalogue else "")
    appended = f"{known} + row_number() OVER (PARTITION BY known IS NULL ORDER BY code) - 1"
    connection.execute(
        f'CREATE TABLE {side}s AS SELECT id, code, coalesce(known, {appended})::INTEGER AS "row", {vector_row} AS vector_row '
        f"FROM {side}_ids{joins} WHERE {wanted}"
    ).fetchall()
    table = connection.sql(f'SELECT id, code, vector_row FROM {side}s ORDER BY "row"').to_arrow_table()
    code = table.column("code").to_numpy()
    return Vocabulary(
        side,
        id=table.column("id"),
        vector_row=table.column("vector_row").to_numpy().astype(np.int64),
        codes_are_rows=bool((code == np.arange(len(code))).all()),
    )


def write_ids(
    connection: duckdb.DuckDBPyConnection,
    vocabulary: Vocabulary,
    *,
    train_count: NDArray[np.int64],
    events: NDArray[np.int64],
    out: Path,
) -> None:
    """<side>_ids.parquet, in order of the codes, and <side>s.parquet, in order of the rows."""
    side = vocabulary.side
    connection.execute(
        f'COPY (SELECT i.id, v."row" FROM {side}_ids i LEFT JOIN {side}s v USING (code) ORDER BY code) '
        f"TO {quoted(str(out / f'{side}_ids.parquet'), mark=chr(39))} (FORMAT parquet)"
    ).fetchall()
    table = pa.table({"id": vocabulary.id, "train_count": train_count, "events": events})
    pq.write_table(table, out / f"{side}s.parquet", use_dictionary=False)
