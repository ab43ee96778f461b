"""Parquet files of vectors before a row is read: which columns, which types, which dimension."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from recsys_core.data.embeddings.config import EmbeddingsConfig
from recsys_core.errors import InputError
from recsys_core.manifests import IdType
from recsys_core.parquet.columns import id_type, require_column
from recsys_core.parquet.guards import check_expansion, require_sidecars
from recsys_core.parquet.sources import Source, open_sources


@dataclass(frozen=True)
class VectorFiles:
    """What the footers say about one entry of `embeddings`, checked."""

    config: EmbeddingsConfig
    setting: str
    """Config key of the entry, for messages."""
    sources: tuple[Source, ...]
    columns: tuple[str, ...]
    source_id_type: IdType
    """Of the ids that stand beside the vectors; with an id map they are another domain's."""
    id_map: tuple[Source, ...]
    id_type: IdType

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(source.record.rows for source in self.sources)

    @property
    def source_dim(self) -> int | None:
        """Length of the vectors as they come, where the schema tells it."""
        if self.config.vector_column is None:
            return len(self.columns)
        kind = self.sources[0].schema.field(self.columns[0]).type
        return int(kind.list_size) if pa.types.is_fixed_size_list(kind) else None

    @property
    def dim(self) -> int | None:
        """Length of the vectors as they are kept, where the config or the schema tells it."""
        return self.config.pca_dim or self.source_dim


def check_embeddings(configs: Sequence[EmbeddingsConfig], *, data_root: Path | None = None) -> tuple[VectorFiles, ...]:
    """Checks files, columns and types of all entries without reading a row; raises InputError."""
    keys = ["embeddings"] if len(configs) == 1 else [f"embeddings.{index}" for index in range(len(configs))]
    found = tuple(_check_entry(config, setting=key, data_root=data_root) for config, key in zip(configs, keys, strict=True))
    first: dict[str, VectorFiles] = {}
    for files in found:
        before = first.setdefault(files.config.table, files)
        if files.id_type != before.id_type:
            raise InputError(
                f"{files.setting}: the ids are {files.id_type}, but those of {before.setting} for the same table, "
                f"{files.config.table!r}, are {before.id_type}; write both as one type"
            )
        if files.dim and before.dim:
            require_one_dim(files, files.dim, before=before, before_dim=before.dim)
    return found


def require_one_dim(files: VectorFiles, dim: int, *, before: VectorFiles, before_dim: int) -> None:
    """InputError unless two entries of one table end in vectors of the same length."""
    if dim != before_dim:
        raise InputError(
            f"{files.setting}: the vectors end in {dim} numbers, but those of {before.setting} for the same table, "
            f"{files.config.table!r}, in {before_dim}; set pca_dim of both to the same"
        )


def _check_entry(config: EmbeddingsConfig, *, setting: str, data_root: Path | None) -> VectorFiles:
    sources = open_sources(config.paths, setting=f"{setting}.paths", data_root=data_root)
    if config.checksums == "sidecar":
        require_sidecars(sources)
    source_ids = id_type(sources, config.id_column, setting=f"{setting}.id_column")
    columns = _vector_columns(sources[0], config, setting=setting)
    for source in sources[1:]:
        others = _vector_columns(source, config, setting=setting)
        if others != columns:
            raise InputError(
                f"{source.name}: the vectors are {len(others)} columns, {others[0]} to {others[-1]}, but {len(columns)}, "
                f"{columns[0]} to {columns[-1]}, in {sources[0].name}; give every file the same columns"
            )
    _refuse_mixed_types(sources, columns)
    check_expansion(
        sources,
        columns=(config.id_column, *columns),
        max_expansion_ratio=config.max_expansion_ratio,
        setting=f"{setting}.max_expansion_ratio",
    )
    id_map: tuple[Source, ...] = ()
    ids = source_ids
    if config.id_map is not None:
        id_map = open_sources(config.id_map.paths, setting=f"{setting}.id_map.paths", data_root=data_root)
        if config.checksums == "sidecar":
            require_sidecars(id_map)
        keys = id_type(id_map, config.id_map.from_column, setting=f"{setting}.id_map.from_column")
        ids = id_type(id_map, config.id_map.to_column, setting=f"{setting}.id_map.to_column")
        if keys != source_ids:
            raise InputError(
                f"{id_map[0].name}: column {config.id_map.from_column!r} is {keys}, but the ids beside the vectors are "
                f"{source_ids} in {sources[0].name}; write both as one type"
            )
    files = VectorFiles(config, setting, sources, columns, source_ids, id_map, ids)
    if config.pca_dim and files.source_dim and config.pca_dim > files.source_dim:
        refuse_wider(files, files.source_dim)
    return files


def refuse_wider(files: VectorFiles, dim: int) -> None:
    """A projection makes vectors shorter."""
    raise InputError(
        f"{files.setting}.pca_dim is {files.config.pca_dim}, but the vectors of {files.sources[0].name} have {dim} numbers; "
        f"set it to at most {dim}, or leave it out"
    )


def _refuse_mixed_types(sources: Sequence[Source], columns: Sequence[str]) -> None:
    """A column that is float in one file and double in another comes from two writers: it may mean two models."""
    first = sources[0]
    for source in sources[1:]:
        for column in columns:
            kind, other = source.schema.field(column).type, first.schema.field(column).type
            if _number_and_length(kind) != _number_and_length(other):
                raise InputError(f"{source.name}: column {column!r} is {kind}, but {other} in {first.name}; write one type")


def _number_and_length(kind: pa.DataType) -> tuple[str, int | None]:
    """What has to be the same in every file; whether a list's offsets are wide or its fields named otherwise is no matter."""
    if pa.types.is_floating(kind):
        return str(kind), None
    return str(kind.value_type), kind.list_size if pa.types.is_fixed_size_list(kind) else None


def _vector_columns(source: Source, config: EmbeddingsConfig, *, setting: str) -> tuple[str, ...]:
    """The list column, or the columns of the single dimensions in order of their number."""
    if config.vector_column is not None:
        kind = require_column(source, config.vector_column, setting=f"{setting}.vector_column")
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not pa.types.is_floating(kind.value_type):
            raise InputError(
                f"{source.name}: column {config.vector_column!r} is {kind}, but a vector is a list of floats; "
                f"cast it, or set {setting}.dimension_prefix for one column per dimension"
            )
        return (config.vector_column,)
    prefix = config.dimension_prefix or ""
    numbered: dict[int, str] = {}
    for match in (re.fullmatch(re.escape(prefix) + r"([0-9]{1,9})", name) for name in source.schema.names):
        if match is not None and int(match[1]) in numbered:
            raise InputError(
                f"{source.name}: columns {numbered[int(match[1])]!r} and {match[0]!r} are both dimension {int(match[1])}; "
                "keep one of them"
            )
        if match is not None:
            numbered[int(match[1])] = match[0]
    if not numbered:
        raise InputError(f"{source.name}: no column is {prefix!r} and a number; it has {source.schema.names[:20]}")
    first = min(numbered)
    gaps = [number for number in range(first, first + len(numbered)) if number not in numbered]
    if gaps:
        raise InputError(
            f"{source.name}: column {prefix}{gaps[0]} is missing between {prefix}{first} and {prefix}{max(numbered)}"
        )
    for name in numbered.values():
        if not pa.types.is_floating(source.schema.field(name).type):
            raise InputError(f"{source.name}: column {name!r} is {source.schema.field(name).type}, but a dimension is a float")
    return tuple(numbered[number] for number in sorted(numbered))
