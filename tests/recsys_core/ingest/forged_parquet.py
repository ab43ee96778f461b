"""Parquet files with a false footer, and decompression bombs."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def patch_footer(path: str, *, old: int, new: int, nth: int) -> None:
    """Replace the nth number `old` in the footer by `new`. Both must have the same length in thrift's encoding."""
    content = Path(path).read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    before, after = _varint(old), _varint(new)
    assert len(before) == len(after), (before, after)
    for _ in range(nth + 1):
        position = content.index(before, start)
        start = position + 1
    Path(path).write_bytes(content[:position] + after + content[position + len(after) :])


def _varint(number: int) -> bytes:
    remaining_bits, encoded = (number << 1) ^ (number >> 63), bytearray()
    while remaining_bits > 127:
        encoded.append(remaining_bits & 127 | 128)
        remaining_bits >>= 7
    return bytes([*encoded, remaining_bits])


def list_bomb(path: Path) -> str:
    """Write 9 GB of vectors as 125 row groups that share the same few bytes."""
    rows, dim = 20_000, 900
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows * dim, np.float32)), dim).cast(pa.list_(pa.float32()))
    ids = pa.array(np.zeros(rows, np.int64))
    table = pa.table({"user_id": ids, "item_id": ids, "t": ids, "vector": vectors})
    pq.write_table(table, path, compression="zstd", write_statistics=False, data_page_size=1 << 26, row_group_size=rows)
    content = path.read_bytes()
    data = content[: len(content) - 8 - int.from_bytes(content[-8:-4], "little")]
    footer, once = pq.read_metadata(path), pq.read_metadata(path)
    for _ in range(124):
        footer.append_row_groups(once)
    footer.write_metadata_file(path)
    path.write_bytes(data + path.read_bytes()[4:])
    return str(path)


def text_bomb(path: Path) -> str:
    """Write 9.8 GB of strings: one string of 4,096 characters 2,400,000 times."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(600_000, np.int32)), pa.array(["x" * 4096]))
    with pq.ParquetWriter(path, pa.schema([("user_id", column.type)]), compression="zstd", write_statistics=False) as writer:
        for _ in range(4):
            writer.write_table(pa.table({"user_id": column}), row_group_size=len(column))
    return str(path)
