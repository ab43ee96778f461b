"""Checks for decompression bombs and damaged pages in an input file, before its rows are used.

Run `check_expansion` first, because it rejects files that would fill the memory when the other checks decode them.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys_core.errors import InputError, first_line, shown_names
from recsys_core.parquet.sources import Source
from recsys_core.units import GIB, MIB

HARMLESS_BYTES = GIB
"""A file that decodes to at most this number of bytes is never rejected as a decompression bomb."""
_VALUE_BYTES_BY_TYPE = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
"""Bytes of a decoded value of each physical type. For a string (BYTE_ARRAY), this is the size of its offset."""
_PAGE_HEADER_BYTES = 64
_INT32_FIELD_MARKER = b"\x15"
"""Byte of Thrift's compact protocol that announces a 32-bit integer field."""
_BATCH_BYTES = 64 * MIB
_BATCH_ROWS = 262_144
_READ_ERRORS = (pa.ArrowException, OSError, UnicodeError)


def check_expansion(
    sources: Sequence[Source],
    *,
    columns: Sequence[str],
    max_expansion_ratio: float,
    setting: str,
    count_text_bytes: bool = True,
) -> None:
    """Reject decompression bombs: files whose `columns` decode to more than 1 GiB and to far more than the size of the file.

    The sizes of numbers and lists are computed from the footers, without reading data. A footer does not contain the lengths of
    strings, so the dictionaries of the strings are read too (0.2 s for 20 million rows). They give an upper bound of the bytes
    of all strings. The strings themselves are read only if this bound is above the limit.

    Args:
        max_expansion_ratio: largest allowed ratio of decoded bytes to file bytes, for data that decodes to more than 1 GiB.
        setting: config key of max_expansion_ratio, for messages.
        count_text_bytes: whether to count the characters of strings; false for a reader that keeps strings in dictionaries.

    Raises:
        InputError: one file, or the sum of all files, decodes to more bytes than allowed, or a dictionary cannot be read.
    """

    def require_within_limit(subject: str, decoded_bytes: float, file_bytes: int) -> None:
        if decoded_bytes > HARMLESS_BYTES and decoded_bytes > max_expansion_ratio * file_bytes:
            raise InputError(
                f"{subject}: {file_bytes:,} bytes decode to {decoded_bytes:,.0f} or more in the columns "
                f"{shown_names(columns, max_names=10)}, which is {decoded_bytes / file_bytes:,.0f} times as much: "
                f"is this a decompression bomb? {setting} is {max_expansion_ratio:g}; raise it if the file is sound"
            )

    total_decoded_bytes = 0.0
    for source in sources:
        decoded_bytes = _decoded_bytes_from_footer(source, columns)
        require_within_limit(source.name, decoded_bytes, source.record.size_bytes)
        if count_text_bytes:
            ratio_limit_bytes = max_expansion_ratio * source.record.size_bytes
            decoded_bytes += _text_bytes_bound(
                source,
                columns,
                max_text_bytes=max(HARMLESS_BYTES, ratio_limit_bytes) - decoded_bytes,
                # Divided by the number of files, because the sum of all files must be within the limit too.
                max_skipped_bytes=max(HARMLESS_BYTES / len(sources), ratio_limit_bytes) - decoded_bytes,
            )
            require_within_limit(source.name, decoded_bytes, source.record.size_bytes)
        total_decoded_bytes += decoded_bytes
    total_file_bytes = sum(source.record.size_bytes for source in sources)
    require_within_limit(f"{sources[0].name} and {len(sources) - 1} more", total_decoded_bytes, total_file_bytes)


