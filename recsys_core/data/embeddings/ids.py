"""Ids of the vectors, in DuckDB: which rows are kept, under which of our ids, in which order."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.data.embeddings.reader import batches_of
from recsys_core.data.embeddings.row_problems import Findings, Flaw
from recsys_core.data.embeddings.schema import VectorFiles
from recsys_core.errors import InputError, shown
from recsys_core.manifests import IdType
from recsys_core.parquet.duckdb_session import SQL_TYPE
from recsys_core.parquet.sources import Source
from recsys_core.units import INT64_MAX

MEMORY_LIMIT = "128MB"
BATCH_ROWS = 65_536
STORED: dict[IdType, pa.DataType] = {"int64": pa.int64(), "string": pa.string()}


class TableIds:
    """Ids of all entries of one table. `kept` is filled entry by entry; an id belongs to the first entry that has it."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, *, id_type: IdType) -> None:
        self._connection, self._id_type = connection, id_type
        self._run(f"CREATE TABLE kept (entry INTEGER, position BIGINT, id {SQL_TYPE[id_type]})")

    @property
    def rows(self) -> int:
        """Ids kept so far."""
        return self._count("SELECT count(*) FROM kept")

    def read(self, files: VectorFiles, *, paths: Sequence[Path], findings: Findings) -> None:
        """Reads the ids of an entry; those that are none are told to `findings`."""
        self._run(f"CREATE OR REPLACE TABLE found (position BIGINT, id {SQL_TYPE[files.source_id_type]})")
        stored, column = STORED[files.source_id_type], files.config.id_column
        start = 0
        for source, path in zip(files.sources, paths, strict=True):
            self._insert("found", _good_ids(source, path, column=column, stored=stored, start=start, findings=findings))
            start += source.record.rows

    def leave_out(self, findings: Findings) -> None:
        """Forgets the ids of flawed rows."""
        bad = pa.table({"position": findings.bad_positions()})
        if len(bad):
            self._connection.register("bad", bad)
            self._run("DELETE FROM found WHERE position IN (SELECT position FROM bad)")
            self._connection.unregister("bad")

    def tell_duplicates(self, files: VectorFiles, findings: Findings) -> None:
        """All rows but the first of an id are told to `findings`."""
        self._run(
            "CREATE OR REPLACE TEMP TABLE doubled AS "
            "SELECT id, min(position) AS first FROM found GROUP BY id HAVING count(*) > 1"
        )
        double = self._connection.sql(
            "SELECT position, first, id FROM found JOIN doubled USING (id) WHERE position > first ORDER BY position"
        ).to_arrow_table()
        if not len(double):
            return
        position_N = double["position"].to_numpy()

        def what(position: int) -> str:
            at = int(np.searchsorted(position_N, position))
            file, row = findings.place(double["first"][at].as_py())
            return f"id {shown(double['id'][at].as_py())} stands there already in {file}, row {row}"

        findings.add(Flaw.DUPLICATE_ID, position_N, column=files.config.id_column, what=what)

    def translate(self, files: VectorFiles, *, paths: Sequence[Path]) -> int:
        """Puts our ids in the place of another domain's; returns how many have none and are left out.

        Raises InputError for a map with nulls, with an id that has two of ours, or two that have the same.
        """
        config = files.config.id_map
        if config is None:
            return 0
        kinds = (SQL_TYPE[files.source_id_type], SQL_TYPE[files.id_type])
        self._run(f"CREATE OR REPLACE TABLE id_map (position BIGINT, source {kinds[0]}, target {kinds[1]})")
        columns = (config.from_column, config.to_column)
        start = 0
        for source, path in zip(files.id_map, paths, strict=True):
            types = (STORED[files.source_id_type], STORED[files.id_type])
            self._insert("id_map", _pairs(source, path, columns=columns, types=types, start=start))
            start += source.record.rows
        findings = Findings(files.id_map, setting=f"{files.setting}.id_map")
        for side, column in zip(("source", "target"), columns, strict=True):
            self._refuse_double(side, column=column, findings=findings)
        before = self._count("SELECT count(*) FROM found")
        self._run(
            "CREATE TABLE translated AS SELECT found.position, target AS id FROM found JOIN id_map ON found.id = source; "
            "DROP TABLE found; DROP TABLE id_map; ALTER TABLE translated RENAME TO found"
        )
        after = self._count("SELECT count(*) FROM found")
        if not after:
            raise InputError(
                f"{files.id_map[0].name}: column {config.from_column!r} holds none of the {before:,} ids of "
                f"{files.sources[0].name}; do both mean the same domain?"
            )
        return before - after

    def keep(self, *, entry: int) -> int:
        """Adds the entry's ids to those that are kept; returns how many an earlier entry had already."""
        before, found = self.rows, self._count("SELECT count(*) FROM found")
        self._run(f"INSERT INTO kept SELECT {entry}, position, id FROM found ANTI JOIN kept USING (id)")
        self._run("DROP TABLE found")
        return found - (self.rows - before)

    def write(self, path: Path) -> None:
        """Parquet with column `id`, in the order of the rows of the matrix."""
        reader = self._connection.sql("SELECT id FROM kept ORDER BY entry, position").to_arrow_reader(BATCH_ROWS)
        schema = pa.schema([("id", STORED[self._id_type])])
        with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
            for batch in reader:
                writer.write_table(pa.Table.from_batches([batch]).cast(schema))

    def positions(self, *, entry: int, rows: int) -> Iterator[NDArray[np.int64]]:
        """Positions of an entry's kept rows, ascending, about `rows` at a time."""
        query = f"SELECT position FROM kept WHERE entry = {entry} ORDER BY position"
        for batch in self._connection.sql(query).to_arrow_reader(rows):
            yield np.from_dlpack(batch.column("position")).astype(np.int64, copy=False)

    def _refuse_double(self, side: str, *, column: str, findings: Findings) -> None:
        double = self._connection.sql(
            f"SELECT {side}, list(position ORDER BY position)[:2], count(*) OVER () FROM id_map GROUP BY {side} "
            "HAVING count(*) > 1 ORDER BY 2 LIMIT 1"
        ).fetchall()
        if double:
            value, (first, second), count = double[0]
            (file, row), (before, before_row) = findings.place(second), findings.place(first)
            raise InputError(
                f"{file}: column {column!r}, row {row}: id {shown(value)} stands there already in {before}, row {before_row}; "
                f"{count:,} such ids; an id map is one to one"
            )

    def _insert(self, table: str, batches: Iterator[pa.RecordBatch]) -> None:
        for batch in batches:
            self._connection.register("batch", batch)
            self._run(f"INSERT INTO {table} SELECT * FROM batch")
            self._connection.unregister("batch")

    def _run(self, query: str) -> None:
        self._connection.execute(query).fetchall()

    def _count(self, query: str) -> int:
        return int(self._connection.sql(query).fetchall()[0][0])


