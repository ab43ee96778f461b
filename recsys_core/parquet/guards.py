"""Two looks at a new file before its rows are used: does it blow up, and are its pages whole?"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys_core.errors import InputError, first_line, shown_names
from recsys_core.parquet.sources import Source

HARMLESS_BYTES = 1 << 30
"""What decodes to no more than this is never taken for a bomb."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
"""Bytes of a decoded value; of a string, those of its offset."""
_HEADER_BYTES = 64
_NEXT_NUMBER = b"\x15"
"""Thrift's compact protocol: the next field is a 32-bit number."""
_BATCH_BYTES = 64 * 1024 * 1024
_BATCH_ROWS = 262_144
_BROKEN = (pa.ArrowException, OSError, UnicodeError)


def refuse_bombs(
    sources: Sequence[Source], *, columns: Sequence[str], max_expansion: float, setting: str, texts: bool = True
) -> None:
    """Refuses files whose `columns` decode to more than 1 GiB and more than `max_expansion` times the bytes of the file.

    Numbers and lists are counted from the footers, so in no time and no memory. The length of strings is not in a footer: the
    dictionaries are read too (0.2 s for 20 million rows), and their use is counted only where it could come to that much.

    Args:
        setting: the config key of max_expansion, for messages.
        texts: whether strings are counted; a reader that keeps them in dictionaries need not.

    Raises:
        InputError: a file, or all together, would decode to more; or a dictionary cannot be read.
    """
    sizes = []
    for source in sources:
        decoded = _fixed_bytes(source, columns)
        _refuse(source.name, decoded, source.record.bytes, columns, max_expansion=max_expansion, setting=setting)
        limit = max(HARMLESS_BYTES, max_expansion * source.record.bytes)
        decoded += _text_bytes(source, columns, enough=limit - decoded) if texts else 0
        _refuse(source.name, decoded, source.record.bytes, columns, max_expansion=max_expansion, setting=setting)
        sizes.append(decoded)
    total = sum(source.record.bytes for source in sources)
    first, more = sources[0].name, len(sources) - 1
    _refuse(f"{first} and {more} more", sum(sizes), total, columns, max_expansion=max_expansion, setting=setting)


def _refuse(name: str, decoded: float, size: int, columns: Sequence[str], *, max_expansion: float, setting: str) -> None:
    if decoded > HARMLESS_BYTES and decoded > max_expansion * size:
        raise InputError(
            f"{name}: {size:,} bytes that decode to {decoded:,.0f} or more in the columns "
            f"{shown_names(columns, at_most=10)}, {decoded / size:,.0f} times as much: "
            f"is this a decompression bomb? {setting} is {max_expansion:g}; raise it if the file is sound"
        )


