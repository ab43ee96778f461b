"""Stage `embeddings`: vectors from parquet into one memory-mapped matrix per table, in memory that does not grow with them.

Shapes: N rows of a block, R rows of an entry's files, D numbers of a vector.
"""

import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.embeddings.config import EmbeddingsConfig
from recsys_core.data.embeddings.ids import MEMORY_LIMIT, TableIds
from recsys_core.data.embeddings.projection import SAMPLE_ROWS, Projection, unit_length
from recsys_core.data.embeddings.reader import BATCH_BYTES, read_vectors
from recsys_core.data.embeddings.row_problems import Findings
from recsys_core.data.embeddings.schema import VectorFiles, check_embeddings, refuse_wider, require_one_dim
from recsys_core.disk import allocate_npy
from recsys_core.errors import InputError
from recsys_core.manifests import EmbeddingsManifest, VectorTable, fingerprint_of, produce
from recsys_core.parquet.duckdb_session import database
from recsys_core.parquet.guards import verify_sidecars
from recsys_core.parquet.local_copies import local_files


def ingest_embeddings(
    configs: Sequence[EmbeddingsConfig], *, folder: Path, data_root: Path | None = None
) -> EmbeddingsManifest:
    """<table>.vectors.npy and <table>.ids.parquet for each table: entry by entry, each in the order of its files.

    Raises InputError for ids that are null, empty, double or too large, for vectors that are null, of another length, not
    finite or all zero (each dropped where the config says so), and where the disk is too small.
    """
    found = check_embeddings(configs, data_root=data_root)
    records = tuple(source.record for files in found for source in (*files.sources, *files.id_map))

    def build(out: Path) -> dict[str, Any]:
        tables: dict[str, VectorTable] = {}
        for table in dict.fromkeys(files.config.table for files in found):
            entries = [files for files in found if files.config.table == table]
            tables[table] = _build_table(entries, table=table, out=out)
        return {"tables": tables, "sources": records}

    settings = [config.result_settings() for config in configs]
    return produce(folder, EmbeddingsManifest, fingerprint=fingerprint_of("embeddings", settings, records), build=build)


@dataclass(frozen=True)
class _Entry:
    """One entry of a table, read: all its rows are in the matrix, the flawed ones too."""

    files: VectorFiles
    matrix: Path
    dropped: Mapping[str, int]
    unmapped: int
    overridden: int

    @property
    def whole(self) -> bool:
        """Whether every row of the matrix is kept as it is."""
        return not (self.dropped or self.unmapped or self.overridden or self.files.config.pca_dim)


