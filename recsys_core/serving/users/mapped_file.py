"""Memory-mapped files that are verified in blocks, so that a file of 100 million users opens as fast as a file of 100.

A checksum file has the sha256 of each block. The first read of a block compares the block with its sha256.

Shapes: P blocks of the file or of one verification.
"""

import hashlib
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from recsys_core.dataset.jagged import Int64Array
from recsys_core.errors import StageError

_BLOCK_BITS = 14
BLOCK_BYTES = 1 << _BLOCK_BITS
"""A lookup of one user reads about six blocks, so blocks are small. The checksums have 0.2 % of the size of the file."""
_DIGEST_BYTES = hashlib.sha256().digest_size


def write_block_checksums(path: Path, checksums_path: Path) -> None:
    """Write the sha256 of each block of `path`, 32 bytes per block, to `checksums_path`."""
    with path.open("rb") as file, checksums_path.open("wb") as checksums_file:
        while block := file.read(BLOCK_BYTES):
            checksums_file.write(hashlib.sha256(block).digest())


class MappedFile:
    """A memory-mapped file whose blocks are verified before they are read.

    Threads may share it: a block that two threads read at the same time is verified twice.
    """

    def __init__(self, path: Path, checksums: bytes) -> None:
        """checksums: content of the checksum file. Raises StageError if it does not have one checksum per block."""
        self.path, self._checksums = path, checksums
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._buffer = pa.py_buffer(self._map)
        num_blocks = -(-len(self._map) // BLOCK_BYTES)
        if len(checksums) != num_blocks * _DIGEST_BYTES:
            raise StageError(
                f"{path}: the file has {num_blocks} blocks, but there are checksums for {len(checksums) // _DIGEST_BYTES}; "
                "package the model again"
            )
        self._is_verified_P = np.zeros(num_blocks, np.bool_)

    def __len__(self) -> int:
        return len(self._map)

    def verify_range(self, start: int, end: int) -> None:
        """Verify the bytes from start to end; positions outside of the file are ignored."""
        start, end = max(0, start), min(len(self), end)
        self.verify(np.arange(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)))

    def verify(self, block_P: Int64Array) -> None:
        """Verify blocks by their numbers. Raises StageError if a block was changed."""
        if self._is_verified_P[block_P].all():
            return
        content = memoryview(self._map)
        for block in np.unique(block_P[~self._is_verified_P[block_P]]).tolist():
            digest = hashlib.sha256(content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]).digest()
            if digest != self._checksums[block * _DIGEST_BYTES : (block + 1) * _DIGEST_BYTES]:
                raise StageError(
                    f"{self.path}: the bytes from {block * BLOCK_BYTES:,} on were changed; download or package the model again"
                )
            self._is_verified_P[block] = True

    @property
    def arrow_buffer(self) -> pa.Buffer:
        """The file as an Arrow buffer, whose bytes are not verified."""
        return self._buffer

    def values(self, dtype: DTypeLike, *, start_byte: int, length: int) -> NDArray[Any]:
        """Return `length` values of the file, without copying or verifying them."""
        values: NDArray[Any] = np.frombuffer(self._map, dtype, count=length, offset=start_byte)
        return values


class MappedArray:
    """A one-dimensional array in a MappedFile. Indexing it with an array of indices verifies the blocks of these values."""

    def __init__(self, file: MappedFile, dtype: DTypeLike, *, start_byte: int, length: int, bound: int | None = None) -> None:
        """bound: every value that is read must be at least 0 and smaller than this number; None to allow all values."""
        self._file, self._bound = file, bound
        self._start_byte, self._value_bytes = start_byte, np.dtype(dtype).itemsize
        self._unsigned_type = np.dtype(f"u{self._value_bytes}")
        assert start_byte % self._value_bytes == 0, "a value would be in two blocks"
        self._values = file.values(dtype, start_byte=start_byte, length=length)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Int64Array) -> NDArray[Any]:
        """Return the values at these indices. The indices are at least 0.

        Raises StageError if a value was changed, or is out of bounds.
        """
        if not len(index):
            return self._values[:0]
        self._file.verify((index * self._value_bytes + self._start_byte) >> _BLOCK_BITS)
        values = self._values[index]
        # As unsigned integers, negative values are large.
        if self._bound is not None and values.view(self._unsigned_type).max() >= self._bound:
            raise StageError(
                f"{self._file.path}: the file has values {values.min()} to {values.max()}, but the model needs 0 to "
                f"{self._bound - 1}; package the model again"
            )
        return values
