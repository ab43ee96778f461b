"""Writer of the event store: the sorted events stream into the memory maps that InteractionsManifest describes.

E is the number of events of a batch, S the number of splits.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.dataset.layout import CONTEXT_FILE, allocate_npy, array_file, popularity_ranks, save_npy, vocabulary_file
from recsys_core.ingest.log.config import SPLITS, InteractionsConfig
from recsys_core.ingest.log.engine import Vocabulary

BATCH_ROWS = 1_000_000
Counts = NDArray[np.int64]


class EventWriter:
    """Writes the sorted log, and counts the events of each user and item by split."""

    def __init__(self, output_folder: Path, *, users: Vocabulary, items: Vocabulary, config: InteractionsConfig) -> None:
        self.user_count_US: Counts = np.zeros((len(users), len(SPLITS)), np.int64)
        self.item_count_IS: Counts = np.zeros((len(items), len(SPLITS)), np.int64)
        self._output_folder, self._users, self._items, self._config = output_folder, users, items, config

    def write_events(self, batches: Iterable[pa.RecordBatch], *, num_events: int) -> None:
        """Write event_item.npy and, as configured, event_time.npy, event_weight.npy and context.parquet.

        Args:
            batches: the events, sorted by user row, split code and position. Columns: user_row, item_row, split, position and,
                as configured, weight and context_<index of the context column>.
            num_events: number of events in all batches.
        """
        array_by_column = {
            "item_row": allocate_npy(self._output_folder / array_file("event_item"), dtype=np.int32, shape=(num_events,))
        }
        if self._config.timestamp_column is not None:
            array_by_column["position"] = allocate_npy(
                self._output_folder / array_file("event_time"), dtype=np.int64, shape=(num_events,)
            )
        if self._config.weight_column is not None:
            array_by_column["weight"] = allocate_npy(
                self._output_folder / array_file("event_weight"), dtype=np.float32, shape=(num_events,)
            )
        start_event = 0
        with ExitStack() as stack:
            context_writer: pq.ParquetWriter | None = None
            for batch in _merge_batches(batches):
                for column_name, array in array_by_column.items():
                    array[start_event : start_event + batch.num_rows] = batch.column(column_name).to_numpy()
                self._count_events(batch)
                if context_columns := self._config.context_columns:
                    context = pa.table({name: batch.column(f"context_{index}") for index, name in enumerate(context_columns)})
                    if context_writer is None:
                        context_path = self._output_folder / CONTEXT_FILE
                        context_writer = stack.enter_context(pq.ParquetWriter(context_path, context.schema))
                    context_writer.write_table(context)
                start_event += batch.num_rows
        assert start_event == num_events, f"{num_events} events were announced, but the batches have {start_event}"

    def write_negatives(self, batches: Iterable[pa.RecordBatch], *, num_negatives: int) -> None:
        """Write the arrays of KnownNegatives. `write_events` comes before.

        Args:
            batches: the known negatives, sorted by user row, split code and position. Columns: user_row, item_row, split and
                num_earlier_events, the number of the user's events of the same split with a smaller position.
            num_negatives: number of known negatives in all batches.
        """
        block_start_S = np.cumsum(np.append(0, self.user_count_US.ravel()))
        count_S, start = np.zeros(self.user_count_US.size, np.int64), 0
        item_L = allocate_npy(self._output_folder / array_file("negative_item"), dtype=np.int32, shape=(num_negatives,))
        event_path = self._output_folder / array_file("negative_event")
        event_L = allocate_npy(event_path, dtype=np.int64, shape=(num_negatives,)) if self._config.is_ordered else None
        for batch in batches:
            user_L, split_L, num_earlier_L = (
                batch.column(name).to_numpy().astype(np.int64) for name in ("user_row", "split", "num_earlier_events")
            )
            block_L, rows = user_L * len(SPLITS) + split_L, slice(start, start + batch.num_rows)
            item_L[rows] = batch.column("item_row").to_numpy()
            if event_L is not None:
                event_L[rows] = block_start_S[block_L] + num_earlier_L
            count_S[block_L[0] : block_L[-1] + 1] += np.bincount(block_L - block_L[0])
            start += batch.num_rows
        assert start == num_negatives, f"{num_negatives} known negatives were announced, but the batches have {start}"
        save_npy(self._output_folder / array_file("negative_offset"), np.cumsum(np.append(0, count_S)))

    def write_offsets(self) -> None:
        """Write the arrays that have one entry per user, per item or per training event."""
        count_U_by_split = dict(zip(SPLITS, self.user_count_US.T, strict=True))
        user_offset = np.concatenate(([0], np.cumsum(self.user_count_US.sum(axis=1))))
        train_end_U = user_offset[:-1] + count_U_by_split["train"]
        train_count_I = self.item_count_IS[:, SPLITS.index("train")]
        for name, array in {
            "user_offset": user_offset,
            "train_end": train_end_U,
            "validation_end": train_end_U + count_U_by_split["validation"],
            "item_count": np.ascontiguousarray(train_count_I),
            "item_rank": popularity_ranks(train_count_I),
            "vector_row": self._items.vector_row_R,
        }.items():
            save_npy(self._output_folder / array_file(name), array)
        if (self._users.vector_row_R >= 0).any():
            save_npy(self._output_folder / array_file("user_vector_row"), self._users.vector_row_R)
        write_train_user(self._output_folder, count_U_by_split["train"])

    def write_vocabularies(self) -> None:
        """Write the ids of the users and items with their numbers of training events and of all events."""
        for vocabulary, count_RS in ((self._users, self.user_count_US), (self._items, self.item_count_IS)):
            train_count_R, event_count_R = count_RS[:, SPLITS.index("train")], count_RS.sum(axis=1)
            table = pa.table({"id": vocabulary.ids, "train_count": train_count_R, "events": event_count_R})
            pq.write_table(table, self._output_folder / vocabulary_file(vocabulary.side), use_dictionary=False)

    def _count_events(self, batch: pa.RecordBatch) -> None:
        user_E, item_E, split_E = (batch.column(name).to_numpy() for name in ("user_row", "item_row", "split"))
        first_user, stop_user = int(user_E[0]), int(user_E[-1]) + 1  # events are sorted by user
        user_split_key_E = (user_E - first_user) * len(SPLITS) + split_E
        num_counts = (stop_user - first_user) * len(SPLITS)
        self.user_count_US[first_user:stop_user] += np.bincount(user_split_key_E, minlength=num_counts).reshape(-1, len(SPLITS))
        item_split_key_E = item_E.astype(np.int64) * len(SPLITS) + split_E
        self.item_count_IS += np.bincount(item_split_key_E, minlength=self.item_count_IS.size).reshape(-1, len(SPLITS))


def write_train_user(folder: Path, train_count_U: Counts) -> None:
    """Write train_user.npy, the user of each training event, BATCH_ROWS users at a time."""
    train_user = allocate_npy(folder / array_file("train_user"), dtype=np.int32, shape=(int(train_count_U.sum()),))
    start_event = 0
    for first_user in range(0, len(train_count_U), BATCH_ROWS):
        train_counts = train_count_U[first_user : first_user + BATCH_ROWS]
        stop_event = start_event + int(train_counts.sum())
        train_user[start_event:stop_event] = np.repeat(
            np.arange(first_user, first_user + len(train_counts), dtype=np.int32), train_counts
        )
        start_event = stop_event


def _merge_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merge batches until they have at least BATCH_ROWS rows; the last batch may have fewer rows.

    Counting the events of a batch takes time proportional to the number of items, even if the batch is small.
    """
    small_batches: list[pa.RecordBatch] = []
    for batch in batches:
        small_batches.append(batch)
        if sum(small_batch.num_rows for small_batch in small_batches) >= BATCH_ROWS:
            yield pa.concat_batches(small_batches)
            small_batches = []
    if small_batches:
        yield pa.concat_batches(small_batches)
