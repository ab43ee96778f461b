"""Array files, and the files of an event store that the ingest writes and `EventStore` maps. See InteractionsManifest."""

import errno
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

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
"""Arrays that identify the events: user, split, item and time."""


def array_file(array_name: str) -> str:
    """Return the file name of an array, a field of EventArrays."""
    return f"{array_name}.npy"


def vocabulary_file(side: str) -> str:
    """Return the name of the file with the ids in the order of their rows; `side` is user or item."""
    return f"{side}s.parquet"


def codes_file(side: str) -> str:
    """Return the name of the file with every id ever read, in the order of their codes; `side` is user or item.

    The code of an id never changes. Its row may change when the vocabulary is rebuilt.
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
    data_type = np.dtype(dtype)
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(data_type), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        num_bytes = file.tell() + math.prod(shape) * data_type.itemsize
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
    array: NDArray[Any] = np.load(path, mmap_mode="r+")
    return array


def save_npy(path: Path, array: NDArray[Any]) -> None:
    """Write `array` like numpy.save; raise InputError if the disk is full."""
    allocate_npy(path, dtype=array.dtype, shape=array.shape)[...] = array


HISTORY_FILES = (array_file("user_offset"), array_file("event_item"))
"""Files with the items of each user, in the order of the log."""


@dataclass(frozen=True)
class EventArrays:
    """The arrays of an event store. An array that is None by default may be missing in an event store."""

    user_offset: Int64Array
    train_end: Int64Array
    validation_end: Int64Array
    event_item: NDArray[np.int32]
    train_user: NDArray[np.int32]
    item_count: Int64Array
    vector_row: Int64Array
    item_rank: Int64Array | None = None
    event_time: Int64Array | None = None
    event_weight: NDArray[np.float32] | None = None
    user_vector_row: Int64Array | None = None
    negative_offset: Int64Array | None = None
    negative_item: NDArray[np.int32] | None = None
    negative_event: Int64Array | None = None

    @classmethod
    def open(cls, manifest: InteractionsManifest) -> Self:
        """Map the arrays of an interactions stage."""
        required_names = {field.name for field in fields(cls) if field.default is not None}
        stored_names = [field.name for field in fields(cls) if array_file(field.name) in manifest.files]
        return cls(**{name: memory_map(manifest.path(array_file(name))) for name in required_names.union(stored_names)})


def popularity_ranks(count_R: NDArray[Any]) -> Int64Array:
    """Return the popularity rank of each row, [R]. Rank 0 has the highest count; rows with equal counts are ranked in order.

    >>> popularity_ranks(np.array([2, 5, 2])).tolist()
    [1, 0, 2]
    """
    rank_R = np.empty(len(count_R), np.int64)
    rank_R[rows_by_falling_count(count_R)] = np.arange(len(count_R))
    return rank_R


def rows_by_falling_count(count_R: NDArray[Any]) -> Int64Array:
    """Return the rows by falling count; rows with equal counts stay in order."""
    return np.argsort(-count_R, kind="stable")
