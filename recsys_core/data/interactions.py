"""Stage `interactions`: the log from parquet into vocabularies and a CSR event store, out of core in DuckDB."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.data.config import GivenSplit, InteractionsConfig
from recsys_core.data.log_table import SPLITS, check_log, load_log, quoted
from recsys_core.data.sources import Source, id_type, literal, open_sources, require_column
from recsys_core.errors import InputError
from recsys_core.manifests import EmbeddingsManifest, IdType, InteractionsManifest, fingerprint_of, produce

BATCH_ROWS = 1_000_000
DAMAGED = (duckdb.Error, duckdb.IOException, duckdb.InvalidInputException)
"""What a damaged file ends in (the base class itself: a broken page header); their other subclasses are our mistakes."""


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


def check_interactions(config: InteractionsConfig) -> InteractionsInput:
    """Checks files, columns and types without reading a row; raises InputError."""
    given = {"train": open_sources(config.paths, setting="interactions.paths")}
    if isinstance(config.split, GivenSplit):
        if config.split.validation is not None:
            given["validation"] = open_sources(config.split.validation, setting="interactions.split.validation")
        given["test"] = open_sources(config.split.test, setting="interactions.split.test")
    found = tuple(source for group in given.values() for source in group)
    users = id_type(found, config.user_column, setting="interactions.user_column")
    items = id_type(found, config.item_column, setting="interactions.item_column")
    if config.timestamp_column is not None:
        _check_times(found, config.timestamp_column)
    for source in found:
        _refuse_ambiguous_case(source, config)
        for column, setting in ((config.order_column, "order_column"), (config.label_column, "label_column")):
            if column is not None:
                kind = require_column(source, column, setting=f"interactions.{setting}")
                number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
                _require(number or pa.types.is_boolean(kind), source, column, kind, "a number")
    return InteractionsInput(given, users, items)


def _check_times(sources: Sequence[Source], column: str) -> None:
    """One clock in all files: DuckDB would read a mixture by the zone of the machine, or not at all."""
    clocks = {}
    for source in sources:
        kind = require_column(source, column, setting="interactions.timestamp_column")
        fits = pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_integer(kind)
        _require(fits, source, column, kind, "a timestamp, a date or an integer")
        zoned = pa.types.is_timestamp(kind) and kind.tz is not None
        clocks[source] = "integer" if pa.types.is_integer(kind) else "with zone" if zoned else "without zone"
        if clocks[source] != clocks[sources[0]]:
            first = sources[0].schema.field(column).type
            raise InputError(f"{source.path}: column {column!r} is {kind}, but {first} in {sources[0].path}; write one type")


def _refuse_ambiguous_case(source: Source, config: InteractionsConfig) -> None:
    """DuckDB's names know no case: of ID and id it would read the first, whichever is meant."""
    for column in config.columns:
        same = [name for name in source.schema.names if name.lower() == column.lower()]
        if len(same) > 1:
            raise InputError(f"{source.path}: columns {same} differ by case alone; rename all but {column!r}")


def _require(fits: bool, source: Source, column: str, kind: pa.DataType, wanted: str) -> None:
    if not fits:
        raise InputError(f"{source.path}: column {column!r} is {kind}, but has to be {wanted}; cast it")


def ingest_interactions(
    config: InteractionsConfig, *, embeddings: EmbeddingsManifest | None, folder: Path
) -> InteractionsManifest:
    """The vocabularies and the event store that InteractionsManifest describes.

    DuckDB reads, splits, counts and sorts within config.memory_limit and spills to the stage's own folder; what it returns
    streams into memory maps. The result does not depend on the number of threads.

    Raises InputError for null ids or times, ids of another type than the vectors', vectors of none of the items, and a split
    that leaves nothing to train on or to test with.
    """
    found = check_interactions(config)
    vectors = embeddings.tables.get("item") if embeddings is not None else None
    if vectors is not None and vectors.id_type != found.item_id_type:
        raise InputError(
            f"{found.sources[0].path}: column {config.item_column!r} is {found.item_id_type}, but the ids of the vectors are "
            f"{vectors.id_type}; write both as one type"
        )
    records = tuple(source.record for source in found.sources)

    def build(out: Path) -> dict[str, Any]:
        spill = out / "spill"
        settings: dict[str, Any] = {"memory_limit": config.memory_limit, "temp_directory": str(spill)}
        if config.threads is not None:
            settings["threads"] = config.threads
        try:
            with duckdb.connect(config=settings) as connection:
                facts = _ingest(connection, config, found, embeddings, out)
        except duckdb.OutOfMemoryException as error:
            raise InputError(
                f"interactions.memory_limit is {config.memory_limit}, which is too little: {str(error).splitlines()[0]}"
            ) from error
        except duckdb.Error as error:
            if type(error) not in DAMAGED:
                raise
            raise InputError(f"interactions: {str(error).splitlines()[0]}") from error
        if spill.exists():
            spill.rmdir()
        return facts | {"sources": records, "user_id_type": found.user_id_type, "item_id_type": found.item_id_type}

    fingerprint = fingerprint_of("interactions", config, embeddings, records)
    return produce(folder, InteractionsManifest, fingerprint=fingerprint, build=build)


