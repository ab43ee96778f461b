"""Parquet footers, which are checked before any other part of the file is read."""

import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.parquet import footers
from recsys_core.parquet.footers import read_footers
from recsys_core.parquet.guards import check_expansion, verify_pages
from recsys_core.parquet.locations import find_files
from recsys_core.parquet.sources import open_sources
from tests.recsys_core.ingest.forged_parquet import patch_footer
from tests.recsys_core.ingest.parquet_files import raises_input_error, write_parquet

NUM_GROUP_ROWS = 3000
FILE_WITH_INVALID_FOOTER = b"PAR1" + b"\0" * 50 + (43).to_bytes(4, "little") + b"PAR1"
"""Content of a file that declares 43 zero bytes as its footer."""


def write_valid_file(tmp_path: Path) -> str:
    """Write a valid file with the columns a and b in two row groups of 3,000 rows. Return its path.

    In the footer, the number 6,000 occurs once. Then, for each row group, the number 3,000 occurs five times in this order:
    values of a, levels of a, values of b, levels of b, rows.
    """
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 2**60, 2 * NUM_GROUP_ROWS) for name in ("a", "b")}
    path = tmp_path / "x.parquet"
    write_options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table(columns), path, row_group_size=NUM_GROUP_ROWS, **write_options)
    return str(path)


def assert_rejected(path: str, *message_parts: str) -> None:
    """Assert that x.parquet is rejected with a message that has the file size, then `message_parts` in this order."""
    size_bytes = Path(path).stat().st_size
    with raises_input_error(f"x.parquet: not a readable parquet file ({size_bytes:,} bytes): ", *message_parts):
        open_sources([path], setting="paths")


def test_a_valid_file_is_read(tmp_path: Path) -> None:
    (source,) = open_sources([write_valid_file(tmp_path)], setting="paths")
    assert source.record.num_rows == 2 * NUM_GROUP_ROWS
    with source.open() as file:
        assert file.read().num_rows == 2 * NUM_GROUP_ROWS


def test_after_an_error_of_duckdb_the_next_footer_is_parsed_in_a_new_database(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(FILE_WITH_INVALID_FOOTER)
    database = footers._footer_database()
    assert_rejected(str(tmp_path / "x.parquet"))
    assert footers._footer_database() is not database
    open_sources([write_valid_file(tmp_path)], setting="paths")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty; write it again"),
        (b"x", "it has no parquet footer; list only parquet files"),
        (b"PAR1", "it begins as parquet, but its end is missing, so it is truncated"),
        (b"id,item\n1,2\n3,4\n", "it has no parquet footer; list only parquet files"),
        (b"PAR1" + b"\0" * 100, "it begins as parquet, but its end is missing, so it is truncated"),
        (b"PAR1" + b"\0" * 50 + b"PARE", "its footer is encrypted"),
        (FILE_WITH_INVALID_FOOTER, ""),
        (
            b"PAR1" + b"\0" * 50 + (51).to_bytes(4, "little") + b"PAR1",
            "its footer claims 51 bytes, more than fit into the file",
        ),
        (b"PAR1" + b"\0" * 50 + b"\xff\xff\xff\xffPAR1", "its footer claims 4,294,967,295 bytes"),
        (b"PAR1" + b"\0" * 50 + b"\0\0\0\0PAR1", ""),
    ],
)
def test_the_message_about_an_unreadable_footer_has_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    assert_rejected(str(tmp_path / "x.parquet"), message)


def test_a_wrong_footer_length_is_rejected(tmp_path: Path) -> None:
    path = Path(write_valid_file(tmp_path))
    content = path.read_bytes()
    true_length = int.from_bytes(content[-8:-4], "little")
    for wrong_length in (0, 1, 100, 200, true_length - 1, true_length + 1, 100_000):
        path.write_bytes(content[:-8] + wrong_length.to_bytes(4, "little") + b"PAR1")
        assert_rejected(str(path))


@pytest.mark.parametrize(
    ("written_count", "forged_count", "occurrence", "message"),
    [
        (2 * NUM_GROUP_ROWS, 5999, 0, "its footer claims 5,999 rows, but its row groups have 6,000"),
        (2 * NUM_GROUP_ROWS, -2 * NUM_GROUP_ROWS, 0, "negative number of rows"),
        (NUM_GROUP_ROWS, 2999, 0, "row group 0, column 'a' claims 2,999 values for 3,000 rows"),
        (NUM_GROUP_ROWS, 3001, 2, "row group 0, column 'b' claims 3,001 values for 3,000 rows"),
        (NUM_GROUP_ROWS, -NUM_GROUP_ROWS, 5, "row group 1, column 'a' claims -3,000 values"),
        (NUM_GROUP_ROWS, 3001, 4, "row group 0, column 'a' claims 3,000 values for 3,001 rows"),
        (NUM_GROUP_ROWS, -NUM_GROUP_ROWS, 4, "row group 0, column 'a' claims -3,000 rows"),
    ],
)
def test_contradicting_counts_are_rejected(
    tmp_path: Path, written_count: int, forged_count: int, occurrence: int, message: str
) -> None:
    path = write_valid_file(tmp_path)
    patch_footer(path, old=written_count, new=forged_count, occurrence=occurrence)
    assert_rejected(path, message)


