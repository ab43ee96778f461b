"""Checks that read one row group of an input: vector width, ids that the log and the vectors share, and the unit of times.

The checks find common mistakes within seconds, before an ingest that takes hours.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from recsys_core.errors import InputError, first_line, shown
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.vectors.vector_schema import VectorFiles, check_pca_dim
from recsys_core.parquet.columns import value_type
from recsys_core.parquet.duckdb_session import database, quoted, scan_all_sql
from recsys_core.parquet.sources import Source
from recsys_core.units import DAY_S, TICKS_PER_S

MAX_ROWS = 65_536
_MAX_VECTOR_ROWS = 256
_YEAR_1971_S, _YEAR_1990_S, _YEAR_6000_S = 31_536_000, 631_152_000, 2**37


def first_values(sources: Sequence[Source], column: str, *, max_rows: int = MAX_ROWS) -> pa.Array | None:
    """Return the first values of `column` in the first non-empty row group; None if the column is a hive key.

    Raises:
        InputError: the values cannot be read.
    """
    source = _first_non_empty_source(sources)
    if column not in source.schema.names:
        return None
    group_index = next(index for index, num_rows in enumerate(source.footer.num_group_rows) if num_rows)
    try:
        with source.open(page_checksum_verification=True) as file:
            batch = next(file.iter_batches(max_rows, row_groups=[group_index], columns=[column]), None)
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise InputError(
            f"{source.name}: column {column!r}: damaged, or not readable ({first_line(error)}); write the file again"
        ) from error
    return None if batch is None else batch.column(0)


def _first_non_empty_source(sources: Sequence[Source]) -> Source:
    return next(source for source in sources if source.record.num_rows)


def stored_vector_dim(entry: VectorFiles) -> int | None:
    """Return the width of the vectors after the projection: pca_dim, or their width in the schema or in the first rows.

    Return None if pca_dim is not set and the vectors of the first rows have no common width.

    Raises:
        InputError: pca_dim is larger than the width of the input vectors.
    """
    pca_dim = entry.config.pca_dim
    if entry.source_dim is not None:
        return pca_dim or entry.source_dim
    first_vectors = first_values(entry.sources, entry.columns[0], max_rows=_MAX_VECTOR_ROWS)
    distinct_dims = set() if first_vectors is None else set(pc.list_value_length(first_vectors).drop_null().to_pylist())
    if len(distinct_dims) != 1:
        return pca_dim
    source_dim: int = distinct_dims.pop()
    check_pca_dim(entry, source_dim)
    return pca_dim or source_dim


def check_time_unit(config: InteractionsConfig, sources: Sequence[Source]) -> None:
    """Raise InputError if the times are in 1970 or in the future, but would be plausible in another unit."""
    column = config.timestamp_column
    times = first_values(sources, column) if column is not None else None
    if times is None or pa.types.is_date(times.type):
        return
    unit = times.type.unit if pa.types.is_timestamp(times.type) else config.timestamp_unit
    tick_range = pc.min_max(times.view(pa.int64()) if pa.types.is_timestamp(times.type) else times.drop_null()).as_py()
    latest_valid_s = time.time() + config.max_future_days * DAY_S
    if tick_range["min"] is None or tick_range["max"] < 0:
        return
    max_time_s = tick_range["max"] // TICKS_PER_S[unit]
    if max_time_s >= _YEAR_1971_S and tick_range["min"] // TICKS_PER_S[unit] <= latest_valid_s:
        return
    plausible_unit = plausible_time_unit(tick_range["max"], latest_s=latest_valid_s)
    if plausible_unit is not None:
        is_unit_from_config = not pa.types.is_timestamp(times.type)
        fix = f"set interactions.timestamp_unit to {plausible_unit}" if is_unit_from_config else "write the column again"
        raise InputError(
            f"{_first_non_empty_source(sources).name}: column {column!r}: {tick_range['max']} is {_date_text(max_time_s)} in "
            f"{unit}, and {_date_text(tick_range['max'] // TICKS_PER_S[plausible_unit])} in {plausible_unit}; {fix}"
        )


def plausible_time_unit(ticks: int, *, latest_s: float) -> str | None:
    """Return the unit in which the time `ticks` is between the year 1990 and `latest_s`; None if there is no such unit.

    >>> plausible_time_unit(1_700_000_000_000, latest_s=1_800_000_000), plausible_time_unit(42, latest_s=1_800_000_000)
    ('ms', None)
    """
    units = (unit for unit, ticks_per_s in TICKS_PER_S.items() if _YEAR_1990_S <= ticks // ticks_per_s <= latest_s)
    return next(units, None)


def _date_text(time_s: int) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d}" if time_s < _YEAR_6000_S else "after the year 6000"


def check_shared_ids(
    config: InteractionsConfig,
    log_sources: Sequence[Source],
    entries: Sequence[VectorFiles],
    *,
    id_column_by_table: Mapping[str, str],
) -> None:
    """Raise InputError if the log and the vectors of a table have no id in common.

    One row group of the log and one row group of the vectors are compared first. If they have no id in common, all ids are
    compared, unless a file is in an object store. Vectors with an id map are not checked.

    Args:
        id_column_by_table: column of the log that contains the ids of an embedding table, by table.
    """
    for table, column in id_column_by_table.items():
        table_entries = [entry for entry in entries if entry.config.table == table]
        if any(entry.config.id_map is not None for entry in table_entries):  # the stage compares the translated ids
            continue
        log_ids = first_values(log_sources, column) if table_entries else None
        if log_ids is None or any(_have_common_id(log_ids, entry) for entry in table_entries):
            continue
        sources = (*log_sources, *(source for entry in table_entries for source in entry.sources))
        if not all(source.is_local for source in sources) or not all(column in source.schema.names for source in log_sources):
            continue
        if not _files_have_common_id(config, log_sources, column, table_entries):
            num_vectors, first_entry = sum(entry.num_rows for entry in table_entries), table_entries[0]
            vector_ids = first_values(first_entry.sources, first_entry.config.id_column)
            raise InputError(
                f"embeddings: none of the {num_vectors:,} {table} vectors belongs to one of the log's {table}s: column "
                f"{column!r} of {log_sources[0].name} has ids such as {_example_id(log_ids)}, but "
                f"{first_entry.sources[0].name} has ids such as {_example_id(vector_ids)}; write both with the same ids"
            )


def _have_common_id(log_ids: pa.Array, entry: VectorFiles) -> bool:
    vector_ids = first_values(entry.sources, entry.config.id_column)
    return vector_ids is None or bool(pc.any(pc.is_in(_as_text(log_ids), value_set=_as_text(vector_ids))).as_py())


def _as_text(ids: pa.Array) -> pa.Array:
    return ids.cast(value_type(ids.type)).cast(pa.string()).drop_null()


def _files_have_common_id(
    config: InteractionsConfig, log_sources: Sequence[Source], column: str, entries: Sequence[VectorFiles]
) -> bool:
    with (
        tempfile.TemporaryDirectory(prefix="nightjar-ids-") as folder,
        database(
            memory_limit=config.memory_limit,
            num_threads=config.threads,
            spill_folder=Path(folder),
            subject="the ids of log and vectors",
        ) as connection,
    ):
        log_ids_sql = _select_ids_sql(log_sources, column)
        vector_ids_sql = " UNION ALL ".join(_select_ids_sql(entry.sources, entry.config.id_column) for entry in entries)
        query = f"SELECT 1 FROM ({log_ids_sql}) SEMI JOIN ({vector_ids_sql}) USING (id) LIMIT 1"
        return bool(connection.sql(query).fetchall())


def _select_ids_sql(sources: Sequence[Source], column: str) -> str:
    return f"SELECT {quoted(column)}::VARCHAR AS id FROM {scan_all_sql([source.path for source in sources])}"


def _example_id(ids: pa.Array | None) -> str:
    non_null_ids = None if ids is None else ids.drop_null()
    return "none" if non_null_ids is None or not len(non_null_ids) else shown(non_null_ids[0].as_py())
