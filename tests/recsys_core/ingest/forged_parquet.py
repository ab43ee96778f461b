"""Parquet files with a forged footer, and decompression bombs."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def patch_footer(path: str, *, old: int, new: int, occurrence: int) -> None:
    """Replace the number `old` in the footer by `new`, at one occurrence. `occurrence` is 0 for the first occurrence.

    In the encoding of Thrift, both numbers must have the same number of bytes.
    """
    content = Path(path).read_bytes()
    search_start = footer_start(content)
    old_bytes, new_bytes = _varint(old), _varint(new)
    assert len(old_bytes) == len(new_bytes), (old_bytes, new_bytes)
    for _ in range(occurrence + 1):
        position = content.index(old_bytes, search_start)
        search_start = position + 1
    Path(path).write_bytes(content[:position] + new_bytes + content[position + len(new_bytes) :])


def footer_start(content: bytes) -> int:
    """Return the position of the footer. After the footer, the file has the footer length and the text PAR1, 4 bytes each."""
    return len(content) - 8 - int.from_bytes(content[-8:-4], "little")


def _varint(number: int) -> bytes:
    """Return the number in Thrift's encoding: zigzag, then 7 bits per byte."""
    remaining_bits, encoded = (number << 1) ^ (number >> 63), bytearray()
    while remaining_bits > 127:
        encoded.append(remaining_bits & 127 | 128)
        remaining_bits >>= 7
    return bytes([*encoded, remaining_bits])


def list_bomb(path: Path) -> str:
    """Write a small file that decodes to 9 GB of vectors: 125 row groups that share the same bytes."""
    num_rows, vector_width = 20_000, 900
    numbers = pa.array(np.zeros(num_rows * vector_width, np.float32))
    vectors = pa.FixedSizeListArray.from_arrays(numbers, vector_width).cast(pa.list_(pa.float32()))
    ids = pa.array(np.zeros(num_rows, np.int64))
    table = pa.table({"user_id": ids, "item_id": ids, "t": ids, "vector": vectors})
    pq.write_table(table, path, compression="zstd", write_statistics=False, data_page_size=1 << 26, row_group_size=num_rows)
    content = path.read_bytes()
    data_bytes = content[: footer_start(content)]
    footer, row_group_metadata = pq.read_metadata(path), pq.read_metadata(path)
    for _ in range(124):
        footer.append_row_groups(row_group_metadata)
    footer.write_metadata_file(path)
    path.write_bytes(data_bytes + path.read_bytes()[4:])
    return str(path)


def text_bomb(path: Path) -> str:
    """Write a small file that decodes to 9.8 GB: a string of 4,096 characters, 2,400,000 times."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(600_000, np.int32)), pa.array(["x" * 4096]))
    with pq.ParquetWriter(path, pa.schema([("user_id", column.type)]), compression="zstd", write_statistics=False) as writer:
        for _ in range(4):
            writer.write_table(pa.table({"user_id": column}), row_group_size=len(column))
    return str(path)