def _decoded_bytes_from_footer(source: Source, columns: Sequence[str]) -> float:
    """Return the bytes of the decoded columns, without the characters of strings in dictionaries."""
    footer = source.footer
    leaf_indices = footer.leaf_indices_of(columns)
    leaves = [footer.leaves[index] for index in leaf_indices]
    value_bytes = np.array([leaf.value_bytes or _VALUE_BYTES_BY_TYPE.get(leaf.physical_type, 8) for leaf in leaves])
    # Computed as float, because the product with a corrupt count may overflow int64.
    chunk_bytes = np.maximum(
        footer.num_values[:, leaf_indices] * value_bytes.astype(float), footer.uncompressed_bytes[:, leaf_indices]
    )
    decoded_bytes = float(chunk_bytes.sum())
    # A null in a column of fixed-size lists is one value in the file, but a whole list in memory.
    for column in set(columns) & set(source.schema.names):
        data_type = source.schema.field(source.schema.names.index(column)).type
        if pa.types.is_fixed_size_list(data_type):
            element_bytes = max(1, _bit_width(data_type.value_type) // 8)
            decoded_bytes = max(decoded_bytes, source.record.num_rows * float(data_type.list_size) * element_bytes)
    return decoded_bytes


def _bit_width(data_type: pa.DataType) -> int:
    try:
        return int(data_type.bit_width)
    except ValueError:  # a type of variable length
        return 8


def _text_bytes_bound(source: Source, columns: Sequence[str], *, max_text_bytes: float, max_skipped_bytes: float) -> int:
    """Return an upper bound of the bytes of all strings in dictionaries. Stop counting above `max_text_bytes`.

    Return 0 without reading a string if the footer proves that all strings together have at most `max_skipped_bytes`.
    """
    footer, text_bytes = source.footer, 0
    text_leaf_indices = [
        index for index in footer.leaf_indices_of(columns) if footer.leaves[index].physical_type == "BYTE_ARRAY"
    ]
    # No string has more bytes than its column chunk.
    chunk_bound_bytes = footer.num_values[:, text_leaf_indices].astype(float) * footer.uncompressed_bytes[:, text_leaf_indices]
    if chunk_bound_bytes.sum() <= max_skipped_bytes:
        return 0
    for leaf_index in text_leaf_indices:
        column_path = footer.leaves[leaf_index].column_path
        try:
            with source.open(read_dictionary=[column_path]) as parquet_file:
                for group_index in range(len(footer.num_group_rows)):
                    first_batch = next(parquet_file.iter_batches(1, row_groups=[group_index], columns=[column_path]), None)
                    longest_text_bytes = _longest_text_bytes(first_batch)
                    num_values = int(footer.num_values[group_index, leaf_index])
                    if text_bytes + num_values * longest_text_bytes <= max_text_bytes:
                        text_bytes += num_values * longest_text_bytes
                        continue
                    for batch in parquet_file.iter_batches(_BATCH_ROWS, row_groups=[group_index], columns=[column_path]):
                        text_bytes += _batch_text_bytes(batch)
                        if text_bytes > max_text_bytes:
                            return text_bytes
        except _READ_ERRORS as error:
            raise _damaged_page_error(source, column_path, error) from error
    return text_bytes


def _dictionary_array(batch: pa.RecordBatch) -> pa.DictionaryArray | None:
    """Return the strings in a batch of one column, without the lists and structs around them.

    Return None if the strings are not stored in a dictionary.
    """
    array = batch.column(0)
    while pa.types.is_nested(array.type) and not pa.types.is_dictionary(array.type):
        array = array.flatten() if not pa.types.is_struct(array.type) else array.field(0)
    return array if pa.types.is_dictionary(array.type) else None


def _longest_text_bytes(batch: pa.RecordBatch | None) -> int:
    array = _dictionary_array(batch) if batch is not None else None
    return 0 if array is None else int(pc.max(pc.binary_length(array.dictionary)).as_py() or 0)


def _batch_text_bytes(batch: pa.RecordBatch) -> int:
    array = _dictionary_array(batch)
    if array is None:
        return 0
    return int(pc.sum(pc.binary_length(array.dictionary).take(array.indices).cast("int64")).as_py() or 0)


def has_page_checksums(source: Source, columns: Sequence[str]) -> bool:
    """Return whether the first page of any of `columns` has a checksum. A header that cannot be parsed counts as a checksum."""
    footer = source.footer
    page_offsets = {int(offset) for offset in footer.first_page_offset[:1, footer.leaf_indices_of(columns)].flat}
    try:
        with source.location.filesystem.open_input_file(source.location.path) as file:
            return any(_has_checksum(file.read_at(_PAGE_HEADER_BYTES, page_offset)) for page_offset in page_offsets)
    except _READ_ERRORS as error:
        raise InputError(f"{source.name}: cannot be read: {first_line(error)}") from error


def _has_checksum(page_header: bytes) -> bool:
    """Return whether a page header (Thrift's compact protocol) has a checksum: its fourth integer field.

    Return True for a header that cannot be parsed.
    """
    byte_index = 0
    for _ in range(3):
        if page_header[byte_index : byte_index + 1] != _INT32_FIELD_MARKER:
            return True
        byte_index += 1
        # The top bit is set in all bytes of an integer except the last.
        while byte_index < len(page_header) and page_header[byte_index] & 0x80:
            byte_index += 1
        byte_index += 1
    return page_header[byte_index : byte_index + 1] == _INT32_FIELD_MARKER


def verify_pages(source: Source, columns: Sequence[str]) -> None:
    """Decode `columns` once, and compare each page with its checksum if the writer stored one.

    A checksum detects every changed byte of its page. Without checksums, only bytes that cannot be decoded are detected. The
    columns are decoded in batches of at most 64 MiB and 262,144 rows, which bounds the memory.

    Raises:
        InputError: a page is damaged. The message names the file, the column and the rows of the row group.
    """
    columns_in_file = [column for column in dict.fromkeys(columns) if column in source.schema.names]
    try:
        with source.open(page_checksum_verification=True) as file:
            num_rows = sum(_batch_row_counts(file, source, columns_in_file))
    except _READ_ERRORS as error:
        raise _first_damage_error(source, columns_in_file, error) from error
    if columns_in_file and num_rows != source.record.num_rows:
        raise _first_damage_error(source, columns_in_file, None)


def _batch_row_counts(
    file: pq.ParquetFile, source: Source, columns: Sequence[str], group_indices: Sequence[int] | None = None
) -> Iterator[int]:
    """Decode `columns` in batches, and yield the number of rows of each batch. group_indices: None for all row groups."""
    if not columns:
        return
    row_bytes = int(_decoded_bytes_from_footer(source, columns)) // max(1, source.record.num_rows) + 1
    rows_per_batch = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
    for batch in file.iter_batches(rows_per_batch, row_groups=group_indices, columns=list(columns)):
        yield batch.num_rows


def _first_damage_error(source: Source, columns: Sequence[str], file_error: BaseException | None) -> InputError:
    """Return the error for the first row group and column that cannot be read.

    file_error: error of the pass over all columns. It is reported if each column can be read on its own.
    """
    first_row = 0
    for group_index, num_rows in enumerate(source.footer.num_group_rows.tolist()):
        for column in columns:
            column_error: BaseException | None = None
            try:
                with source.open(page_checksum_verification=True) as file:
                    is_complete = sum(_batch_row_counts(file, source, [column], [group_index])) == num_rows
            except _READ_ERRORS as read_error:
                is_complete, column_error = False, read_error
            if not is_complete:
                return _damaged_page_error(
                    source, column, column_error, rows_text=f", rows {first_row:,} to {first_row + num_rows - 1:,}"
                )
        first_row += num_rows
    return _damaged_page_error(source, columns[0], file_error)


def _damaged_page_error(source: Source, column: str, error: BaseException | None, *, rows_text: str = "") -> InputError:
    reason = first_line(error) if error is not None else "rows are missing"
    return InputError(
        f"{source.name}: column {column!r}{rows_text}: a page is damaged ({reason}); copy or write the file again"
    )
