"""Writer of the event store: the sorted events stream into the memory maps that InteractionsManifest describes.

Shapes: U users, I items, R rows of a vocabulary, 3 splits, E events of a batch, L known negatives of a batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike, NDArray

from recsys_core.dataset.layout import (
    CONTEXT_FILE,
    allocate_npy,
    array_file,
    array_files,
    popularity_ranks,
    resize_npy,
    row_dtype,
    save_npy,
    shard_files,
    vocabulary_file,
)
from recsys_core.dataset.shards import positions_by_shard
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine import Vocabulary
from recsys_core.manifests import SPLITS, EventShard
from recsys_core.parquet.local_copies import decode_ahead

BATCH_ROWS = 1_000_000
MAX_DENSE_COUNTS = 1 << 24
"""Largest number of keys that are counted in an array of 128 MB. With more keys, the keys of a batch are sorted instead."""
Counts = NDArray[np.int64]


class GrowingArray:
    """A .npy file to which values are appended. It grows if more than `expected_length` values are appended."""

    def __init__(self, path: Path, *, dtype: DTypeLike, expected_length: int) -> None:
        self.length = 0
        self._path, self._array = path, allocate_npy(path, dtype=dtype, shape=(expected_length,))

    def append(self, values: NDArray[Any]) -> None:
        """Append `values`; raise InputError if the disk is full."""
        end = self.length + len(values)
        if end > len(self._array):
            self._array = resize_npy(self._path, length=max(end, len(self._array) + len(self._array) // 8))
        self._array[self.length : end] = values
        self.length = end

    def close(self) -> None:
        """Cut the file to the length of the appended values."""
        if self.length < len(self._array):
            self._array = resize_npy(self._path, length=self.length)


class EventWriter:
    """Writes each event of the sorted log to the shard of its user. Counts the events of each user and item, and the nulls."""

    def __init__(self, output_folder: Path, *, users: Vocabulary, items: Vocabulary, config: InteractionsConfig) -> None:
        self.user_count_U3: Counts = np.zeros((len(users), len(SPLITS)), np.int64)
        self.item_count_I3: Counts = np.zeros((len(items), len(SPLITS)), np.int64)
        self._negative_count_U3: Counts = np.zeros((0, len(SPLITS)), np.int64)
        self.num_nulls_by_context_column = dict.fromkeys(config.context_columns, 0)
        self._output_folder, self._users, self._items, self._config = output_folder, users, items, config

    @property
    def shards(self) -> tuple[EventShard, ...]:
        """The size of each shard, as in InteractionsManifest: empty for a single shard."""
        if self._config.shards == 1:
            return ()
        return tuple(
            EventShard(num_events=int(count_U3.sum()), num_known_negatives=int(negative_count_U3.sum()))
            for count_U3, negative_count_U3 in zip(
                self._views_by_shard(self.user_count_U3), self._views_by_shard(self._negative_count_U3), strict=True
            )
        )

    def write_events(self, batches: Iterable[pa.RecordBatch], *, num_events: int) -> None:
        """Write event_item.npy and, as configured, event_time.npy, event_weight.npy and context.parquet.

        Args:
            batches: the events, sorted by user row, split code and position. Columns: user_row, item_row, split, position and,
                as configured, weight and context_<index of the context column>.
            num_events: number of events in all batches.
        """
        arrays_by_column = {
            "item_row": self._create_arrays("event_item", dtype=row_dtype(len(self._items)), num_values=num_events)
        }
        if self._config.timestamp_column is not None:
            arrays_by_column["position"] = self._create_arrays("event_time", dtype=np.int64, num_values=num_events)
        if self._config.weight_column is not None:
            arrays_by_column["weight"] = self._create_arrays("event_weight", dtype=np.float32, num_values=num_events)
        with ExitStack() as stack:
            context_writers: list[pq.ParquetWriter] = []
            for batch in decode_ahead(_merge_batches(batches)):
                self._count_events_and_nulls(batch)
                if self._config.context_columns and not context_writers:
                    schema = _context_table(batch, self._config).schema
                    file_names = shard_files(CONTEXT_FILE, num_shards=self._config.shards)
                    paths = [self._output_folder / file_name for file_name in file_names]
                    context_writers = [stack.enter_context(pq.ParquetWriter(path, schema)) for path in paths]
                for shard, shard_batch in self._split_by_shard(batch):
                    for column_name, arrays in arrays_by_column.items():
                        arrays[shard].append(shard_batch.column(column_name).to_numpy())
                    if context_writers:
                        context_writers[shard].write_table(_context_table(shard_batch, self._config))
        num_written = _close(arrays_by_column["item_row"])
        for arrays in arrays_by_column.values():
            _close(arrays)
        assert num_written == num_events, f"{num_events} events were announced, but the batches have {num_written}"

    def write_negatives(self, batches: Iterable[pa.RecordBatch], *, num_negatives: int) -> None:
        """Write the arrays of KnownNegatives. Call `write_events` first.

        Args:
            batches: the known negatives, sorted by user row, split code and position. Columns: user_row, item_row, split and
                num_earlier_events, the number of the user's events of the same split with a smaller position.
            num_negatives: number of known negatives in all batches.
        """
        # Index, in the shard, of the first event of each user in each split.
        first_event_U3 = np.empty_like(self.user_count_U3)
        for shard_first_event_U3, count_U3 in zip(
            self._views_by_shard(first_event_U3), self._views_by_shard(self.user_count_U3), strict=True
        ):
            shard_first_event_U3[...] = (np.cumsum(count_U3) - count_U3.ravel()).reshape(count_U3.shape)
        item_arrays = self._create_arrays("negative_item", dtype=row_dtype(len(self._items)), num_values=num_negatives)
        event_arrays: Sequence[GrowingArray] = ()
        if self._config.is_ordered:
            event_arrays = self._create_arrays("negative_event", dtype=np.int64, num_values=num_negatives)
        self._negative_count_U3 = np.zeros_like(self.user_count_U3)
        for batch in batches:
            _add_sorted_keys(self._negative_count_U3.reshape(-1), _user_split_keys(batch))
            for shard, shard_batch in self._split_by_shard(batch):
                item_arrays[shard].append(shard_batch.column("item_row").to_numpy())
                if event_arrays:
                    first_event_L = first_event_U3.reshape(-1)[_user_split_keys(shard_batch)]
                    event_arrays[shard].append(first_event_L + shard_batch.column("num_earlier_events").to_numpy())
        num_written = _close(item_arrays)
        _close(event_arrays)
        assert num_written == num_negatives, f"{num_negatives} negatives were announced, but the batches have {num_written}"
        for path, count_U3 in zip(
            self._shard_paths("negative_offset"), self._views_by_shard(self._negative_count_U3), strict=True
        ):
            save_npy(path, np.cumsum(np.append(0, count_U3)))

    def write_offsets(self) -> None:
        """Write the arrays that have one entry per user, per item or per training event."""
        train_code, validation_code = SPLITS.index("train"), SPLITS.index("validation")
        paths_by_array = {
            array_name: self._shard_paths(array_name) for array_name in ("user_offset", "train_end", "validation_end")
        }
        for shard, count_U3 in enumerate(self._views_by_shard(self.user_count_U3)):
            user_offset = np.concatenate(([0], np.cumsum(count_U3.sum(axis=1))))
            train_end_U = user_offset[:-1] + count_U3[:, train_code]
            save_npy(paths_by_array["user_offset"][shard], user_offset)
            save_npy(paths_by_array["train_end"][shard], train_end_U)
            save_npy(paths_by_array["validation_end"][shard], train_end_U + count_U3[:, validation_code])
        train_count_I = self.item_count_I3[:, train_code]
        for array_name, array in {
            "item_count": np.ascontiguousarray(train_count_I),
            "item_rank": popularity_ranks(train_count_I),
            "vector_row": self._items.vector_row_R,
        }.items():
            save_npy(self._output_folder / array_file(array_name), array)
        if (self._users.vector_row_R >= 0).any():
            save_npy(self._output_folder / array_file("user_vector_row"), self._users.vector_row_R)
        write_examples(self._output_folder, user_count_U3=self.user_count_U3, num_shards=self._config.shards)

    def write_vocabularies(self) -> None:
        """Write the ids of the users and items, each with its number of training events and its number of events."""
        for vocabulary, count_R3 in ((self._users, self.user_count_U3), (self._items, self.item_count_I3)):
            train_count_R, event_count_R = count_R3[:, SPLITS.index("train")], count_R3.sum(axis=1)
            table = pa.table({"id": vocabulary.ids, "train_count": train_count_R, "events": event_count_R})
            pq.write_table(table, self._output_folder / vocabulary_file(vocabulary.side), use_dictionary=False)

    def _count_events_and_nulls(self, batch: pa.RecordBatch) -> None:
        """Count the events of each user and item, and the nulls in the context columns."""
        _add_sorted_keys(self.user_count_U3.reshape(-1), _user_split_keys(batch))
        item_E, split_E = (batch.column(name).to_numpy() for name in ("item_row", "split"))
        key_E = item_E.astype(np.int64) * len(SPLITS) + split_E
        _add_counts(self.item_count_I3.reshape(-1), key_E, key_range=range(self.item_count_I3.size))
        for index, column in enumerate(self._config.context_columns):
            self.num_nulls_by_context_column[column] += batch.column(f"context_{index}").null_count

    def _split_by_shard(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield each shard of the users in `batch`, with the rows of its users in their order."""
        if self._config.shards == 1:
            yield 0, batch
            return
        shard_E = batch.column("user_row").to_numpy() % self._config.shards
        for shard, positions in positions_by_shard(shard_E, num_shards=self._config.shards):
            yield shard, batch.take(pa.array(positions))

    def _views_by_shard(self, array_U3: Counts) -> list[Counts]:
        """Return a view of `array_U3` for each shard: the rows of its users."""
        return [array_U3[shard :: self._config.shards] for shard in range(self._config.shards)]

    def _shard_paths(self, array_name: str) -> list[Path]:
        return [self._output_folder / name for name in array_files(array_name, num_shards=self._config.shards)]

    def _create_arrays(self, array_name: str, *, dtype: DTypeLike, num_values: int) -> list[GrowingArray]:
        """Create the file of each shard. The shards have about the same size, so most files grow at most once."""
        expected_length = -(-num_values // self._config.shards)
        return [GrowingArray(path, dtype=dtype, expected_length=expected_length) for path in self._shard_paths(array_name)]


def _close(arrays: Sequence[GrowingArray]) -> int:
    """Close the arrays, and return the number of values in all of them."""
    for array in arrays:
        array.close()
    return sum(array.length for array in arrays)


def _user_split_keys(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Return a key for each row: 3 * user row + split."""
    user_E, split_E = (batch.column(name).to_numpy() for name in ("user_row", "split"))
    key_E: NDArray[np.int64] = user_E.astype(np.int64) * len(SPLITS) + split_E
    return key_E


def _add_sorted_keys(count_by_key: Counts, key_E: NDArray[np.int64]) -> None:
    """Add the number of occurrences of each key to its count. The keys are sorted."""
    _add_counts(count_by_key, key_E, key_range=range(int(key_E[0]), int(key_E[-1]) + 1))


def _add_counts(count_by_key: Counts, key_E: NDArray[np.int64], *, key_range: range) -> None:
    """Add the number of occurrences of each key to its count; all keys are in `key_range`."""
    if len(key_range) <= MAX_DENSE_COUNTS:
        count_by_key[key_range.start : key_range.stop] += np.bincount(key_E - key_range.start, minlength=len(key_range))
    else:
        distinct_keys, num_occurrences = np.unique(key_E, return_counts=True)
        count_by_key[distinct_keys] += num_occurrences


def _context_table(batch: pa.RecordBatch, config: InteractionsConfig) -> pa.Table:
    """Return the context columns with their names in the log."""
    return pa.table({name: batch.column(f"context_{index}") for index, name in enumerate(config.context_columns)})


def write_examples(folder: Path, *, user_count_U3: Counts, num_shards: int) -> None:
    """Write train_user.npy, the user of each training event. With several shards, write event_offset.npy for each shard.

    user_count_U3: number of events of each user in each split.
    """
    train_count_U = user_count_U3[:, SPLITS.index("train")]
    _write_train_user(folder, train_count_U)
    if num_shards == 1:
        return
    first_train_event_U = np.cumsum(train_count_U) - train_count_U
    for shard, file_name in enumerate(array_files("event_offset", num_shards=num_shards)):
        count_U = user_count_U3[shard::num_shards].sum(axis=1)
        save_npy(folder / file_name, np.cumsum(count_U) - count_U - first_train_event_U[shard::num_shards])


def _write_train_user(folder: Path, train_count_U: Counts) -> None:
    """Write train_user.npy, BATCH_ROWS users at a time."""
    dtype = row_dtype(len(train_count_U))
    train_user = allocate_npy(folder / array_file("train_user"), dtype=dtype, shape=(int(train_count_U.sum()),))
    start_event = 0
    for first_user in range(0, len(train_count_U), BATCH_ROWS):
        chunk_count_U = train_count_U[first_user : first_user + BATCH_ROWS]
        stop_event = start_event + int(chunk_count_U.sum())
        user_U = np.arange(first_user, first_user + len(chunk_count_U), dtype=dtype)
        train_user[start_event:stop_event] = np.repeat(user_U, chunk_count_U)
        start_event = stop_event


def _merge_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merge batches into batches of at least BATCH_ROWS rows; the last batch may have fewer rows.

    Counting the events of a batch takes time proportional to the number of items, even if the batch is small.
    """
    pending_batches: list[pa.RecordBatch] = []
    for batch in batches:
        pending_batches.append(batch)
        if sum(pending_batch.num_rows for pending_batch in pending_batches) >= BATCH_ROWS:
            yield pa.concat_batches(pending_batches)
            pending_batches = []
    if pending_batches:
        yield pa.concat_batches(pending_batches)
