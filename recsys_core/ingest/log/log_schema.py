"""Schema check of the interaction log: files, columns and types. It reads only parquet footers, or the schemas of tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from recsys_core.errors import InputError
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine_settings import SparkSettings
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.manifests import SPLITS, IdType, SourceFile
from recsys_core.parquet.columns import id_type, require_column, require_same_type_in_files, require_unambiguous_case
from recsys_core.parquet.guards import check_expansion
from recsys_core.parquet.sources import Source, check_distinct_files, open_sources, reject_copies


@dataclass(frozen=True)
class InteractionsInput:
    """The files of the log, with checked schemas."""

    sources_by_split: Mapping[str, tuple[Source, ...]]
    """The files by the name of their split. All files are in "train" unless the log is split by files."""
    user_id_type: IdType
    item_id_type: IdType

    @property
    def sources(self) -> tuple[Source, ...]:
        """All files."""
        return tuple(source for sources in self.sources_by_split.values() for source in sources)

    @property
    def split_code_by_file(self) -> dict[SourceFile, int]:
        """Code of the split of each file. All codes are 0 unless the log is split by files."""
        return {source.record: SPLITS.index(split) for split, sources in self.sources_by_split.items() for source in sources}


def open_interactions(config: InteractionsConfig, *, allowed_data_root: Path | None = None) -> InteractionsInput:
    """Open the files of the log. Raise InputError for a missing, invalid or copied file, or an unsuitable column."""
    sources_by_split = _open_sources(config, allowed_data_root=allowed_data_root)
    all_sources = tuple(source for sources in sources_by_split.values() for source in sources)
    locations = [source.location for source in all_sources]
    check_distinct_files(locations, setting=f"interactions, {' and '.join(sources_by_split)}")
    for sources in sources_by_split.values():
        reject_copies(sources, setting="interactions")
    user_id_type = id_type(all_sources, config.user_column, setting="interactions.user_column")
    item_id_type = id_type(all_sources, config.item_column, setting="interactions.item_column")
    if config.timestamp_column is not None:
        _check_timestamps(all_sources, config.timestamp_column)
    for source in all_sources:
        _check_column_names(source, config)
        _check_number_columns(source, config)
    if config.order_column is not None:
        _check_order_types(all_sources, config.order_column)
    for column in config.context_columns:
        require_same_type_in_files(all_sources, column, setting="interactions.context_columns")
    for column in config.columns:
        _reject_mixed_key_and_column(all_sources, column)
    check_expansion(
        all_sources,
        columns=config.columns,
        max_expansion_ratio=config.max_expansion_ratio,
        setting="interactions.max_expansion_ratio",
        count_text_bytes=False,
    )
    return InteractionsInput(sources_by_split, user_id_type, item_id_type)


def _open_sources(config: InteractionsConfig, *, allowed_data_root: Path | None) -> dict[str, tuple[Source, ...]]:
    """Open the files or tables of each split."""
    paths_by_split = {"train": config.paths}
    if isinstance(config.split, FileSplit):
        if config.split.validation_paths is not None:
            paths_by_split["validation"] = config.split.validation_paths
        paths_by_split["test"] = config.split.test_paths
    setting_by_split = {
        split: "interactions.paths" if split == "train" else f"interactions.split.{split}_paths" for split in paths_by_split
    }
    if config.format == "parquet":
        return {
            split: open_sources(paths, setting=setting_by_split[split], allowed_data_root=allowed_data_root)
            for split, paths in paths_by_split.items()
        }
    assert isinstance(config.engine, SparkSettings)  # see the validator of the config
    sources_in_split_order = config.engine.open_tables(
        config.format,
        {setting_by_split[split]: paths for split, paths in paths_by_split.items()},
        columns=config.columns,
        allowed_data_root=allowed_data_root,
    )
    return dict(zip(paths_by_split, sources_in_split_order, strict=True))


def _check_timestamps(sources: Sequence[Source], column: str) -> None:
    """Require one kind of time in all files.

    With several kinds, DuckDB fails, or converts local times to UTC by the time zone of this machine.
    """
    for source in sources:
        data_type = require_column(source, column, setting="interactions.timestamp_column")
        is_time = pa.types.is_timestamp(data_type) or pa.types.is_date(data_type) or pa.types.is_integer(data_type)
        _require_type(is_time, source, column, data_type, "a timestamp, a date or an integer")
    require_same_type_in_files(sources, column, setting="interactions.timestamp_column", family=_time_family)


def _time_family(data_type: pa.DataType) -> str:
    """Return the family of a time type. Files may have different types of one family."""
    if pa.types.is_integer(data_type):
        return "integer"
    return "with time zone" if pa.types.is_timestamp(data_type) and data_type.tz is not None else "without time zone"


def _check_column_names(source: Source, config: InteractionsConfig) -> None:
    require_unambiguous_case(source, config.columns)
    for name in source.schema.names:
        if name.lower() in ("file_index", "file_row_number"):
            raise InputError(f"{source.name}: column {name!r} has a name that DuckDB reserves for row numbers; rename it")


def _reject_mixed_key_and_column(sources: Sequence[Source], column: str) -> None:
    """Raise InputError if `column` is a hive key in the paths of some files, and a column of other files.

    The files of one `paths` setting have the same hive keys, but test files may have other keys than training files.
    """
    key_source = next((source for source in sources if column not in source.schema.names), None)
    column_source = next((source for source in sources if column not in source.partition_values), None)
    if key_source is not None and column_source is not None:
        raise InputError(
            f"{column_source.name}: {column!r} is a column of the file, but in {key_source.name} it is a key in a folder name; "
            "write it as a column to all files, or move all files to such folders"
        )


def _check_number_columns(source: Source, config: InteractionsConfig) -> None:
    for setting in ("order_column", "label_column", "weight_column"):
        column = getattr(config, setting)
        if column is not None:
            data_type = require_column(source, column, setting=f"interactions.{setting}")
            is_number = pa.types.is_integer(data_type) or pa.types.is_floating(data_type) or pa.types.is_decimal(data_type)
            _require_type(is_number or pa.types.is_boolean(data_type), source, column, data_type, "a number")


def _check_order_types(sources: Sequence[Source], column: str) -> None:
    """Raise InputError if some files have float32 and other files exact numbers, which DuckDB would round to float32."""
    type_by_source = {source: require_column(source, column, setting="interactions.order_column") for source in sources}
    narrow_source = next((source for source, data_type in type_by_source.items() if _is_narrow_float(data_type)), None)
    exact_source = next((source for source, data_type in type_by_source.items() if not pa.types.is_floating(data_type)), None)
    if narrow_source is not None and exact_source is not None:
        narrow_type, exact_type = type_by_source[narrow_source], type_by_source[exact_source]
        raise InputError(
            f"{narrow_source.name}: column {column!r} is {narrow_type}, but {exact_type} in {exact_source.name}; numbers above "
            f"{2**24:,} would be rounded, so events would change their order; write one type in all files"
        )


def _is_narrow_float(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_float32(data_type) or pa.types.is_float16(data_type))


def _require_type(is_expected_type: bool, source: Source, column: str, data_type: pa.DataType, expected_type: str) -> None:
    if not is_expected_type:
        raise InputError(f"{source.name}: column {column!r} is {data_type}, but has to be {expected_type}; cast it")