def _ingest(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    found: InteractionsInput,
    embeddings: EmbeddingsManifest | None,
    out: Path,
) -> dict[str, Any]:
    dropped = load_log(connection, config, given=found.given, types=(found.user_id_type, found.item_id_type))
    facts = check_log(connection, config, first_file=str(found.sources[0].path))
    users = _vocabulary(connection, "user", vectors=None)
    has_vectors = embeddings is not None and "item" in embeddings.tables
    items = _vocabulary(connection, "item", vectors=embeddings if has_vectors else None)
    if embeddings is not None and has_vectors and not items.with_vector_and_event:
        raise InputError(
            f"embeddings: none of the {embeddings.tables['item'].rows:,} vectors belongs to an item of the log; "
            "do both use the same ids?"
        )
    pq.write_table(users.table.select(["id", "train_count"]), out / "users.parquet")
    pq.write_table(items.table.select(["id", "train_count"]), out / "items.parquet")
    np.save(out / "item_count.npy", items.column("train_count"))
    np.save(out / "vector_row.npy", items.column("vector_row"))
    train, validation, test = (users.column(f"{split}_count") for split in SPLITS)
    user_offset = np.concatenate(([0], np.cumsum(train + validation + test)))
    np.save(out / "user_offset.npy", user_offset)
    np.save(out / "train_end.npy", user_offset[:-1] + train)
    np.save(out / "validation_end.npy", user_offset[:-1] + train + validation)
    np.save(out / "train_user.npy", np.repeat(np.arange(len(train), dtype=np.int32), train))
    _write_events(connection, out, events=int(user_offset[-1]), timed=config.timestamp_column is not None)
    vectors = items.column("vector_row") >= 0
    return facts | {
        "users": len(train),
        "items": items.table.num_rows,
        "train_events": int(train.sum()),
        "validation_events": int(validation.sum()),
        "test_events": int(test.sum()),
        "dropped_events": dropped,
        "ordered": config.ordered,
        "items_with_vector": int(vectors.sum()),
        "items_vector_only": int((items.column("events") == 0).sum()),
    }


@dataclass(frozen=True)
class _Vocabulary:
    """One line per row, in row order: id, events, <split>_count; for items also vector_row."""

    table: pa.Table

    def column(self, name: str) -> NDArray[np.int64]:
        values: NDArray[np.int64] = self.table.column(name).to_numpy().astype(np.int64)
        return values

    @property
    def with_vector_and_event(self) -> int:
        return int(((self.column("vector_row") >= 0) & (self.column("events") > 0)).sum())


def _vocabulary(connection: duckdb.DuckDBPyConnection, side: str, *, vectors: EmbeddingsManifest | None) -> _Vocabulary:
    """Numbers the ids by falling training count, ties by ascending id; keeps the numbering as table <side>s."""
    counts = ", ".join(f"count(*) FILTER (split = {code}) AS {name}_count" for code, name in enumerate(SPLITS))
    connection.execute(f"CREATE TABLE counted AS SELECT {side} AS id, count(*) AS events, {counts} FROM log GROUP BY {side}")
    if vectors is None:
        joined = "SELECT *, -1 AS vector_row FROM counted"
    else:
        path = quoted(literal(vectors.ids("item")), mark="'")
        zeros = ", ".join(f"coalesce({name}, 0) AS {name}" for name in ("events", *(f"{split}_count" for split in SPLITS)))
        joined = (
            f"SELECT id, {zeros}, coalesce(vector_row, -1) AS vector_row FROM counted FULL JOIN "
            f"(SELECT id, file_row_number AS vector_row FROM read_parquet({path}, file_row_number = true)) USING (id)"
        )
    connection.execute(
        f"CREATE TABLE {side}s AS SELECT *, row_number() OVER (ORDER BY train_count DESC, id) - 1 AS row FROM ({joined})"
    )
    connection.execute("DROP TABLE counted")
    return _Vocabulary(connection.sql(f"SELECT * EXCLUDE (row) FROM {side}s ORDER BY row").to_arrow_table())


def _write_events(connection: duckdb.DuckDBPyConnection, out: Path, *, events: int, timed: bool) -> None:
    """event_item.npy and, with timestamps, event_time.npy: by user, split, time, item."""
    order = "u.row, log.split, log.position, i.row"
    reader = connection.sql(
        f"SELECT i.row::INTEGER AS item, log.position AS time FROM log JOIN users u ON log.user = u.id "
        f"JOIN items i ON log.item = i.id ORDER BY {order}"
    ).to_arrow_reader(BATCH_ROWS)
    item = np.lib.format.open_memmap(out / "event_item.npy", mode="w+", dtype=np.int32, shape=(events,))
    time = np.lib.format.open_memmap(out / "event_time.npy", mode="w+", dtype=np.int64, shape=(events,)) if timed else None
    start = 0
    for batch in reader:
        stop = start + batch.num_rows
        item[start:stop] = batch.column("item").to_numpy()
        if time is not None:
            time[start:stop] = batch.column("time").to_numpy()
        start = stop
    assert start == events, f"{start} events came back from the join of {events}"
