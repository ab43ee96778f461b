"""Schema check of pretrained vectors: files, columns, types and dimensions, from the parquet footers alone."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from recsys_core.errors import InputError, shown_names
from recsys_core.ingest.vectors.config import AnyEmbeddings, EmbeddingsConfig
from recsys_core.manifests import IdType
from recsys_core.parquet.columns import id_type, is_list, require_column, require_equal_types
from recsys_core.parquet.guards import check_expansion
from recsys_core.parquet.sources import Source, open_sources


@dataclass(frozen=True)
class VectorFiles:
    """The files of one entry of the config list `embeddings`, with checked schemas."""

    config: EmbeddingsConfig
    setting: str
    """Config key of the entry, for messages."""
    sources: tuple[Source, ...]
    columns: tuple[str, ...]
    """The list column, or the column of each dimension."""
    source_id_type: IdType
    """Type of the ids in `sources`, before the id map."""
    id_map_sources: tuple[Source, ...]
    id_type: IdType
    """Type of the ids after the id map."""

    @property
    def num_rows(self) -> int:
        """Number of rows of all files."""
        return sum(source.record.num_rows for source in self.sources)

    @property
    def source_dim(self) -> int | None:
        """Width of the vectors in the files; None if the schema does not determine it."""
        if self.config.vector_column is None:
            return len(self.columns)
        data_type = self.sources[0].schema.field(self.columns[0]).type
        return int(data_type.list_size) if pa.types.is_fixed_size_list(data_type) else None

    @property
    def dim(self) -> int | None:
        """Width of the vectors in the result of the stage; None if neither the config nor the schema determines it."""
        return self.config.pca_dim or self.source_dim


def open_embeddings(configs: Sequence[AnyEmbeddings], *, allowed_data_root: Path | None = None) -> tuple[VectorFiles, ...]:
    """Open the vector files of all entries. An entry for vectors from the log has no files.

    Raise InputError for a missing or invalid file, or for a missing or unsuitable column.
    """
    settings = ["embeddings"] if len(configs) == 1 else [f"embeddings.{index}" for index in range(len(configs))]
    entries = tuple(
        _open_entry(config, setting=setting, allowed_data_root=allowed_data_root)
        for config, setting in zip(configs, settings, strict=True)
        if config.source == "parquet"
    )
    first_entry_by_table: dict[str, VectorFiles] = {}
    for entry in entries:
        first_entry = first_entry_by_table.setdefault(entry.config.table, entry)
        require_equal_types(
            entry.id_type,
            subject=f"the id of {entry.setting}",
            other_type=first_entry.id_type,
            other_subject=f"the id of {first_entry.setting} for the same table, {entry.config.table!r},",
        )
        if entry.dim and first_entry.dim:
            require_one_dim(entry, entry.dim, other_entry=first_entry, other_dim=first_entry.dim)
    return entries


def require_one_dim(entry: VectorFiles, dim: int, *, other_entry: VectorFiles, other_dim: int) -> None:
    """Raise InputError if two entries of one table have vectors of different widths after the projection."""
    if dim != other_dim:
        raise InputError(
            f"{entry.setting}: the vectors have the width {dim}, but the vectors of {other_entry.setting} for the same table, "
            f"{entry.config.table!r}, have the width {other_dim}; set pca_dim of both entries to the same value"
        )


def check_pca_dim(entry: VectorFiles, source_dim: int) -> None:
    """Raise InputError if pca_dim is larger than the width of the vectors in the files."""
    if entry.config.pca_dim and entry.config.pca_dim > source_dim:
        raise InputError(
            f"{entry.setting}.pca_dim is {entry.config.pca_dim}, but the vectors of {entry.sources[0].name} have the width "
            f"{source_dim}; set it to at most {source_dim}, or remove it"
        )


def _open_entry(config: EmbeddingsConfig, *, setting: str, allowed_data_root: Path | None) -> VectorFiles:
    sources = open_sources(config.paths, setting=f"{setting}.paths", allowed_data_root=allowed_data_root)
    source_id_type = _id_type(sources, config.id_column, setting=f"{setting}.id_column")
    columns = _vector_columns(sources[0], config, setting=setting)
    for source in sources[1:]:
        source_columns = _vector_columns(source, config, setting=setting)
        if source_columns != columns:
            raise InputError(
                f"{source.name}: the vectors have {len(source_columns)} columns ({source_columns[0]} to {source_columns[-1]}), "
                f"but the vectors of {sources[0].name} have {len(columns)} ({columns[0]} to {columns[-1]}); write the same "
                "columns to every file"
            )
    _require_same_vector_types(sources, columns)
    check_expansion(
        sources,
        columns=(config.id_column, *columns),
        max_expansion_ratio=config.max_expansion_ratio,
        setting=f"{setting}.max_expansion_ratio",
    )
    id_map_sources: tuple[Source, ...] = ()
    target_id_type = source_id_type
    if config.id_map is not None:
        id_map_sources = open_sources(
            config.id_map.paths, setting=f"{setting}.id_map.paths", allowed_data_root=allowed_data_root
        )
        from_column = config.id_map.from_column
        require_equal_types(
            _id_type(id_map_sources, from_column, setting=f"{setting}.id_map.from_column"),
            subject=f"{id_map_sources[0].name}: column {from_column!r}",
            other_type=source_id_type,
            other_subject=f"column {config.id_column!r} of {sources[0].name}",
        )
        target_id_type = _id_type(id_map_sources, config.id_map.to_column, setting=f"{setting}.id_map.to_column")
    entry = VectorFiles(config, setting, sources, columns, source_id_type, id_map_sources, target_id_type)
    if entry.source_dim:
        check_pca_dim(entry, entry.source_dim)
    return entry


def _id_type(sources: Sequence[Source], column: str, *, setting: str) -> IdType:
    """Return the type of the ids in `column`. Raise InputError if a file does not have the column, or has it as a hive key."""
    ids_type = id_type(sources, column, setting=setting)
    for source in sources:
        if column not in source.schema.names:
            raise InputError(
                f"{source.name}: {column!r} ({setting}) is a key in a folder name, so all rows have the same id; write the ids "
                "as a column of the file"
            )
    return ids_type


def _require_same_vector_types(sources: Sequence[Source], columns: Sequence[str]) -> None:
    """Require one vector type in all files, because different types suggest that the vectors come from different models."""
    first_source = sources[0]
    for source in sources[1:]:
        for column in columns:
            data_type, first_type = source.schema.field(column).type, first_source.schema.field(column).type
            if _element_type_and_length(data_type) != _element_type_and_length(first_type):
                raise InputError(
                    f"{source.name}: column {column!r} is {data_type}, but {first_type} in {first_source.name}; "
                    "write one type in all files"
                )


def _element_type_and_length(data_type: pa.DataType) -> tuple[str, int | None]:
    """Return the type of the numbers and the list length, which have to be equal in all files."""
    if pa.types.is_floating(data_type):
        return str(data_type), None
    return str(data_type.value_type), data_type.list_size if pa.types.is_fixed_size_list(data_type) else None


def _vector_columns(source: Source, config: EmbeddingsConfig, *, setting: str) -> tuple[str, ...]:
    """Return the list column, or the columns of the dimensions in the order of their numbers."""
    if config.vector_column is not None:
        data_type = require_column(source, config.vector_column, setting=f"{setting}.vector_column")
        if not is_list(data_type) or not pa.types.is_floating(data_type.value_type):
            raise InputError(
                f"{source.name}: column {config.vector_column!r} is {data_type}, but a vector is a list of floats; "
                f"cast it, or set {setting}.dimension_prefix for one column per dimension"
            )
        return (config.vector_column,)
    columns = _numbered_columns(source, config.dimension_prefix or "", setting=f"{setting}.dimension_prefix")
    for name in columns:
        data_type = source.schema.field(name).type
        if not pa.types.is_floating(data_type):
            raise InputError(f"{source.name}: column {name!r} is {data_type}, but a dimension is a float; cast it")
    return columns


def _numbered_columns(source: Source, prefix: str, *, setting: str) -> tuple[str, ...]:
    """Return the columns named `prefix` and a number, such as dim_0, sorted by number. The numbers have to be consecutive."""
    name_by_number: dict[int, str] = {}
    for name in source.schema.names:
        match = re.fullmatch(re.escape(prefix) + r"([0-9]{1,9})", name)
        if match is None:
            continue
        number = int(match[1])
        if number in name_by_number:
            raise InputError(
                f"{source.name}: columns {name_by_number[number]!r} and {name!r} are both dimension {number}; keep one of them"
            )
        name_by_number[number] = name
    if not name_by_number:
        raise InputError(
            f"{source.name}: no column name consists of {prefix!r} and a number ({setting}); it has "
            f"{shown_names(source.schema.names, max_names=20)}"
        )
    first_number, last_number = min(name_by_number), max(name_by_number)
    missing_number = next((number for number in range(first_number, last_number) if number not in name_by_number), None)
    if missing_number is not None:
        raise InputError(
            f"{source.name}: column {prefix}{missing_number} is missing between {prefix}{first_number} and "
            f"{prefix}{last_number}; add it"
        )
    return tuple(name_by_number[number] for number in sorted(name_by_number))
