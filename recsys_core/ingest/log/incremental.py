"""Incremental reading of the interaction log: a file is read and checked once, and later runs reuse its events.

The events of the files that one run reads are stored in a part: a parquet file in which codes replace the user and item ids.
An id keeps its code until the vocabularies are rebuilt. Until then, later runs reuse the part and read only new files.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from pathlib import Path

import duckdb
import pyarrow as pa

from recsys_core.errors import InputError
from recsys_core.ingest.log.checks import IN_FUTURE, FileStatistics, reject_bad_log, row_checks, scan_files
from recsys_core.ingest.log.config import FileSplit, InteractionsConfig
from recsys_core.ingest.log.log_schema import InteractionsInput
from recsys_core.ingest.log.read_errors import explain_read_errors, reject_false_null_counts
from recsys_core.ingest.row_checks import pass_sql
from recsys_core.manifests import IdType, IngestedFile, InteractionsManifest, LogPart, SourceFile, fingerprint_of
from recsys_core.parquet.columns import require_column
from recsys_core.parquet.duckdb_session import SQL_TYPE, quoted, scan_all_sql, scan_sql
from recsys_core.parquet.guards import has_page_checksums, verify_pages, verify_sidecars
from recsys_core.parquet.local_copies import local_files
from recsys_core.parquet.sources import Source

TO_MICROSECONDS_SQL = {"s": "* 1000000", "ms": "* 1000", "us": "", "ns": "// 1000"}
"""SQL that converts an integer time to microseconds, by the unit of the time."""
PAIR_HASH_ARGUMENTS_SQL, ITEM_HASH_ARGUMENTS_SQL = '"user"::VARCHAR, item::VARCHAR', "item::VARCHAR"
"""Arguments of the SQL function hash. Ids are hashed as strings, because the hash of a number depends on its width."""
PART_SETTINGS = {
    "user_column", "item_column", "timestamp_column", "timestamp_unit", "order_column", "label_column", "label_threshold",
    "label_range", "weight_column", "context_columns", "on_bad_rows", "max_future_days",
}  # fmt: skip
"""Settings that decide the content of a part; a change of any other setting keeps the parts of the previous run."""


def gather_parts(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    log: InteractionsInput,
    output_folder: Path,
    *,
    continued_run: InteractionsManifest | None,
) -> tuple[tuple[LogPart, ...], tuple[Source, ...]]:
    """Reuse the valid parts of `continued_run`, and read all other files into one new part.

    Returns:
        The parts that hold the events of all input files, and the files that were read.
    """
    (output_folder / "parts").mkdir()
    type_by_hive_key = {
        key: str(data_type) for key, data_type in log.sources[0].partition_types.items() if key in config.columns
    }
    part_settings = config.model_dump(mode="json", include=PART_SETTINGS)
    settings_fingerprint = fingerprint_of(duckdb.__version__, part_settings, _validation_draw_sql(config), type_by_hive_key)
    parts = []
    for part in continued_run.parts if continued_run else ():
        if (
            part.settings_fingerprint == settings_fingerprint
            and _is_mostly_current(part, log.split_code_by_file)
            and not _has_dropped_future_rows(part)
        ):
            assert continued_run is not None
            _link_or_copy(continued_run.path(part.file_name), output_folder / part.file_name)
            parts.append(part)
    reused_records = {file.source for part in parts for file in part.files}
    new_sources = tuple(source for source in log.sources if source.record not in reused_records)
    if new_sources:
        part_name = fingerprint_of(settings_fingerprint, [source.record for source in new_sources])[:16]
        new_part = read_part(
            connection,
            config,
            sources=new_sources,
            id_types=(log.user_id_type, log.item_id_type),
            settings_fingerprint=settings_fingerprint,
            part_path=output_folder / "parts" / f"{part_name}.parquet",
        )
        parts.append(new_part)
    return tuple(parts), new_sources


def _is_mostly_current(part: LogPart, input_files: Collection[SourceFile]) -> bool:
    """Return whether at least half of the rows of `part` are from unchanged, current input files."""
    num_rows = sum(file.source.rows for file in part.files)
    return 2 * sum(file.source.rows for file in part.files if file.source in input_files) >= num_rows


def _has_dropped_future_rows(part: LogPart) -> bool:
    """Return whether rows were dropped because their time was in the future. By now, these rows may be valid."""
    return any(check_name.endswith(IN_FUTURE) for file in part.files for check_name in file.bad_rows)


def _link_or_copy(part_path: Path, new_path: Path) -> None:
    """Hard-link a part, or copy it if the file system does not support links. Runs can share a part: it never changes."""
    try:
        new_path.hardlink_to(part_path)
    except OSError:
        shutil.copyfile(part_path, new_path)


def read_part(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    *,
    sources: Sequence[Source],
    id_types: tuple[IdType, IdType],
    settings_fingerprint: str,
    part_path: Path,
) -> LogPart:
    """Write the events of `sources` to `part_path`, and add their new ids to the tables user_ids and item_ids.

    Args:
        id_types: types of the user ids and of the item ids.
        settings_fingerprint: fingerprint of the settings that decide the content of a part.

    Raises:
        InputError: bad rows (see config.on_bad_rows), and files whose content contradicts their footer.
    """
    type_by_column = {
        column: _widest_type([require_column(source, column, setting="interactions") for source in sources])
        for column in config.columns
    }
    if config.checksums == "sidecar":
        verify_sidecars(sources)
    checksum_flags = [has_page_checksums(source, config.columns) for source in sources]
    for source, pages_have_checksums in zip(sources, checksum_flags, strict=True):
        if source.is_local and pages_have_checksums:  # pages of remote files are verified while they are copied
            verify_pages(source, config.columns)
    with (
        local_files(sources, columns=config.columns, scratch_folder=part_path.with_suffix(".remote")) as paths,
        explain_read_errors(config, sources, paths),
    ):
        connection.execute(
            f"CREATE OR REPLACE TEMP VIEW raw AS {_raw_log_sql(config, sources, paths, type_by_column=type_by_column)}"
        ).fetchall()
        checks = row_checks(config, type_by_column=type_by_column)
        range_columns = _range_columns(config)
        positive_row_sql = f"label::DOUBLE >= {config.label_threshold!r}" if config.label_column else "true"
        statistics = scan_files(
            connection,
            checks,
            num_files=len(sources),
            range_columns=list(range_columns),
            positive_row_sql=positive_row_sql,
        )
        _require_rows_of_footer(statistics, sources)
        reject_bad_log(connection, config, checks, statistics, sources=sources)
        # The checks take a second per 20 million rows, so they are not repeated if no row is bad.
        kept_row_sql = (
            f"{pass_sql(checks)} AND {positive_row_sql}"
            if any(file_statistics.num_bad for file_statistics in statistics)
            else positive_row_sql
        )
        for side, id_type in zip(("user", "item"), id_types, strict=True):
            _add_ids(connection, side, id_type=id_type, kept_row_sql=kept_row_sql)
        written_counts_by_file = _write_events(
            connection, config, part_path=part_path, kept_row_sql=kept_row_sql, id_types=id_types
        )
        reject_false_null_counts(written_counts_by_file, statistics, sources, has_label=config.label_column is not None)
    files = []
    for index, (source, file_statistics) in enumerate(zip(sources, statistics, strict=True)):
        num_written_rows, _ = written_counts_by_file.get(index, (0, 0))
        num_good_rows = file_statistics.num_rows - file_statistics.num_bad
        file = IngestedFile(
            source=source.record,
            bad_rows=dict(file_statistics.num_bad_by_check),
            below_threshold=num_good_rows - num_written_rows if config.label_column else 0,
            spans={range_columns[alias]: bounds for alias, bounds in file_statistics.range_by_column.items()},
            has_checksums=checksum_flags[index],
        )
        files.append(file)
    return LogPart(file_name=f"parts/{part_path.name}", settings_fingerprint=settings_fingerprint, files=tuple(files))


def _raw_log_sql(
    config: InteractionsConfig, sources: Sequence[Source], paths: Sequence[Path], *, type_by_column: Mapping[str, pa.DataType]
) -> str:
    """Return SQL for the log with fixed column names, so that no later query has to quote the user's names."""
    column_by_alias = {"user": config.user_column, "item": config.item_column, "time": config.timestamp_column}
    column_by_alias |= {"sequence": config.order_column, "label": config.label_column, "weight": config.weight_column}
    column_by_alias |= {f"context_{index}": column for index, column in enumerate(config.context_columns)}
    hive_columns = {name for source in sources for name in source.partition_values if name not in source.schema.names} & set(
        config.columns
    )
    select_list = [
        f'{"keys" if column in hive_columns else "file"}.{quoted(column)} AS "{alias}"'
        for alias, column in column_by_alias.items()
        if column
    ]
    files_sql = f"{scan_all_sql(paths)} AS file"
    if hive_columns:
        files_sql += f" JOIN ({_hive_keys_sql(sources, sorted(hive_columns))}) AS keys ON file.file_index = keys.source"
    raw_columns_sql = (
        f"SELECT {', '.join(select_list)}, file.file_index AS source, file.file_row_number AS row FROM {files_sql}"
    )
    before_1970_sql = (
        f", {_before_1970_sql(type_by_column[config.timestamp_column])} AS before_1970" if config.timestamp_column else ""
    )
    return f"SELECT *, {_position_sql(config, type_by_column)} AS position{before_1970_sql} FROM ({raw_columns_sql})"


