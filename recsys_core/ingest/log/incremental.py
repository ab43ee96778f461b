"""Incremental reading of the interaction log: a file is read and checked once, and later runs reuse its events.

A run stores the events of the files that it reads in a part: a parquet file in which codes replace the user and item ids.
An id keeps its code until the vocabularies are rebuilt. Until then, later runs reuse the part and read only new files.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pyarrow as pa

from recsys_core.disk import link_or_copy
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine import FileStatistics, LogEngine, LogFiles
from recsys_core.ingest.log.log_schema import InteractionsInput
from recsys_core.ingest.log.log_statistics import FUTURE_REASON, columns_by_role
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.manifests import IngestedFile, InteractionsManifest, LogPart, SourceFile, fingerprint_of
from recsys_core.parquet.columns import is_whole_decimal, require_column
from recsys_core.parquet.guards import has_page_checksums, verify_pages
from recsys_core.parquet.local_copies import local_files
from recsys_core.parquet.sources import Source

logger = logging.getLogger(__name__)
PART_SETTINGS = {
    "user_column", "item_column", "timestamp_column", "timestamp_unit", "order_column", "label_column", "label_threshold",
    "label_range", "weight_column", "context_columns", "on_bad_rows", "max_future_days",
}  # fmt: skip
"""Settings on which the content of a part depends. After a change of other settings, the parts are still reused."""


def gather_parts(
    engine: LogEngine,
    config: InteractionsConfig,
    log: InteractionsInput,
    output_folder: Path,
    *,
    continued_manifest: InteractionsManifest | None,
) -> tuple[tuple[LogPart, ...], tuple[Source, ...]]:
    """Reuse the valid parts of the run that is continued, and read all other files into one new part.

    Returns:
        The parts with the events of all input files, and the files that were read.
    """
    (output_folder / "parts").mkdir()
    settings_fingerprint = _settings_fingerprint(engine, config, log)
    parts = []
    for part in continued_manifest.parts if continued_manifest else ():
        if (
            part.settings_fingerprint == settings_fingerprint
            and _is_mostly_current(part, log.split_code_by_file)
            and not _has_dropped_future_rows(part)
        ):
            assert continued_manifest is not None
            _link_part(continued_manifest, part, output_folder)
            parts.append(part)
    reused_records = {file.source for part in parts for file in part.files}
    new_sources = tuple(source for source in log.sources if source.record not in reused_records)
    for source in new_sources if continued_manifest else ():
        if source.table is not None:
            logger.info(
                "%s: this version of the table is new, so all its rows are read; the row numbers of the ids do not change",
                source.name,
            )
    if new_sources:
        part_name = fingerprint_of(settings_fingerprint, [source.record for source in new_sources])[:16]
        part_path = output_folder / "parts" / f"{part_name}.parquet"
        files = read_part(engine, config, sources=new_sources, part_path=part_path)
        parts.append(LogPart(file_name=f"parts/{part_path.name}", settings_fingerprint=settings_fingerprint, files=files))
    return tuple(parts), new_sources


def _link_part(manifest: InteractionsManifest, part: LogPart, output_folder: Path) -> None:
    """Link the file of a part, or the files in its folder. Runs can share a part, because a part never changes."""
    for file_name in manifest.files:
        if file_name == part.file_name or file_name.startswith(f"{part.file_name}/"):
            (output_folder / file_name).parent.mkdir(exist_ok=True)
            link_or_copy(manifest.path(file_name), output_folder / file_name)


def _settings_fingerprint(engine: LogEngine, config: InteractionsConfig, log: InteractionsInput) -> str:
    """Return the fingerprint of the engine and of the settings on which the content of a part depends."""
    type_by_hive_key = {
        key: str(data_type) for key, data_type in log.sources[0].partition_types.items() if key in config.columns
    }
    validation_unit = None
    # With a validation share, a part has the column `draw`, whose values depend on the unit.
    if isinstance(config.split, FileSplit) and config.split.validation_share > 0:
        validation_unit = config.split.validation_unit
    settings = PART_SETTINGS | ({"explicit_negatives"} if config.explicit_negatives else set())
    return fingerprint_of(engine.version, config.model_dump(mode="json", include=settings), validation_unit, type_by_hive_key)


def _is_mostly_current(part: LogPart, input_files: Collection[SourceFile]) -> bool:
    """Return whether at least half of the rows of `part` come from files that are still input files and have not changed."""
    num_rows = sum(file.source.num_rows for file in part.files)
    return 2 * sum(file.source.num_rows for file in part.files if file.source in input_files) >= num_rows


def _has_dropped_future_rows(part: LogPart) -> bool:
    """Return whether rows with a time in the future were dropped. These rows may be valid by now."""
    return any(check_name.endswith(FUTURE_REASON) for file in part.files for check_name in file.num_bad_rows_by_reason)


def read_part(
    engine: LogEngine, config: InteractionsConfig, *, sources: Sequence[Source], part_path: Path
) -> tuple[IngestedFile, ...]:
    """Verify the files, and write their events to `part_path`. Return the manifest entry of each file.

    Raises:
        InputError: damaged files, bad rows (see config.on_bad_rows), and files whose content contradicts their footer.
    """
    type_by_column = {
        column: _type_for_checks([require_column(source, column, setting="interactions") for source in sources])
        for column in config.columns
    }
    checksum_flags = [source.table is None and has_page_checksums(source, config.columns) for source in sources]
    for source, has_checksums in zip(sources, checksum_flags, strict=True):
        if source.is_local and has_checksums:  # pages of remote files are verified while they are copied
            verify_pages(source, config.columns)
    with local_files(sources, columns=config.columns, scratch_folder=part_path.with_suffix(".remote")) as paths:
        statistics_per_file = engine.read_part(LogFiles(sources, paths, type_by_column), part_path=part_path)
    return tuple(
        _ingested_file(config, source, file_statistics, has_checksums=has_checksums)
        for source, file_statistics, has_checksums in zip(sources, statistics_per_file, checksum_flags, strict=True)
    )


def _ingested_file(
    config: InteractionsConfig, source: Source, file_statistics: FileStatistics, *, has_checksums: bool
) -> IngestedFile:
    column_by_role, num_good_rows = columns_by_role(config), file_statistics.num_rows - file_statistics.num_bad_rows
    return IngestedFile(
        source=source.record,
        num_bad_rows_by_reason=dict(file_statistics.num_bad_rows_by_check),
        num_below_threshold=num_good_rows - file_statistics.num_events if config.label_column else 0,
        spans={column_by_role[role]: bounds for role, bounds in file_statistics.bounds_by_role.items()},
        has_checksums=has_checksums,
    )


def _type_for_checks(data_types: Sequence[pa.DataType]) -> pa.DataType:
    """Return one type for a column whose type differs between files.

    The SQL of the row checks and of the event order is written for this type, and is also correct for the other types.

    >>> _type_for_checks([pa.int64(), pa.float64(), pa.float32()])
    DataType(float)
    """
    return next((data_type for is_type in _TYPE_TESTS for data_type in data_types if is_type(data_type)), data_types[0])


_TYPE_TESTS: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_float16,  # first, because a limit on labels is rounded to the lowest precision of all files
    pa.types.is_float32,
    pa.types.is_floating,
    lambda data_type: pa.types.is_decimal(data_type) and not is_whole_decimal(data_type),
    pa.types.is_uint64,
    is_whole_decimal,
)
"""Tests for numeric types, by priority. `_type_for_checks` returns the type that passes the earliest test."""