def _good_ids(
    source: Source, path: Path, *, column: str, stored: pa.DataType, start: int, findings: Findings
) -> Iterator[pa.RecordBatch]:
    """(position, id) of the rows with an id; the others are told to `findings`."""
    rows = start
    for batch in batches_of(source, path, columns=[column], rows=BATCH_ROWS):
        ids = batch.column(column)
        _require_text(source, column, ids)
        position_N = np.arange(rows, rows + len(ids))
        rows += len(ids)
        for flaw, mask in _flaws_of(ids):
            if mask.true_count:
                at = mask.to_numpy(zero_copy_only=False)
                what = _id_flaw(flaw, ids, first_position=int(position_N[0]))
                findings.add(flaw, position_N[at], column=column, what=what)
        good_N = findings.flaw_R[position_N] == 0
        if not good_N.all():
            position_N, ids = position_N[good_N], ids.filter(pa.array(good_N))
        yield pa.record_batch([_as_arrow(position_N), ids.cast(stored)], names=["position", "id"])
    if rows - start != source.record.rows:
        raise InputError(
            f"{source.name}: damaged: the footer promises {source.record.rows:,} rows, {rows - start:,} came; write it again"
        )


def _as_arrow(value_N: NDArray[np.int64]) -> pa.Array:
    """pa.array, like to_numpy, would import pandas first: 0.2 s and 50 MB."""
    return pa.Array.from_buffers(pa.int64(), len(value_N), [None, pa.py_buffer(value_N)])


def _require_text(source: Source, column: str, ids: pa.Array) -> None:
    if pa.types.is_integer(ids.type):
        return
    try:
        ids.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InputError(f"{source.name}: column {column!r}: damaged, or no UTF-8 ({error}); write it again") from error


def _flaws_of(ids: pa.Array) -> Iterator[tuple[Flaw, pa.BooleanArray]]:
    plain = ids.dictionary_decode() if pa.types.is_dictionary(ids.type) else ids
    yield Flaw.NULL_ID, plain.is_null()
    if pa.types.is_uint64(plain.type):
        yield Flaw.ID_OUT_OF_RANGE, pc.fill_null(pc.greater(plain, pa.scalar(INT64_MAX, pa.uint64())), False)
    if not pa.types.is_integer(plain.type):
        yield Flaw.EMPTY_ID, pc.fill_null(pc.equal(pc.binary_length(plain.cast(pa.string())), 0), False)


def _id_flaw(flaw: Flaw, ids: pa.Array, *, first_position: int) -> Callable[[int], str]:
    def what(position: int) -> str:
        if flaw is Flaw.NULL_ID:
            return "the id is null"
        if flaw is Flaw.EMPTY_ID:
            return "the id is an empty string"
        return f"the id is {ids[position - first_position].as_py()}, but ids fit into int64"

    return what


def _pairs(
    source: Source, path: Path, *, columns: tuple[str, str], types: tuple[pa.DataType, pa.DataType], start: int
) -> Iterator[pa.RecordBatch]:
    for batch in batches_of(source, path, columns=sorted(set(columns)), rows=BATCH_ROWS):
        position_N = np.arange(start, start + batch.num_rows)
        for name in columns:
            _require_text(source, name, batch.column(name))
            for flaw, mask in _flaws_of(batch.column(name)):
                if mask.true_count:
                    at = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
                    what = _id_flaw(flaw, batch.column(name), first_position=0)(int(at[0]))
                    raise InputError(f"{source.name}: column {name!r}, row {start + at[0]}: {what}; drop the row")
        pair = [batch.column(name).cast(kind) for name, kind in zip(columns, types, strict=True)]
        yield pa.record_batch([_as_arrow(position_N), *pair], names=["position", "source", "target"])
        start += batch.num_rows