def _widest_type(data_types: Sequence[pa.DataType]) -> pa.DataType:
    """Return a floating-point or uint64 type if a file has one, otherwise the first type. It decides the checks."""
    float_or_uint64_types = [
        data_type for data_type in data_types if pa.types.is_floating(data_type) or pa.types.is_uint64(data_type)
    ]
    return (float_or_uint64_types or list(data_types))[0]


def _hive_keys_sql(sources: Sequence[Source], keys: Sequence[str]) -> str:
    """Return SQL for a table with the hive keys `keys` of each file, as dates, integers or strings."""
    rows_sql = [
        f"({index}, {', '.join(_constant_sql(source.partition_value(key)) for key in keys)})"
        for index, source in enumerate(sources)
    ]
    return f"SELECT * FROM (VALUES {', '.join(rows_sql)}) AS t(source, {', '.join(quoted(key) for key in keys)})"


def _constant_sql(value: int | date | str) -> str:
    if isinstance(value, int):
        return f"{value}::BIGINT"
    return f"DATE '{value.isoformat()}'" if isinstance(value, date) else quoted(value, quote="'")


def _position_sql(config: InteractionsConfig, type_by_column: Mapping[str, pa.DataType]) -> str:
    """Return SQL for the sort key of a user's events: the time in microseconds, or the order column.

    In a log with neither, the sort key is a hash of the user and the item.
    """
    if config.order_column is not None:
        return "TRY(sequence::BIGINT)" if pa.types.is_integer(type_by_column[config.order_column]) else "sequence::DOUBLE"
    if config.timestamp_column is None:
        return f"(hash({PAIR_HASH_ARGUMENTS_SQL}) >> 1)::BIGINT"
    data_type = type_by_column[config.timestamp_column]
    if pa.types.is_integer(data_type):
        return f"TRY(CAST(time AS BIGINT) {TO_MICROSECONDS_SQL[config.timestamp_unit]})"
    has_time_zone = pa.types.is_timestamp(data_type) and data_type.tz is not None
    # The cast is needed because epoch_us does not accept nanoseconds with a time zone.
    return f"TRY(epoch_us(time::{'TIMESTAMPTZ' if has_time_zone else 'TIMESTAMP'}))"