def test_bytes_beyond_the_end_of_the_data_are_rejected(tmp_path: Path) -> None:
    path = write_valid_file(tmp_path)
    column_chunk = pq.read_metadata(path).row_group(1).column(1)
    chunk_end = column_chunk.data_page_offset + column_chunk.total_compressed_size
    chunk_start = column_chunk.data_page_offset
    patch_footer(path, old=chunk_start, new=chunk_start + 1, occurrence=0)
    assert_rejected(
        path,
        f"row group 1, column 'b' claims bytes {chunk_start + 1:,} to {chunk_end + 1:,}, but the data ends at {chunk_end:,}",
    )
    patch_footer(path, old=chunk_start + 1, new=-chunk_start, occurrence=0)
    assert_rejected(path, "row group 1, column 'b' claims 3,000 values in ", f" at -{chunk_start:,}")


@pytest.mark.parametrize("sign", [1, -1])
def test_an_impossible_size_is_rejected(tmp_path: Path, sign: int) -> None:
    path = write_valid_file(tmp_path)
    size_bytes = pq.read_metadata(path).row_group(0).column(0).total_compressed_size
    for _ in ("decompressed", "compressed"):  # both sizes are equal, because the file is not compressed
        patch_footer(path, old=size_bytes, new=sign * 1_000_000, occurrence=0)
    assert_rejected(path, "row group 0, column 'a' claims ")


def test_a_footer_without_the_data_is_rejected(tmp_path: Path) -> None:
    metadata = pq.read_metadata(write_valid_file(tmp_path))
    metadata.set_file_path("../../etc/passwd")
    metadata.write_metadata_file(tmp_path / "x.parquet")
    assert_rejected(str(tmp_path / "x.parquet"), "row group 0, column 'a' claims bytes 4 to ", "but the data ends at 4")


def test_a_flipped_bit_of_a_footer_is_rejected_or_harmless(tmp_path: Path) -> None:
    path = Path(write_valid_file(tmp_path))
    content = path.read_bytes()
    footer_length = int.from_bytes(content[-8:-4], "little")
    rng = np.random.default_rng(1)
    for position in rng.choice(np.arange(len(content) - footer_length - 8, len(content)), 100, replace=False):
        damaged_content = bytearray(content)
        damaged_content[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged_content)
        try:
            (source,) = open_sources([str(path)], setting="paths")
        except ValueError as error:  # InputError is a ValueError; no other ValueError may be raised
            assert type(error).__name__ == "InputError" and "\n" not in str(error)
            continue
        assert source.record.num_rows == source.footer.num_group_rows.sum() == 2 * NUM_GROUP_ROWS


@pytest.mark.parametrize("num_rows", [0, 1])
def test_a_footer_that_is_longer_than_the_first_read_is_read_completely(tmp_path: Path, num_rows: int) -> None:
    write_parquet(tmp_path / "some.parquet", **{f"dim_{index}": [0.5] for index in range(2000)})
    wide_path = write_parquet(
        tmp_path / "wide.parquet", **{f"dim_{index}": pa.array([0.5] * num_rows, pa.float64()) for index in range(2000)}
    )
    sources = open_sources([str(tmp_path)], setting="paths")
    assert pq.read_metadata(wide_path).serialized_size > 64 * 1024
    assert [(len(source.schema), source.record.num_rows) for source in sources] == [(2000, 1), (2000, num_rows)]


def test_columns_of_any_name_are_read(tmp_path: Path) -> None:
    column_names = ['a"; DROP TABLE log; --', "it's", "a.b", "a", "ключ\u202e", "x" * 10_000, ""]
    (source,) = open_sources([write_parquet(tmp_path / "x.parquet", **{name: [1] for name in column_names})], setting="paths")
    assert source.schema.names == column_names
    check_expansion([source], columns=column_names, max_expansion_ratio=1000, setting="max_expansion_ratio")
    verify_pages(source, column_names)


def test_reading_many_footers_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(footers, "_LOG_INTERVAL_S", 0.0)
    for index in range(3):
        pq.write_table(pa.table({"a": [index]}), tmp_path / f"{index}.parquet")
    with caplog.at_level(logging.INFO, logger="recsys_core"):
        read_footers(list(find_files(str(tmp_path), setting="paths")))
    assert "read the footers of 2 of 3 parquet files" in caplog.messages
    assert "checked the footers of 2 of 3 parquet files" in caplog.messages
