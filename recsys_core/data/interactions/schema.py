"""What the footers say about the interaction log, checked before a row of it is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from recsys_core.data.interactions.config import SPLITS, GivenSplit, InteractionsConfig
from recsys_core.errors import InputError
from recsys_core.manifests import IdType, SourceFile
from recsys_core.parquet.columns import id_type, require_column, require_same_types
from recsys_core.parquet.guards import check_expansion, require_sidecars
from recsys_core.parquet.sources import Source, check_distinct_files, open_sources


@dataclass(frozen=True)
class InteractionsInput:
    """What the footers say about the log, checked. `given` holds the files of each split; one entry where nightjar splits."""

    given: Mapping[str, tuple[Source, ...]]
    user_id_type: IdType
    item_id_type: IdType

    @property
    def sources(self) -> tuple[Source, ...]:
        """All files."""
        return tuple(source for group in self.given.values() for source in group)

    @property
    def splits(self) -> dict[SourceFile, int]:
        """Code of the split that each file is given for; 0 where nightjar splits."""
        return {source.record: SPLITS.index(name) for name, group in self.given.items() for source in group}


def check_interactions(config: InteractionsConfig, *, data_root: Path | None = None) -> InteractionsInput:
    """Checks files, columns and types without reading a row; raises InputError."""
    given = {"train": open_sources(config.paths, setting="interactions.paths", data_root=data_root)}
    if isinstance(config.split, GivenSplit):
        if config.split.validation is not None:
            given["validation"] = open_sources(
                config.split.validation, setting="interactions.split.validation", data_root=data_root
            )
        given["test"] = open_sources(config.split.test, setting="interactions.split.test", data_root=data_root)
    found = tuple(source for group in given.values() for source in group)
    if config.checksums == "sidecar":
        require_sidecars(found)
    _refuse_twice(given)
    users = id_type(found, config.user_column, setting="interactions.user_column")
    items = id_type(found, config.item_column, setting="interactions.item_column")
    if config.timestamp_column is not None:
        _check_times(found, config.timestamp_column)
    for source in found:
        _refuse_ambiguous_case(source, config)
        for setting in ("order_column", "label_column", "weight_column"):
            column = getattr(config, setting)
            if column is not None:
                kind = require_column(source, column, setting=f"interactions.{setting}")
                number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
                _require(number or pa.types.is_boolean(kind), source, column, kind, "a number")
    require_same_types(found, config.context_columns)
    check_expansion(
        found,
        columns=config.columns,
        max_expansion_ratio=config.max_expansion_ratio,
        setting="interactions.max_expansion_ratio",
        texts=False,
    )
    return InteractionsInput(given, users, items)


def _refuse_twice(given: Mapping[str, Sequence[Source]]) -> None:
    owner: dict[str, str] = {}
    for name, group in given.items():
        for source in group:
            other = owner.setdefault(source.name, name)
            if other != name:
                raise InputError(f"{source.name}: given for {other} and for {name}; a test on what was trained on says nothing")
    locations = [source.location for group in given.values() for source in group]
    check_distinct_files(locations, setting=f"interactions, {' and '.join(given)}")


def _check_times(sources: Sequence[Source], column: str) -> None:
    """One clock in all files: DuckDB would read a mixture by the zone of the machine, or not at all."""
    clocks = {}
    for source in sources:
        kind = require_column(source, column, setting="interactions.timestamp_column")
        fits = pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_integer(kind)
        _require(fits, source, column, kind, "a timestamp, a date or an integer")
        zoned = pa.types.is_timestamp(kind) and kind.tz is not None
        clocks[source.name] = "integer" if pa.types.is_integer(kind) else "with zone" if zoned else "without zone"
        if clocks[source.name] != clocks[sources[0].name]:
            first = require_column(sources[0], column, setting="interactions.timestamp_column")
            raise InputError(f"{source.name}: column {column!r} is {kind}, but {first} in {sources[0].name}; write one type")


def _refuse_ambiguous_case(source: Source, config: InteractionsConfig) -> None:
    """DuckDB's names know no case: of ID and id it would read the first, whichever is meant; two names are its own."""
    for column in config.columns:
        same = [name for name in source.schema.names if name.lower() == column.lower()]
        if len(same) > 1:
            raise InputError(f"{source.name}: columns {same} differ by case alone; rename all but {column!r}")
    for name in source.schema.names:
        if name.lower() in ("file_index", "file_row_number"):
            raise InputError(f"{source.name}: a column cannot be called {name!r}: rows are counted under that name; rename it")


def _require(fits: bool, source: Source, column: str, kind: pa.DataType, wanted: str) -> None:
    if not fits:
        raise InputError(f"{source.name}: column {column!r} is {kind}, but has to be {wanted}; cast it")