def _fixed_bytes(source: Source, columns: Sequence[str]) -> float:
    """Bytes of the decoded columns, without the characters of strings in dictionaries."""
    footer = source.footer
    leaves = footer.leaves_of(columns)
    width_L = np.array([footer.leaves[leaf].width or _WIDTHS.get(footer.leaves[leaf].physical_type, 8) for leaf in leaves])
    # As float: a count that lies may well be near the end of int64.
    decoded = float(np.maximum(footer.values_GL[:, leaves] * width_L.astype(float), footer.uncompressed_GL[:, leaves]).sum())
    # A null among lists of a fixed size is one value in the file, and a whole list in memory.
    for column in set(columns) & set(source.schema.names):
        kind = source.schema.field(source.schema.names.index(column)).type
        if pa.types.is_fixed_size_list(kind):
            decoded = max(decoded, source.record.rows * float(kind.list_size) * max(1, _bits(kind.value_type) // 8))
    return decoded


def _bits(kind: pa.DataType) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:  # of variable length
        return 8


def _text_bytes(source: Source, columns: Sequence[str], *, enough: float) -> int:
    """Bytes of the characters of all strings that stand in dictionaries; stops counting beyond `enough`."""
    footer, decoded = source.footer, 0
    texts = [leaf for leaf in footer.leaves_of(columns) if footer.leaves[leaf].physical_type == "BYTE_ARRAY"]
    # No string is longer than its chunk.
    if (footer.values_GL[:, texts].astype(float) * footer.uncompressed_GL[:, texts]).sum() <= enough:
        return 0
    for leaf in texts:
        path = footer.leaves[leaf].path
        try:
            with source.open(read_dictionary=[path]) as file:
                for group in range(len(footer.group_rows_G)):
                    longest = _longest(next(file.iter_batches(1, row_groups=[group], columns=[path]), None))
                    values = int(footer.values_GL[group, leaf])
                    if decoded + values * longest <= enough:
                        decoded += values * longest
                        continue
                    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[path]):
                        decoded += _used(batch)
                        if decoded > enough:
                            return decoded
        except _BROKEN as error:
            raise InputError(_damaged(source, path, error)) from error
    return decoded


def _dictionary(batch: pa.RecordBatch) -> pa.DictionaryArray | None:
    array = batch.column(0)
    while pa.types.is_nested(array.type) and not pa.types.is_dictionary(array.type):
        array = array.flatten() if not pa.types.is_struct(array.type) else array.field(0)
    return array if pa.types.is_dictionary(array.type) else None


def _longest(batch: pa.RecordBatch | None) -> int:
    array = _dictionary(batch) if batch is not None else None
    return 0 if array is None else int(pc.max(pc.binary_length(array.dictionary)).as_py() or 0)


def _used(batch: pa.RecordBatch) -> int:
    array = _dictionary(batch)
    return (
        0 if array is None else int(pc.sum(pc.binary_length(array.dictionary).take(array.indices).cast("int64")).as_py() or 0)
    )


def has_checksums(source: Source, columns: Sequence[str]) -> bool:
    """Whether the first page of one of `columns` has a checksum, or a header that does not read as it should."""
    starts = {int(start) for start in source.footer.start_GL[:1, source.footer.leaves_of(columns)].flat}
    try:
        with source.location.filesystem.open_input_file(source.location.path) as file:
            return any(_checksum_stored(file.read_at(_HEADER_BYTES, start)) for start in starts)
    except _BROKEN as error:
        raise InputError(f"{source.name}: cannot be read: {first_line(error)}") from error


def _checksum_stored(header: bytes) -> bool:
    """A page header in Thrift's compact protocol begins with three numbers (kind, two sizes); a fourth is the CRC-32."""
    at = 0
    for _ in range(3):
        if header[at : at + 1] != _NEXT_NUMBER:
            return True
        at += 1
        while at < len(header) and header[at] & 0x80:  # all bytes of a number but its last
            at += 1
        at += 1
    return header[at : at + 1] == _NEXT_NUMBER


def verify_pages(source: Source, columns: Sequence[str]) -> None:
    """Reads `columns` once, comparing each page with its checksum where the writer stored one.

    A flipped byte in a page with a checksum is always found; in one without, only what cannot be decoded. After refuse_bombs:
    memory is bounded by a batch of 64 MiB or 262,144 rows.

    Raises:
        InputError: a page is damaged; names the file, the column and the rows of its row group.
    """
    names = [column for column in dict.fromkeys(columns) if column in source.schema.names]
    try:
        with source.open(page_checksum_verification=True) as file:
            rows = sum(_rows(file, source, names))
    except _BROKEN as error:
        raise InputError(_located(source, names, error)) from error
    if names and rows != source.record.rows:
        raise InputError(_located(source, names, None))


def _rows(file: pq.ParquetFile, source: Source, columns: Sequence[str], groups: Sequence[int] | None = None) -> Iterator[int]:
    if not columns:
        return
    row_bytes = int(_fixed_bytes(source, columns)) // max(1, source.record.rows) + 1
    size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
    for batch in file.iter_batches(size, row_groups=groups, columns=list(columns)):
        yield batch.num_rows


def _located(source: Source, columns: Sequence[str], found: BaseException | None) -> str:
    """The message for the first row group of the first column that does not read."""
    start = 0
    for group in range(len(source.footer.group_rows_G)):
        wanted = int(source.footer.group_rows_G[group])
        for column in columns:
            why: BaseException | None = None
            try:
                with source.open(page_checksum_verification=True) as file:
                    whole = sum(_rows(file, source, [column], [group])) == wanted
            except _BROKEN as error:
                whole, why = False, error
            if not whole:
                return _damaged(source, column, why, rows=f", rows {start:,} to {start + wanted - 1:,}")
        start += wanted
    return _damaged(source, columns[0], found)


def _damaged(source: Source, column: str, error: BaseException | None, *, rows: str = "") -> str:
    told = first_line(error) if error is not None else "rows are missing"
    return f"{source.name}: column {column!r}{rows}: a page is damaged ({told}); copy or write the file anew"
