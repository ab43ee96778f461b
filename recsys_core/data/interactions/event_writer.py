"""The event store's files (see InteractionsManifest): the log sorted in DuckDB, streamed into memory maps.

Shapes: U users, I items, S splits, E events of one batch.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.data.interactions.config import SPLITS, InteractionsConfig
from recsys_core.data.interactions.filters import rider_columns
from recsys_core.data.interactions.vocabulary import Vocabulary
from recsys_core.disk import allocate_npy, save_npy

BATCH_ROWS = 1_000_000
Counts = NDArray[np.int64]


class EventWriter:
    """Writes the sorted log and counts users and items by split on the way."""

    def __init__(self, out: Path, *, users: Vocabulary, items: Vocabulary, config: InteractionsConfig) -> None:
        self.user_count_US: Counts = np.zeros((len(users), len(SPLITS)), np.int64)
        self.item_count_IS: Counts = np.zeros((len(items), len(SPLITS)), np.int64)
        self._out, self._users, self._items, self._config = out, users, items, config

    def write_events(self, connection: duckdb.DuckDBPyConnection) -> None:
        """event_item.npy and, where there are such columns, event_time.npy, event_weight.npy and context.parquet."""
        riders = rider_columns(connection, "log")
        (user, join_user), (item, join_item) = self._users.joined('log."user"'), self._items.joined("log.item")
        columns = [
            f"{user} AS u",
            f"{item} AS i",
            "log.split AS split",
            "log.position AS position",
            *(f"log.{name}" for name in riders),
        ]
        ((events,),) = connection.sql("SELECT count(*) FROM log").fetchall()
        reader = connection.sql(
            f"SELECT {', '.join(columns)} FROM log{join_user}{join_item} ORDER BY u, split, position, i"
            + "".join(f", log.{name}" for name in riders)
        ).to_arrow_reader(BATCH_ROWS)
        arrays = {"i": allocate_npy(self._out / "event_item.npy", dtype=np.int32, shape=(events,))}
        if self._config.timestamp_column is not None:
            arrays["position"] = allocate_npy(self._out / "event_time.npy", dtype=np.int64, shape=(events,))
        if "weight" in riders:
            arrays["weight"] = allocate_npy(self._out / "event_weight.npy", dtype=np.float32, shape=(events,))
        start = 0
        with _ContextFile(self._out / "context.parquet", self._config.context_columns) as context:
            for batch in _larger(reader):
                for name, array in arrays.items():
                    array[start : start + batch.num_rows] = batch.column(name).to_numpy()
                self._count(batch)
                context.write(batch)
                start += batch.num_rows
        assert start == events, f"{start} events came back from the join of {events}"

    def write_offsets(self) -> None:
        """The arrays by user and by item."""
        by_split = dict(zip(SPLITS, self.user_count_US.T, strict=True))
        offset = np.concatenate(([0], np.cumsum(self.user_count_US.sum(axis=1))))
        train_end = offset[:-1] + by_split["train"]
        item_count = self.item_count_IS[:, SPLITS.index("train")]
        rank = np.empty(len(item_count), np.int64)
        rank[np.argsort(-item_count, kind="stable")] = np.arange(len(item_count))
        for name, array in {
            "user_offset": offset,
            "train_end": train_end,
            "validation_end": train_end + by_split["validation"],
            "item_count": np.ascontiguousarray(item_count),
            "item_rank": rank,
            "vector_row": self._items.vector_row,
        }.items():
            save_npy(self._out / f"{name}.npy", array)
        if (self._users.vector_row >= 0).any():
            save_npy(self._out / "user_vector_row.npy", self._users.vector_row)
        self._write_train_user(by_split["train"])

    def _write_train_user(self, train_count: Counts) -> None:
        array = allocate_npy(self._out / "train_user.npy", dtype=np.int32, shape=(int(train_count.sum()),))
        start = 0
        for first in range(0, len(train_count), BATCH_ROWS):
            counts = train_count[first : first + BATCH_ROWS]
            stop = start + int(counts.sum())
            array[start:stop] = np.repeat(np.arange(first, first + len(counts), dtype=np.int32), counts)
            start = stop

    def _count(self, batch: pa.RecordBatch) -> None:
        user_E, item_E, split_E = (batch.column(name).to_numpy() for name in ("u", "i", "split"))
        first, stop = int(user_E[0]), int(user_E[-1]) + 1  # sorted by user
        key_E = (user_E - first) * len(SPLITS) + split_E
        self.user_count_US[first:stop] += np.bincount(key_E, minlength=(stop - first) * len(SPLITS)).reshape(-1, len(SPLITS))
        key_E = item_E.astype(np.int64) * len(SPLITS) + split_E
        self.item_count_IS += np.bincount(key_E, minlength=self.item_count_IS.size).reshape(-1, len(SPLITS))


def _larger(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Batches of about BATCH_ROWS, whatever DuckDB gives: counting costs as much as the catalogue is long, each time."""
    waiting: list[pa.RecordBatch] = []
    for batch in reader:
        waiting.append(batch)
        if sum(one.num_rows for one in waiting) >= BATCH_ROWS:
            yield pa.concat_batches(waiting)
            waiting = []
    if waiting:
        yield pa.concat_batches(waiting)


class _ContextFile:
    """context.parquet, if there are context columns: the values as they came, one row per event."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self._path, self._columns = path, columns
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        if not self._columns:
            return
        table = pa.table({name: batch.column(f"context_{at}") for at, name in enumerate(self._columns)})
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()
