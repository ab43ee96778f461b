"""Stage `embeddings`: vectors from parquet into one memory-mapped matrix, streamed batch by batch."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.data.config import EmbeddingsConfig
from recsys_core.data.sources import Source, id_type, literal, open_sources, require_column
from recsys_core.data.sql import quoted
from recsys_core.errors import InputError
from recsys_core.manifests import EmbeddingsManifest, IdType, fingerprint_of, produce

SETTING = "embeddings.paths"


@dataclass(frozen=True)
class EmbeddingsInput:
    """What the footers say about the vectors, checked."""

    sources: tuple[Source, ...]
    rows: int
    columns: tuple[str, ...]
    id_type: IdType

    @property
    def dim(self) -> int | None:
        """Length of the vectors, where the schema tells it."""
        if len(self.columns) > 1:
            return len(self.columns)
        kind = self.sources[0].schema.field(self.columns[0]).type
        return int(kind.list_size) if pa.types.is_fixed_size_list(kind) else None


def check_embeddings(config: EmbeddingsConfig) -> EmbeddingsInput:
    """Checks files, columns and types without reading a row; raises InputError."""
    sources = open_sources(config.paths, setting=SETTING)
    ids = id_type(sources, config.id_column, setting="embeddings.id_column")
    columns = _vector_columns(sources[0], config)
    for source in sources:
        others = _vector_columns(source, config)
        if others != columns:
            raise InputError(
                f"{source.path}: the vectors are {len(others)} columns, {others[0]} to {others[-1]}, but {len(columns)}, "
                f"{columns[0]} to {columns[-1]}, in {sources[0].path}; give every file the same columns"
            )
    return EmbeddingsInput(sources, sum(source.record.rows for source in sources), columns, ids)


def ingest_embeddings(config: EmbeddingsConfig, *, folder: Path) -> EmbeddingsManifest:
    """vectors.npy and ids.parquet in file order; memory is bounded by config.batch_rows whatever the size of the input.

    Raises InputError for null or duplicate ids, and for vectors that are null, of another length, or not finite.
    """
    found = check_embeddings(config)
    records = tuple(source.record for source in found.sources)

    def build(out: Path) -> dict[str, Any]:
        dim = _write(config, found, out)
        _refuse_duplicates(out / "ids.parquet", config=config, found=found)
        return {"rows": found.rows, "dim": dim, "id_type": found.id_type, "sources": records}

    return produce(folder, EmbeddingsManifest, fingerprint=fingerprint_of("embeddings", config, records), build=build)


def _vector_columns(source: Source, config: EmbeddingsConfig) -> tuple[str, ...]:
    """The list column, or the columns of the single dimensions in order of their number."""
    if config.vector_column is not None:
        kind = require_column(source, config.vector_column, setting="embeddings.vector_column")
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not pa.types.is_floating(kind.value_type):
            raise InputError(
                f"{source.path}: column {config.vector_column!r} is {kind}, but a vector is a list of floats; "
                "cast it, or set embeddings.dimension_prefix for one column per dimension"
            )
        return (config.vector_column,)
    prefix = config.dimension_prefix or ""
    numbered: dict[int, str] = {}
    for match in (re.fullmatch(re.escape(prefix) + r"(\d+)", name) for name in source.schema.names):
        if match is not None and int(match[1]) in numbered:
            raise InputError(
                f"{source.path}: columns {numbered[int(match[1])]!r} and {match[0]!r} are both dimension {int(match[1])}; "
                "keep one of them"
            )
        if match is not None:
            numbered[int(match[1])] = match[0]
    if not numbered:
        raise InputError(f"{source.path}: no column is {prefix!r} and a number; it has {source.schema.names[:20]}")
    first = min(numbered)
    gaps = [number for number in range(first, first + len(numbered)) if number not in numbered]
    if gaps:
        raise InputError(
            f"{source.path}: column {prefix}{gaps[0]} is missing between {prefix}{first} and {prefix}{max(numbered)}"
        )
    for name in numbered.values():
        if not pa.types.is_floating(source.schema.field(name).type):
            raise InputError(f"{source.path}: column {name!r} is {source.schema.field(name).type}, but a dimension is a float")
    return tuple(numbered[number] for number in sorted(numbered))


def _write(config: EmbeddingsConfig, found: EmbeddingsInput, out: Path) -> int:
    """Streams all files into vectors.npy and ids.parquet; returns the dimension."""
    read: Callable[[pa.RecordBatch, _Place], NDArray[np.float32]] = _read_list if config.vector_column else _read_columns
    stored_id = pa.int64() if found.id_type == "int64" else pa.string()
    vectors: NDArray[np.float32] | None = None
    row = 0
    with pq.ParquetWriter(out / "ids.parquet", pa.schema([("id", stored_id)])) as ids:
        for source in found.sources:
            place = _Place(source.path, 0)
            with pq.ParquetFile(source.path) as file:
                for batch in _batches(file, source, columns=[config.id_column, *found.columns], rows=config.batch_rows):
                    ids.write_table(pa.table({"id": _ids(batch.column(config.id_column), stored_id, place, config.id_column)}))
                    block = read(batch.select(list(found.columns)), place)
                    if vectors is None:
                        vectors = np.lib.format.open_memmap(
                            out / "vectors.npy", mode="w+", dtype=np.float32, shape=(found.rows, block.shape[1])
                        )
                    _check_block(block, vectors.shape[1], place, found.columns)
                    vectors[row : row + len(block)] = block
                    row, place = row + len(block), _Place(place.path, place.row + len(block))
    assert vectors is not None and row == found.rows  # open_sources refuses tables without rows
    return int(vectors.shape[1])


def _batches(file: pq.ParquetFile, source: Source, *, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
    """The batches that have rows; InputError where the data behind an intact footer is damaged."""
    try:
        yield from (batch for batch in file.iter_batches(rows, columns=columns) if batch.num_rows)
    except (pa.ArrowInvalid, OSError) as error:
        for column in columns:
            _refuse_null_of_fixed_size(source, column)
        raise InputError(f"{source.path}: damaged: {str(error).splitlines()[0]}; write it anew") from error


def _refuse_null_of_fixed_size(source: Source, column: str) -> None:
    """A null among fixed-size lists is what pyarrow cannot read (it counts as a list of size 0); DuckDB finds its row."""
    if not pa.types.is_fixed_size_list(source.schema.field(column).type):
        return
    query = f"SELECT min(file_row_number) FROM read_parquet(?, file_row_number = true) WHERE {quoted(column)} IS NULL"
    with duckdb.connect() as connection, contextlib.suppress(duckdb.Error):
        found = connection.execute(query, [literal(source.path)]).fetchone()
        if found is not None and found[0] is not None:
            raise InputError(f"{_Place(source.path, 0).at(column, found[0])}: the vector is null; drop the row")


@dataclass(frozen=True)
class _Place:
    """Where a batch starts: 0-based row of the file."""

    path: Path
    row: int

    def at(self, column: str, offset: int) -> str:
        return f"{self.path}: column {column!r}, row {self.row + offset}"


def _ids(column: pa.Array, stored: pa.DataType, place: _Place, name: str) -> pa.Array:
    if column.null_count:
        raise InputError(f"{place.at(name, _first(column.is_null()))}: the id is null; drop the row")
    try:
        return column.cast(stored)
    except pa.ArrowInvalid as error:
        raise InputError(f"{place.path}: column {name!r}, from row {place.row}: {error}; ids fit into int64") from error


def _read_list(batch: pa.RecordBatch, place: _Place) -> NDArray[np.float32]:
    (name,), column = batch.schema.names, batch.column(0)
    if column.null_count:
        raise InputError(f"{place.at(name, _first(column.is_null()))}: the vector is null; drop the row")
    lengths = np.asarray(pc.list_value_length(column))
    if lengths[0] == 0:
        raise InputError(f"{place.at(name, 0)}: the vector is empty; drop the row")
    if (lengths != lengths[0]).any():
        odd = int(np.argmax(lengths != lengths[0]))
        raise InputError(
            f"{place.at(name, odd)}: vector has {lengths[odd]} numbers, row {place.row} has {lengths[0]}; "
            "give every row the same length"
        )
    values = column.flatten()
    if values.null_count:
        raise InputError(
            f"{place.at(name, _first(values.is_null()) // int(lengths[0]))}: a number of the vector is null; drop the row"
        )
    with np.errstate(over="ignore"):  # too large for float32: refused as inf
        flat: NDArray[np.float32] = values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return flat.reshape(len(column), -1)


def _read_columns(batch: pa.RecordBatch, place: _Place) -> NDArray[np.float32]:
    block = np.empty((batch.num_rows, batch.num_columns), np.float32)
    for index, (name, column) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
        if column.null_count:
            raise InputError(f"{place.at(name, _first(column.is_null()))}: the number is null; drop the row")
        with np.errstate(over="ignore"):  # too large for float32: refused as inf
            block[:, index] = column.to_numpy(zero_copy_only=False)
    return block


def _check_block(block: NDArray[np.float32], dim: int, place: _Place, columns: Sequence[str]) -> None:
    if block.shape[1] != dim:
        raise InputError(
            f"{place.at(columns[0], 0)}: vector has {block.shape[1]} numbers, the first has {dim}; "
            "give every row the same length"
        )
    if not np.isfinite(block).all():
        row, dimension = (int(index) for index in np.argwhere(~np.isfinite(block))[0])
        where = place.at(columns[dimension] if len(columns) > 1 else columns[0], row)
        raise InputError(
            f"{where}: number {dimension} of the vector is {block[row, dimension]} as float32; drop or mend the row"
        )


def _refuse_duplicates(ids: Path, *, config: EmbeddingsConfig, found: EmbeddingsInput) -> None:
    """ids.parquet is in file order, so a position in it is a row of one of the sources."""
    with duckdb.connect() as connection:
        double = connection.execute(
            "SELECT id, list(file_row_number ORDER BY file_row_number)[:2] FROM read_parquet(?, file_row_number = true) "
            "GROUP BY id HAVING count(*) > 1 ORDER BY min(file_row_number) LIMIT 1",
            [literal(ids)],
        ).fetchone()
    if double is not None:
        first, second = (_locate(found.sources, row) for row in double[1])
        raise InputError(
            f"{second}: column {config.id_column!r}: id {double[0]!r} stands there already in {first}; keep one vector per id"
        )


def _locate(sources: Sequence[Source], row: int) -> str:
    for source in sources:
        if row < source.record.rows:
            return f"{source.path}, row {row}"
        row -= source.record.rows
    raise AssertionError("the row lies in none of the sources")


def _first(mask: pa.BooleanArray) -> int:
    return int(pc.index(mask, True).as_py())
