"""Ids of pretrained vectors in DuckDB, which select the usable rows of the files and sort them for the matrix.

An entry is one element of the config list `embeddings`. Its rows are numbered from 0, continuously over all its files.

Shapes: N rows of a batch, R rows of an entry, X rows to remove.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.errors import InputError, shown
from recsys_core.ingest.vectors.row_faults import Fault, FaultCodes, id_problem, locate_row, mark_faults
from recsys_core.ingest.vectors.vector_schema import VectorFiles
from recsys_core.manifests import IdType
from recsys_core.parquet.duckdb_session import SQL_TYPE, fetch_count
from recsys_core.parquet.local_copies import read_batches
from recsys_core.parquet.sources import Source
from recsys_core.units import INT64_MAX

MEMORY_LIMIT = "128MB"
BATCH_ROWS = 65_536
ARROW_TYPE: dict[IdType, pa.DataType] = {"int64": pa.int64(), "string": pa.string()}


class TableIds:
    """Ids of all entries of one embedding table.

    Each entry is read into table `entry_ids` (row, id), filtered, translated by its id map, and then added to table
    `table_ids` (entry, row, id). An id belongs to the first entry that has it.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, *, id_type: IdType) -> None:
        self._connection, self._id_type = connection, id_type
        self._execute(f"CREATE TABLE table_ids (entry INTEGER, row BIGINT, id {SQL_TYPE[id_type]})")

    def count_ids(self) -> int:
        """Return the number of ids in table `table_ids`."""
        return fetch_count(self._connection, "SELECT count(*) FROM table_ids")

    def read_entry(self, entry: VectorFiles, *, paths: Sequence[Path], fault_code_R: FaultCodes) -> None:
        """Read the usable ids of an entry into `entry_ids`, and mark the rows without a usable id.

        Args:
            paths: a local file for each of entry.sources.
        """
        self._execute(f"CREATE OR REPLACE TABLE entry_ids (row BIGINT, id {SQL_TYPE[entry.source_id_type]})")
        column, arrow_type = entry.config.id_column, ARROW_TYPE[entry.source_id_type]
        batch_start = 0
        for source, path in zip(entry.sources, paths, strict=True):
            for batch in read_batches(source, path, columns=[column], batch_rows=BATCH_ROWS):
                ids = _require_utf8(source, column, batch.column(column))
                row_N = np.arange(batch_start, batch_start + len(ids))
                fault_code_N = fault_code_R[batch_start : batch_start + len(ids)]
                batch_start += len(ids)
                for fault, is_faulty_N in _id_faults(ids):
                    mark_faults(fault_code_N, is_faulty_N, fault)
                if fault_code_N.any():
                    is_usable_N = fault_code_N == 0
                    row_N, ids = row_N[is_usable_N], ids.filter(pa.array(is_usable_N))
                self._insert("entry_ids", pa.record_batch([_to_int64_arrow(row_N), ids.cast(arrow_type)], names=["row", "id"]))

    def remove_rows(self, row_X: NDArray[np.int64]) -> None:
        """Remove rows from table `entry_ids`."""
        if len(row_X):
            self._connection.register("rows_to_remove", pa.table({"row": row_X}))
            self._execute("DELETE FROM entry_ids WHERE row IN (SELECT row FROM rows_to_remove)")
            self._connection.unregister("rows_to_remove")

    def mark_duplicates(self, fault_code_R: FaultCodes) -> None:
        """Mark the rows of the entry whose id is also in an earlier row of `entry_ids`."""
        duplicates = self._connection.sql(
            "SELECT row FROM entry_ids JOIN (SELECT id, min(row) AS first_row FROM entry_ids GROUP BY id HAVING count(*) > 1) "
            "USING (id) WHERE row > first_row"
        )
        for batch in duplicates.to_arrow_reader(BATCH_ROWS):
            fault_code_R[np.from_dlpack(batch.column("row"))] = Fault.DUPLICATE_ID  # to_numpy would import pandas

    def first_row_with_id(self, id_value: Any) -> int:
        """Return the first row of the entry that has the id `id_value`."""
        ((row,),) = self._connection.execute("SELECT min(row) FROM entry_ids WHERE id = ?", [id_value]).fetchall()
        return int(row)

    def translate(self, entry: VectorFiles, *, paths: Sequence[Path]) -> int:
        """Translate the entry's ids with its id map. Return the number of removed rows, whose ids are not in the map.

        Args:
            paths: a local file for each of entry.id_map_sources.

        Raises:
            InputError: the id map has an unusable id, is not one to one, or has none of the ids.
        """
        config = entry.config.id_map
        assert config is not None
        source_sql_type, target_sql_type = SQL_TYPE[entry.source_id_type], SQL_TYPE[entry.id_type]
        self._execute(f"CREATE OR REPLACE TABLE id_map (row BIGINT, source {source_sql_type}, target {target_sql_type})")
        for batch in _read_id_map(entry, paths):
            self._insert("id_map", batch)
        self._require_distinct("source", entry, column=config.from_column)
        self._require_distinct("target", entry, column=config.to_column)
        num_ids = fetch_count(self._connection, "SELECT count(*) FROM entry_ids")
        self._execute(
            "CREATE TABLE translated AS SELECT entry_ids.row, target AS id "
            "FROM entry_ids JOIN id_map ON entry_ids.id = source; "
            "DROP TABLE entry_ids; DROP TABLE id_map; ALTER TABLE translated RENAME TO entry_ids"
        )
        num_translated_ids = fetch_count(self._connection, "SELECT count(*) FROM entry_ids")
        if not num_translated_ids:
            raise InputError(
                f"{entry.id_map_sources[0].name}: column {config.from_column!r} has none of the {num_ids:,} ids of "
                f"{entry.sources[0].name}; check that both use the same ids"
            )
        return num_ids - num_translated_ids

    def add_entry(self, *, entry_index: int) -> int:
        """Add the entry's ids to table `table_ids`; return the number of ids that an earlier entry already has."""
        num_ids_before, num_entry_ids = self.count_ids(), fetch_count(self._connection, "SELECT count(*) FROM entry_ids")
        self._execute(f"INSERT INTO table_ids SELECT {entry_index}, row, id FROM entry_ids ANTI JOIN table_ids USING (id)")
        self._execute("DROP TABLE entry_ids")
        return num_entry_ids - (self.count_ids() - num_ids_before)

    def write_ids(self, path: Path) -> None:
        """Write a parquet file with column `id`, in the order of the rows of the matrix."""
        reader = self._connection.sql("SELECT id FROM table_ids ORDER BY entry, row").to_arrow_reader(BATCH_ROWS)
        schema = pa.schema([("id", ARROW_TYPE[self._id_type])])
        with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
            for batch in reader:
                writer.write_table(pa.Table.from_batches([batch]).cast(schema))

    def row_batches(self, *, entry_index: int, batch_rows: int) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of an entry that are in `table_ids`, ascending, about `batch_rows` at a time."""
        query = f"SELECT row FROM table_ids WHERE entry = {entry_index} ORDER BY row"
        for batch in self._connection.sql(query).to_arrow_reader(batch_rows):
            yield np.from_dlpack(batch.column("row")).astype(np.int64, copy=False)

    def _require_distinct(self, map_column: Literal["source", "target"], entry: VectorFiles, *, column: str) -> None:
        """Raise InputError if an id occurs twice in `map_column` of table `id_map`.

        column: name of this column in the files.
        """
        repeated_ids = self._connection.sql(
            f"SELECT {map_column}, list(row ORDER BY row)[:2], count(*) OVER () FROM id_map GROUP BY {map_column} "
            "HAVING count(*) > 1 ORDER BY 2 LIMIT 1"
        ).fetchall()
        for repeated_id, (first_row, second_row), num_repeated_ids in repeated_ids:
            (source, row), (earlier_source, earlier_row) = (
                locate_row(entry.id_map_sources, map_row) for map_row in (second_row, first_row)
            )
            raise InputError(
                f"{source.name}: column {column!r}, row {row}: id {shown(repeated_id)} is already in {earlier_source.name}, "
                f"row {earlier_row} ({num_repeated_ids:,} such ids); an id map has to be one to one"
            )

    def _insert(self, table_name: str, batch: pa.RecordBatch) -> None:
        self._connection.register("batch", batch)
        self._execute(f"INSERT INTO {table_name} SELECT * FROM batch")
        self._connection.unregister("batch")

    def _execute(self, query: str) -> None:
        self._connection.execute(query).fetchall()


def _id_faults(ids: pa.Array) -> Iterator[tuple[Fault, NDArray[np.bool_]]]:
    """Yield each fault that occurs in a batch of ids, with a mask of the rows that have the fault."""
    decoded_ids = ids.dictionary_decode() if pa.types.is_dictionary(ids.type) else ids
    mask_by_fault = {Fault.NULL_ID: decoded_ids.is_null()}
    if pa.types.is_uint64(decoded_ids.type):
        mask_by_fault[Fault.ID_OUT_OF_RANGE] = pc.fill_null(pc.greater(decoded_ids, pa.scalar(INT64_MAX, pa.uint64())), False)
    if not pa.types.is_integer(decoded_ids.type):
        mask_by_fault[Fault.EMPTY_ID] = pc.fill_null(pc.equal(pc.binary_length(decoded_ids.cast(pa.string())), 0), False)
    for fault, mask in mask_by_fault.items():
        if mask.true_count:
            yield fault, mask.to_numpy(zero_copy_only=False)


def _read_id_map(entry: VectorFiles, paths: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    """Yield batches with the columns `row`, `source` and `target` (ids); raise InputError for an unusable id."""
    config = entry.config.id_map
    assert config is not None
    columns = sorted({config.from_column, config.to_column})
    batch_start = 0
    for source, path in zip(entry.id_map_sources, paths, strict=True):
        for batch in read_batches(source, path, columns=columns, batch_rows=BATCH_ROWS):
            row_N = np.arange(batch_start, batch_start + batch.num_rows)
            batch_start += batch.num_rows
            for column in (config.from_column, config.to_column):
                ids = _require_utf8(source, column, batch.column(column))
                for fault, is_faulty_N in _id_faults(ids):
                    faulty_index = int(np.argmax(is_faulty_N))
                    map_source, row = locate_row(entry.id_map_sources, int(row_N[faulty_index]))
                    problem = id_problem(fault, ids[faulty_index].as_py())
                    raise InputError(f"{map_source.name}: column {column!r}, row {row}: {problem}; drop the row")
            id_columns = [
                batch.column(config.from_column).cast(ARROW_TYPE[entry.source_id_type]),
                batch.column(config.to_column).cast(ARROW_TYPE[entry.id_type]),
            ]
            yield pa.record_batch([_to_int64_arrow(row_N), *id_columns], names=["row", "source", "target"])


def _require_utf8(source: Source, column: str, ids: pa.Array) -> pa.Array:
    """Return `ids`; raise InputError if they are strings that are not valid UTF-8."""
    if not pa.types.is_integer(ids.type):
        try:
            ids.validate(full=True)
        except pa.ArrowInvalid as error:
            raise InputError(f"{source.name}: column {column!r}: damaged, or not UTF-8 ({error}); write it again") from error
    return ids


def _to_int64_arrow(value_N: NDArray[np.int64]) -> pa.Array:
    """Return an Arrow array; pa.array would import pandas first, which takes 0.2 s and 50 MB."""
    return pa.Array.from_buffers(pa.int64(), len(value_N), [None, pa.py_buffer(value_N)])
