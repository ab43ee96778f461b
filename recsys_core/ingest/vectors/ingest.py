"""Stage `ingest_embeddings`: one memory-mapped matrix per embedding table, from pretrained vectors in parquet.

An entry is one element of the config list `embeddings`; a table may have several entries.

Shapes: N rows of a block, R rows of an entry or of the final matrix, D width of a vector.
"""

import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.layout import allocate_npy
from recsys_core.errors import InputError
from recsys_core.ingest.vectors.config import AnyEmbeddings
from recsys_core.ingest.vectors.ids import MEMORY_LIMIT, TableIds
from recsys_core.ingest.vectors.projection import MAX_SAMPLE_ROWS, Projection, with_unit_norm
from recsys_core.ingest.vectors.reader import BATCH_BYTES, MIN_BATCH_ROWS, read_vectors
from recsys_core.ingest.vectors.row_faults import Fault, num_rows_by_fault, reject_faults
from recsys_core.ingest.vectors.vector_schema import VectorFiles, check_pca_dim, open_embeddings, require_one_dim
from recsys_core.manifests import EmbeddingsManifest, StageFolder, VectorTable
from recsys_core.parquet.duckdb_session import database
from recsys_core.parquet.local_copies import local_files


def ingest_embeddings(
    configs: Sequence[AnyEmbeddings], *, folder: Path, allowed_data_root: Path | None = None
) -> EmbeddingsManifest:
    """Write <table>.vectors.npy and <table>.ids.parquet for each table, entry by entry, in the order of the files.

    Memory use does not grow with the number of vectors.

    Raises:
        InputError: a row is unusable (see row_faults.Fault) and the config does not drop it, or the disk is too small.
    """
    entries = open_embeddings(configs, allowed_data_root=allowed_data_root)
    source_records = tuple(source.record for entry in entries for source in (*entry.sources, *entry.id_map_sources))
    settings = [entry.config.result_settings() for entry in entries]
    stage = StageFolder(folder, EmbeddingsManifest, inputs=["ingest_embeddings", settings, source_records])
    if stage.manifest is not None:
        return stage.manifest
    with stage.writing() as output_folder:
        table_by_name: dict[str, VectorTable] = {}
        for table_name in dict.fromkeys(entry.config.table for entry in entries):
            table_entries = [entry for entry in entries if entry.config.table == table_name]
            table_by_name[table_name] = _build_table(table_entries, table_name=table_name, output_folder=output_folder)
        return stage.commit(tables=table_by_name, sources=source_records)


@dataclass(frozen=True)
class _ReadEntry:
    """One entry that has been read. Its matrix has all rows of its files, including the faulty rows."""

    entry_index: int
    entry: VectorFiles
    matrix_path: Path
    num_dropped_by_fault: Counter[str]
    num_unmapped: int
    """Number of vectors whose id is not in the id map."""
    num_overridden: int
    """Number of vectors that are not used, because an earlier entry has the same id."""
    source_dim: int
    """Width of the vectors before the projection."""

    @property
    def is_final(self) -> bool:
        """Whether the matrix is final: no row is removed, and no projection is applied."""
        return not (self.num_dropped_by_fault or self.num_unmapped or self.num_overridden or self.entry.config.pca_dim)


def _build_table(entries: Sequence[VectorFiles], *, table_name: str, output_folder: Path) -> VectorTable:
    """Write the files of one embedding table, and return its entry in the manifest."""
    scratch_folder = output_folder / f"{table_name}.scratch"
    scratch_folder.mkdir()
    num_threads = max(entry.config.threads or 0 for entry in entries) or None
    try:
        with database(
            memory_limit=MEMORY_LIMIT,
            num_threads=num_threads,
            spill_folder=scratch_folder / "spill",
            subject=f"the ids of the {table_name} vectors",
            setting="the memory for ids",
        ) as connection:
            table_ids = TableIds(connection, id_type=entries[0].id_type)
            read_entries = [
                _read_entry(
                    entry, table_ids=table_ids, scratch_folder=scratch_folder / str(entry_index), entry_index=entry_index
                )
                for entry_index, entry in enumerate(entries)
            ]
            if not table_ids.count_ids():
                raise InputError(f"{entries[0].setting}: no vector is left for table {table_name!r}")
            table_ids.write_ids(output_folder / f"{table_name}.ids.parquet")
            dim, explained_variance, projected_rows = _write_matrix(
                read_entries, table_ids=table_ids, matrix_path=output_folder / f"{table_name}.vectors.npy"
            )
            return VectorTable(
                num_rows=table_ids.count_ids(),
                dim=dim,
                id_type=entries[0].id_type,
                explained_variance=explained_variance,
                projected_rows=projected_rows,
                num_dropped_by_fault=sum((read_entry.num_dropped_by_fault for read_entry in read_entries), Counter()),
                num_unmapped=sum(read_entry.num_unmapped for read_entry in read_entries),
                num_overridden=sum(read_entry.num_overridden for read_entry in read_entries),
            )
    finally:
        shutil.rmtree(scratch_folder, ignore_errors=True)