def _before_1970_sql(data_type: pa.DataType) -> str:
    """Return SQL that is true for a time before 1970. It also works for a time that overflows `position`."""
    if pa.types.is_integer(data_type):
        return "time < 0"
    has_time_zone = pa.types.is_timestamp(data_type) and data_type.tz is not None
    return "time::TIMESTAMPTZ < TIMESTAMPTZ '1970-01-01 00:00:00+00'" if has_time_zone else "time < DATE '1970-01-01'"


def _range_columns(config: InteractionsConfig) -> dict[str, str]:
    """Return the columns of `raw` whose smallest and largest values are reported, each with its name in the log."""
    column_by_alias = {
        "position": config.timestamp_column or config.order_column,
        "label": config.label_column,
        "weight": config.weight_column,
    }
    return {alias: column for alias, column in column_by_alias.items() if column is not None}


def _require_rows_of_footer(statistics: Sequence[FileStatistics], sources: Sequence[Source]) -> None:
    for source, file_statistics in zip(sources, statistics, strict=True):
        if file_statistics.num_rows != source.record.rows:
            raise InputError(
                f"{source.name}: damaged: the footer declares {source.record.rows:,} rows, but the file has "
                f"{file_statistics.num_rows:,}; write the file again"
            )


def _add_ids(connection: duckdb.DuckDBPyConnection, side: str, *, id_type: IdType, kept_row_sql: str) -> None:
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


def _write_events(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    *,
    part_path: Path,
    kept_row_sql: str,
    id_types: tuple[IdType, IdType],
) -> dict[int, tuple[int, int]]:
    """Write the rows to keep, with codes in place of ids.

    Return, by index of the file, the number of rows written and the number of these rows that have a null.
    """
    # TRY_CAST: DuckDB may cast a bad row before the filter removes it.
    user_id_sql, item_id_sql = (
        f'TRY_CAST(raw."{side}" AS {SQL_TYPE[id_type]})' for side, id_type in zip(("user", "item"), id_types, strict=True)
    )
    extra_columns_sql = ["TRY_CAST(weight AS FLOAT) AS weight"] if config.weight_column else []
    extra_columns_sql += [f"context_{index}" for index in range(len(config.context_columns))]
    draw_sql = _validation_draw_sql(config)
    extra_columns_sql += [] if draw_sql is None else [f"{draw_sql} AS draw"]
    columns_sql = ", ".join(["source::INTEGER AS source", 'u.code AS "user"', "i.code AS item", "position", *extra_columns_sql])
    joins_sql = [
        f"JOIN {side}_ids {side[0]} ON {_id_condition_sql(connection, side, id_sql=id_sql)}"
        for side, id_sql in (("user", user_id_sql), ("item", item_id_sql))
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
