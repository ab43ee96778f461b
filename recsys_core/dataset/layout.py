"""Files of an event store (see InteractionsManifest), and functions that write and memory-map .npy files.

Shapes: S shards, R rows of a vocabulary.
"""

import errno
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from recsys_core.dataset.jagged import Int64Array
from recsys_core.disk import DISK_FULL_ERRNOS, disk_full_error
from recsys_core.manifests import InteractionsManifest
from recsys_core.units import format_gib

CONTEXT_FILE = "context.parquet"
ITEM_TITLES_FILE = "item_titles.parquet"
ITEM_COLUMNS_FILE = "item_columns.parquet"
EVENT_ARRAYS = ("user_offset", "train_end", "validation_end", "event_item", "train_user", "event_time")
"""Arrays with the user, split, item and time of the events."""
HISTORY_ARRAYS = ("user_offset", "event_item")
"""Arrays with the items of each user, in the order of the log."""
SHARDED_ARRAYS = (
    *("user_offset", "train_end", "validation_end", "event_offset", "event_item", "event_time", "event_weight"),
    *("negative_offset", "negative_item", "negative_event"),
)
"""Arrays that are stored in one file for each shard. Every other array of an event store has a single file."""


def row_dtype(num_rows: int) -> type[np.int32 | np.int64]:
    """Return the integer type in which row numbers of a table are stored: 32 bits if the last row number fits.

    >>> row_dtype(2**31).__name__, row_dtype(2**31 + 1).__name__
    ('int32', 'int64')
    """
    return np.int32 if num_rows - 1 <= np.iinfo(np.int32).max else np.int64


def array_file(array_name: str) -> str:
    """Return the file name of an EventArrays field in an event store with one shard."""
    return f"{array_name}.npy"


def shard_files(file_name: str, *, num_shards: int) -> tuple[str, ...]:
    """Return the file of each shard. A single shard has the file `file_name`.

    >>> shard_files("event_item.npy", num_shards=2)
    ('event_item.0.npy', 'event_item.1.npy')
    """
    if num_shards == 1:
        return (file_name,)
    stem, _, suffix = file_name.rpartition(".")
    return tuple(f"{stem}.{shard}.{suffix}" for shard in range(num_shards))


def array_files(array_name: str, *, num_shards: int) -> tuple[str, ...]:
    """Return the files of an array: one for each shard, or a single file if the array is not in SHARDED_ARRAYS."""
    return shard_files(array_file(array_name), num_shards=num_shards if array_name in SHARDED_ARRAYS else 1)


def context_paths(manifest: InteractionsManifest) -> list[Path]:
    """Return the path of each shard's context columns. The rows of each file are in the order of the shard's events."""
    return [manifest.path(file_name) for file_name in shard_files(CONTEXT_FILE, num_shards=manifest.num_shards)]


def num_users_by_shard(num_users: int, *, num_shards: int) -> Int64Array:
    """Return the number of users of each shard. User u is in shard u % num_shards.

    >>> num_users_by_shard(8, num_shards=3).tolist()
    [3, 3, 2]
    """
    return (num_users + num_shards - 1 - np.arange(num_shards)) // num_shards


def vocabulary_file(side: str) -> str:
    """Return the name of the file with the ids in the order of their rows. side: "user" or "item"."""
    return f"{side}s.parquet"


def codes_file(side: str) -> str:
    """Return the name of the file with every id that was ever read. side: "user" or "item".

    The code of an id is its row in this file. Codes, and rows in the vocabulary, change only if the vocabularies are rebuilt.
    """
    return f"{side}_ids.parquet"


def memory_map(path: Path) -> NDArray[Any]:
    """Memory-map a .npy file, read-only, as a plain array, because indexing an np.memmap takes microseconds longer."""
    return np.asarray(np.load(path, mmap_mode="r"))