def _read_entry(entry: VectorFiles, *, table_ids: TableIds, scratch_folder: Path, entry_index: int) -> _ReadEntry:
    """Read the ids and the vectors of an entry, and reject or remove its faulty rows."""
    config = entry.config
    scratch_folder.mkdir()
    matrix_path = scratch_folder / "vectors.npy"
    # A page of zeros takes no memory until it is written to, and faults are rare.
    fault_code_R = np.zeros(entry.num_rows, np.uint8)
    with ExitStack() as stack:
        paths = stack.enter_context(
            local_files(entry.sources, columns=[config.id_column, *entry.columns], scratch_folder=scratch_folder)
        )
        table_ids.read_entry(entry, paths=paths, fault_code_R=fault_code_R)
        if config.on_bad_rows == "fail":  # a faulty id is reported before the vectors are read
            table_ids.mark_duplicates(fault_code_R)
            reject_faults(fault_code_R, entry, dim=None, first_row_with_id=table_ids.first_row_with_id)
        dim = read_vectors(entry, paths=paths, matrix_path=matrix_path, fault_code_R=fault_code_R)
        if config.on_bad_rows == "drop":
            table_ids.remove_rows(np.flatnonzero(fault_code_R))
            # Duplicates are searched among the usable rows, so that the first row with a usable vector keeps the id.
            table_ids.mark_duplicates(fault_code_R)
            table_ids.remove_rows(np.flatnonzero(fault_code_R == Fault.DUPLICATE_ID))
        reject_faults(fault_code_R, entry, dim=dim, first_row_with_id=table_ids.first_row_with_id)
        num_unmapped = 0
        if config.id_map is not None:
            columns = sorted({config.id_map.from_column, config.id_map.to_column})
            map_paths = stack.enter_context(local_files(entry.id_map_sources, columns=columns, scratch_folder=scratch_folder))
            num_unmapped = table_ids.translate(entry, paths=map_paths)
    num_overridden = table_ids.add_entry(entry_index=entry_index)
    return _ReadEntry(
        entry_index,
        entry,
        matrix_path,
        num_dropped_by_fault=Counter(num_rows_by_fault(fault_code_R)),
        num_unmapped=num_unmapped,
        num_overridden=num_overridden,
        source_dim=dim,
    )


def _write_matrix(
    read_entries: Sequence[_ReadEntry], *, table_ids: TableIds, matrix_path: Path
) -> tuple[int, float | None, tuple[tuple[int, int], ...]]:
    """Write the usable vectors of all entries.

    Return their width, the smallest explained variance of a projection, and the rows (start, stop) of each projected entry.
    """
    if len(read_entries) == 1 and read_entries[0].is_final:
        dim = read_entries[0].source_dim
        read_entries[0].matrix_path.rename(matrix_path)
        return dim, None, ()
    projections = [_fit_projection(read_entry, table_ids=table_ids) for read_entry in read_entries]
    dims = [read_entry.entry.config.pca_dim or read_entry.source_dim for read_entry in read_entries]
    for read_entry, dim in zip(read_entries, dims, strict=True):
        require_one_dim(read_entry.entry, dim, other_entry=read_entries[0].entry, other_dim=dims[0])
    final_matrix_RD = allocate_npy(matrix_path, dtype=np.float32, shape=(table_ids.count_ids(), dims[0]))
    next_row, projected_rows = 0, []
    for read_entry, projection in zip(read_entries, projections, strict=True):
        start_row = next_row
        for block_ND in _usable_vectors(read_entry, table_ids=table_ids):
            output_ND = block_ND
            if projection is not None:
                output_ND = projection.apply(block_ND)
                if read_entry.entry.config.normalise:
                    output_ND = with_unit_norm(output_ND)
            final_matrix_RD[next_row : next_row + len(output_ND)] = output_ND
            next_row += len(output_ND)
        if projection is not None:
            projected_rows.append((start_row, next_row))
        os.unlink(read_entry.matrix_path)  # noqa: PTH108  frees disk space for the next entry
    assert next_row == table_ids.count_ids()
    explained_variances = [projection.explained_variance for projection in projections if projection is not None]
    return dims[0], min(explained_variances, default=None), tuple(projected_rows)


def _usable_vectors(read_entry: _ReadEntry, *, table_ids: TableIds, sample_step: int = 1) -> Iterator[NDArray[np.float32]]:
    """Yield every `sample_step`-th usable vector of an entry, in blocks and in the order of the rows."""
    matrix_RD = np.load(read_entry.matrix_path, mmap_mode="r")
    first_index = 0  # index of the first sampled row in the next batch
    batch_rows = max(MIN_BATCH_ROWS, BATCH_BYTES // (4 * matrix_RD.shape[1]))
    for row_N in table_ids.row_batches(entry_index=read_entry.entry_index, batch_rows=batch_rows):
        sampled_row_N = row_N[first_index::sample_step]
        first_index = (first_index - len(row_N)) % sample_step
        if len(sampled_row_N):
            yield matrix_RD[sampled_row_N]


def _fit_projection(read_entry: _ReadEntry, *, table_ids: TableIds) -> Projection | None:
    """Fit the projection of an entry to a sample of its usable vectors. Return None if pca_dim is None."""
    dim = read_entry.entry.config.pca_dim
    if dim is None:
        return None
    check_pca_dim(read_entry.entry, read_entry.source_dim)
    num_vectors = sum(len(row_N) for row_N in table_ids.row_batches(entry_index=read_entry.entry_index, batch_rows=65_536))
    if num_vectors <= dim:
        raise InputError(
            f"{read_entry.entry.setting}.pca_dim is {dim}, but there are only {num_vectors:,} vectors to fit it on; "
            f"provide more than {dim} vectors, or lower pca_dim"
        )
    sample_step = -(-num_vectors // MAX_SAMPLE_ROWS)
    projection = Projection.fit(_usable_vectors(read_entry, table_ids=table_ids, sample_step=sample_step), dim=dim)
    if math.isnan(projection.explained_variance):
        raise InputError(
            f"{read_entry.entry.setting}.pca_dim is {dim}, but all {-(-num_vectors // sample_step):,} vectors to fit it on are "
            "equal, so the projection would turn them into zeros; check the job that writes these vectors, or remove pca_dim"
        )
    return projection