def _build_table(entries: Sequence[VectorFiles], *, table: str, out: Path) -> VectorTable:
    scratch = out / f"{table}.scratch"
    scratch.mkdir()
    threads = max((files.config.threads or 0 for files in entries), default=0) or None
    try:
        with database(
            memory_limit=MEMORY_LIMIT,
            threads=threads,
            spill=scratch / "spill",
            subject=f"the ids of the {table} vectors",
            setting="the memory for ids",
        ) as connection:
            ids = TableIds(connection, id_type=entries[0].id_type)
            read = [
                _read_entry(files, ids=ids, scratch=scratch / str(index), entry=index) for index, files in enumerate(entries)
            ]
            if not ids.rows:
                raise InputError(f"{entries[0].setting}: no vector is left for table {table!r}")
            ids.write(out / f"{table}.ids.parquet")
            dim, explained = _write_matrix(read, ids=ids, target=out / f"{table}.vectors.npy")
            return VectorTable(
                rows=ids.rows,
                dim=dim,
                id_type=entries[0].id_type,
                explained_variance=explained,
                dropped={name: sum(entry.dropped.get(name, 0) for entry in read) for entry in read for name in entry.dropped},
                unmapped=sum(entry.unmapped for entry in read),
                overridden=sum(entry.overridden for entry in read),
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read_entry(files: VectorFiles, *, ids: TableIds, scratch: Path, entry: int) -> _Entry:
    """Ids beside the vectors; where they are wrong, no more vectors are read."""
    config = files.config
    scratch.mkdir()
    if config.checksums == "sidecar":
        verify_sidecars((*files.sources, *files.id_map))
    findings, of_vectors = (Findings(files.sources, setting=files.setting) for _ in range(2))
    wrong = threading.Event()
    columns = [config.id_column, *files.columns]
    matrix = scratch / "vectors.npy"

    def read_ids(paths: Sequence[Path]) -> None:
        ids.read(files, paths=paths, findings=findings)
        if config.on_bad_rows == "fail":
            ids.tell_duplicates(files, findings)
            if findings.counts():
                wrong.set()

    with ExitStack() as stack:
        paths = stack.enter_context(local_files(files.sources, columns=columns, scratch=scratch))
        with ThreadPoolExecutor(1, thread_name_prefix="ids") as beside:
            reading = beside.submit(read_ids, paths)
            read_vectors(files, paths=paths, findings=of_vectors, out=matrix, stop=wrong)
            reading.result()
        if config.on_bad_rows == "fail":
            findings.judge(config)
        findings.take(of_vectors)
        if config.on_bad_rows == "drop":
            ids.leave_out(findings)
            ids.tell_duplicates(files, findings)  # of two rows with one id the first that has a vector is kept
            ids.leave_out(findings)
        dropped = findings.judge(config)
        unmapped = 0
        if config.id_map is not None:
            columns = sorted({config.id_map.from_column, config.id_map.to_column})
            maps = stack.enter_context(local_files(files.id_map, columns=columns, scratch=scratch))
            unmapped = ids.translate(files, paths=maps)
        return _Entry(files, matrix, dropped, unmapped, ids.keep(entry=entry))


def _write_matrix(entries: Sequence[_Entry], *, ids: TableIds, target: Path) -> tuple[int, float | None]:
    """The kept rows of all entries; returns their dimension and, of projected entries, the least explained variance."""
    if len(entries) == 1 and entries[0].whole:
        entries[0].matrix.rename(target)
        return int(np.load(target, mmap_mode="r").shape[1]), None
    projections = [_projection(entry, index, ids=ids) for index, entry in enumerate(entries)]
    dims = [entry.files.config.pca_dim or np.load(entry.matrix, mmap_mode="r").shape[1] for entry in entries]
    for entry, dim in zip(entries, dims, strict=True):
        require_one_dim(entry.files, dim, before=entries[0].files, before_dim=dims[0])
    out_RD = allocate_npy(target, dtype=np.float32, shape=(ids.rows, dims[0]))
    start = 0
    for index, (entry, projection) in enumerate(zip(entries, projections, strict=True)):
        for block_ND in _blocks(entry, index, ids=ids):
            made_ND = block_ND if projection is None else projection.apply(block_ND)
            if projection is not None and entry.files.config.normalise:
                made_ND = unit_length(made_ND)
            out_RD[start : start + len(made_ND)] = made_ND
            start += len(made_ND)
        os.unlink(entry.matrix)  # noqa: PTH108  the next one may need the room
    assert start == ids.rows
    return dims[0], min((made.explained_variance for made in projections if made is not None), default=None)


def _blocks(entry: _Entry, index: int, *, ids: TableIds, every: int = 1) -> Iterator[NDArray[np.float32]]:
    """Kept rows of an entry in their order, some at a time; or every so-many-th of them."""
    source_RD = np.load(entry.matrix, mmap_mode="r")
    skip = 0
    for position_N in ids.positions(entry=index, rows=max(64, BATCH_BYTES // (4 * source_RD.shape[1]))):
        chosen = position_N[skip::every]
        skip = (skip - len(position_N)) % every
        if len(chosen):
            yield source_RD[chosen]


def _projection(entry: _Entry, index: int, *, ids: TableIds) -> Projection | None:
    dim = entry.files.config.pca_dim
    if dim is None:
        return None
    width = np.load(entry.matrix, mmap_mode="r").shape[1]
    if dim > width:
        refuse_wider(entry.files, width)
    kept = sum(len(position_N) for position_N in ids.positions(entry=index, rows=65_536))
    if kept <= dim:
        raise InputError(
            f"{entry.files.setting}.pca_dim is {dim}, which {kept:,} vectors cannot tell; give more than {dim} vectors, or "
            "lower it"
        )
    return Projection.fit(_blocks(entry, index, ids=ids, every=-(-kept // SAMPLE_ROWS)), dim=dim)