def allocate_npy(path: Path, *, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Create a .npy file, reserve its disk space, and return it as a writable memory map.

    Without reserved space a write to the map kills the process (SIGBUS) when the disk is full.

    Raises:
        InputError: the disk has too little free space.
    """
    with path.open("wb") as file:
        _reserve(file, path, dtype=np.dtype(dtype), shape=shape)
    array: NDArray[Any] = np.load(path, mmap_mode="r+")
    return array


def resize_npy(path: Path, *, length: int) -> NDArray[Any]:
    """Cut or extend the one-dimensional .npy file of `allocate_npy`, and return it as a writable memory map.

    Raises:
        InputError: the disk has too little free space.
    """
    with path.open("r+b") as file:
        np.lib.format.read_magic(file)
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
        _reserve(file, path, dtype=dtype, shape=(length,))
        file.truncate(file.tell() + length * dtype.itemsize)
    array: NDArray[Any] = np.load(path, mmap_mode="r+")
    return array


def _reserve(file: BinaryIO, path: Path, *, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Write the header of a .npy file, and reserve the disk space of the array. The file position is then after the header.

    The header of a one-dimensional array has the same size for any length of the array.
    """
    file.seek(0)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    file.flush()
    num_bytes = file.tell() + math.prod(shape) * dtype.itemsize
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno not in (*DISK_FULL_ERRNOS, errno.EFBIG):
            raise
        path.unlink()
        shape_text = f"{' x '.join(f'{length:,}' for length in shape)} numbers"
        raise disk_full_error(
            path.parent, reason=f"{path.name}, {shape_text}, takes {format_gib(num_bytes, digits=3)}"
        ) from error


def save_npy(path: Path, array: NDArray[Any]) -> None:
    """Write `array` like numpy.save; raise InputError if the disk is full."""
    allocate_npy(path, dtype=array.dtype, shape=array.shape)[...] = array


class ShardArrays:
    """One array for each shard. The file of a shard is mapped when its array is first read.

    Attributes:
        length_S: int64 [S], length of each array.
    """

    def __init__(self, paths: Sequence[Path], *, length_S: Int64Array) -> None:
        self.length_S, self._paths = length_S, paths
        self._array_by_shard: dict[int, NDArray[Any]] = {}

    @classmethod
    def of(cls, *arrays: "NDArray[Any] | ShardArrays") -> "ShardArrays":
        """Return the given arrays, one for each shard. If the only argument is a ShardArrays, return this argument."""
        if isinstance(arrays[0], ShardArrays):
            return arrays[0]
        shard_arrays = cls((), length_S=np.array([len(array) for array in arrays]))
        shard_arrays._array_by_shard = dict(enumerate(cast(tuple[NDArray[Any], ...], arrays)))
        return shard_arrays

    def __len__(self) -> int:
        return len(self.length_S)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[shard] for shard in range(len(self)))

    def __getitem__(self, shard: int) -> NDArray[Any]:
        """Return the array of a shard."""
        if shard not in self._array_by_shard:
            self._array_by_shard[shard] = memory_map(self._paths[shard])
        return self._array_by_shard[shard]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the entries, the same in all shards."""
        mapped_arrays = tuple(self._array_by_shard.values())
        return (mapped_arrays[0] if mapped_arrays else self[0]).dtype

    @property
    def start_S(self) -> Int64Array:
        """Index of the first entry of each array in their concatenation."""
        return np.cumsum(self.length_S) - self.length_S


@dataclass(frozen=True)
class EventArrays:
    """The arrays of an event store; see InteractionsManifest. An array with the default None may be missing.

    With several shards, the arrays of SHARDED_ARRAYS are `ShardArrays`.
    """

    user_offset: Int64Array | ShardArrays
    train_end: Int64Array | ShardArrays
    validation_end: Int64Array | ShardArrays
    event_item: NDArray[Any] | ShardArrays
    train_user: NDArray[Any]
    item_count: Int64Array
    vector_row: Int64Array
    item_rank: Int64Array | None = None
    event_offset: Int64Array | ShardArrays | None = None
    event_time: Int64Array | ShardArrays | None = None
    event_weight: NDArray[np.float32] | ShardArrays | None = None
    user_vector_row: Int64Array | None = None
    negative_offset: Int64Array | ShardArrays | None = None
    negative_item: NDArray[Any] | ShardArrays | None = None
    negative_event: Int64Array | ShardArrays | None = None

    @classmethod
    def open(cls, manifest: InteractionsManifest) -> Self:
        """Map the arrays of an interactions stage. With several shards, an array is mapped when it is first read."""
        num_shards = manifest.num_shards
        num_users_S = num_users_by_shard(manifest.num_users, num_shards=num_shards)
        num_events_S = np.array([shard.num_events for shard in manifest.shards], np.int64)
        num_negatives_S = np.array([shard.num_known_negatives for shard in manifest.shards], np.int64)
        length_S_by_array = dict.fromkeys(("train_end", "validation_end", "event_offset"), num_users_S)
        length_S_by_array |= {"user_offset": num_users_S + 1, "negative_offset": 3 * num_users_S + 1}
        length_S_by_array |= {"negative_item": num_negatives_S, "negative_event": num_negatives_S}

        def map_array(name: str) -> Any:
            paths = [manifest.path(file_name) for file_name in array_files(name, num_shards=num_shards)]
            return (
                memory_map(paths[0])
                if len(paths) == 1
                else ShardArrays(paths, length_S=length_S_by_array.get(name, num_events_S))
            )

        required_names = {field.name for field in fields(cls) if field.default is not None}
        stored_names = [
            field.name for field in fields(cls) if array_files(field.name, num_shards=num_shards)[0] in manifest.files
        ]
        return cls(**{name: map_array(name) for name in required_names.union(stored_names)})

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(ShardArrays.of(self.user_offset))

    @property
    def num_users(self) -> int:
        """Number of rows of the user vocabulary."""
        return int(ShardArrays.of(self.train_end).length_S.sum())

    def shards(self) -> Iterator[Self]:
        """Yield the arrays of each shard. Users and events are numbered from 0 in the shard, and `train_user` is empty."""
        for shard in range(self.num_shards):
            shard_arrays_by_name = {name: getattr(self, name) for name in SHARDED_ARRAYS}
            array_by_name = {
                name: arrays[shard] for name, arrays in shard_arrays_by_name.items() if isinstance(arrays, ShardArrays)
            }
            yield replace(self, train_user=self.train_user[:0], user_vector_row=None, **array_by_name)


def popularity_ranks(count_R: NDArray[Any]) -> Int64Array:
    """Return the popularity rank of each row, [R]. Rank 0 has the highest count; rows with equal counts keep their order.

    >>> popularity_ranks(np.array([2, 5, 2])).tolist()
    [1, 0, 2]
    """
    rank_R = np.empty(len(count_R), np.int64)
    rank_R[rows_by_falling_count(count_R)] = np.arange(len(count_R))
    return rank_R


def rows_by_falling_count(count_R: NDArray[Any]) -> Int64Array:
    """Return the rows in the order of falling counts, [R]; rows with equal counts keep their order."""
    return np.argsort(-count_R, kind="stable")
