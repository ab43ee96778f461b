"""Guards against decompression bombs and damaged pages."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.errors import InputError
from recsys_core.parquet.guards import check_expansion, verify_pages
from recsys_core.parquet.sources import open_sources
from tests.recsys_core.ingest.forged_parquet import list_bomb, text_bomb
from tests.recsys_core.ingest.parquet_files import damage_data, raises_input_error, write_parquet

RANDOM_FILE_COLUMNS = ["user", "item", "t"]
CHECK_SCRIPT = """
import resource, sys
from recsys_core.parquet.guards import check_expansion
from recsys_core.parquet.sources import open_sources
from recsys_core.errors import InputError
peak_kib = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path, *columns = sys.argv[1:]
open_sources([path], setting="paths")
peak_before_kib = peak_kib()
try:
    sources = open_sources([path], setting="paths")
    check_expansion(sources, columns=columns, max_expansion_ratio=1000, setting="max_expansion_ratio")
except InputError as error:
    print((peak_kib() - peak_before_kib) // 1024, "MiB", error)
"""
"""Script that checks columns of a file. It prints by how many MiB the check raised the peak memory, then the error."""


def is_accepted(paths: str | list[str], *columns: str, max_expansion_ratio: float = 1000) -> bool:
    """Return whether `check_files` accepts the files."""
    try:
        check_files(paths, *columns, max_expansion_ratio=max_expansion_ratio)
    except InputError:
        return False
    return True


def check_files(paths: str | list[str], *columns: str, max_expansion_ratio: float = 1000) -> None:
    """Raise InputError if the files decode to more than `max_expansion_ratio` times their size."""
    sources = open_sources([paths] if isinstance(paths, str) else paths, setting="paths")
    check_expansion(
        sources, columns=columns, max_expansion_ratio=max_expansion_ratio, setting="interactions.max_expansion_ratio"
    )


def test_bombs_are_rejected_within_a_few_megabytes(tmp_path: Path) -> None:
    columns_by_bomb = {
        list_bomb(tmp_path / "lists.parquet"): ["item_id", "vector"],
        text_bomb(tmp_path / "text.parquet"): ["user_id"],
    }
    for path, columns in columns_by_bomb.items():
        assert Path(path).stat().st_size < 76 * 1024
        process = subprocess.run(
            [sys.executable, "-c", CHECK_SCRIPT, path, *columns], capture_output=True, text=True, check=True
        )
        memory_growth_mib, _, message = process.stdout.partition(" MiB ")
        assert int(memory_growth_mib) < 64
        assert "is this a decompression bomb? max_expansion_ratio is 1000; raise it if the file is sound" in message


def test_a_decompression_bomb_is_rejected_with_its_sizes_unless_the_setting_allows_it(tmp_path: Path) -> None:
    path = list_bomb(tmp_path / "bomb.parquet")
    size_bytes = Path(path).stat().st_size
    with raises_input_error(
        f"bomb.parquet: {size_bytes:,} bytes decode to 9,0", "in the columns ['vector']", "interactions.max_expansion_ratio is"
    ):
        check_files(path, "vector")
    assert is_accepted(path, "vector", max_expansion_ratio=1e9)
    assert is_accepted(path, "item_id")


def test_a_dictionary_string_counts_as_often_as_it_is_used(tmp_path: Path) -> None:
    path = text_bomb(tmp_path / "bomb.parquet")
    with raises_input_error("bomb.parquet: ", "is this a decompression bomb?"):
        check_files(path, "user_id")
    assert is_accepted(path, "user_id", max_expansion_ratio=1e9)


def test_one_long_string_among_short_strings_is_accepted(tmp_path: Path) -> None:
    ids = pa.DictionaryArray.from_arrays(
        pa.array(np.arange(400_000) % 1000), pa.array([f"{number}" for number in range(999)] + ["x" * 10_000])
    )
    short_strings = pa.DictionaryArray.from_arrays(pa.array(np.zeros(400_000, np.int32)), pa.array(["a", "x" * 10_000]))
    assert is_accepted(write_parquet(tmp_path / "a.parquet", id=ids, short=short_strings), "id", "short")


def test_strings_in_lists_are_counted(tmp_path: Path) -> None:
    long_strings = pa.DictionaryArray.from_arrays(pa.array(np.zeros(400_000, np.int32)), pa.array(["x" * 4096]))
    tags = pa.ListArray.from_arrays(pa.array(np.arange(0, 400_001, 4), pa.int32()), long_strings)
    with raises_input_error("a.parquet: ", "is this a decompression bomb?"):
        check_files(write_parquet(tmp_path / "a.parquet", tags=tags), "tags")


def test_the_sizes_of_all_files_are_added(tmp_path: Path) -> None:
    """Each file decodes to 240 MB, and up to 1 GiB is always accepted."""
    zeros = pa.array(np.zeros(30_000_000, np.int64))
    path = Path(write_parquet(tmp_path / "part-0.parquet", row_group_size=30_000_000, x=zeros))
    paths = [str(path)] + [str(tmp_path / f"part-{index}.parquet") for index in range(1, 6)]
    for path_of_copy in paths[1:]:
        Path(path_of_copy).write_bytes(path.read_bytes())
    assert is_accepted(paths[:4], "x")
    with raises_input_error("part-0.parquet and 5 more: ", "is this a decompression bomb?"):
        check_files(paths, "x")


def test_the_strings_of_all_files_are_added(tmp_path: Path) -> None:
    ids = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), pa.array(["x" * 10_000]))
    paths = [write_parquet(tmp_path / f"part-{index}.parquet", id=ids) for index in range(3)]
    assert is_accepted(paths[0], "id")
    with raises_input_error("part-0.parquet and 2 more: ", "decode to 3,0", "is this a decompression bomb?"):
        check_files(paths, "id")


def test_small_data_that_compresses_well_is_accepted(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", x=pa.nulls(5_000_000, pa.int64()), t=["same"] * 5_000_000)
    assert is_accepted(path, "x", "t", max_expansion_ratio=1.1)


def write_random_file(path: Path, *, has_checksums: bool, compression: str = "snappy", use_dictionary: bool = True) -> bytes:
    """Write 6,000 rows in three row groups. Return the content of the file."""
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "user": [f"user-{number}" for number in rng.integers(0, 500, 6000)],
            "item": rng.integers(0, 2**60, 6000),
            "t": pa.array(rng.integers(0, 10**9, 6000), pa.timestamp("us")),
        }
    )
    write_options: dict[str, Any] = {"compression": compression, "use_dictionary": use_dictionary, "row_group_size": 2000}
    pq.write_table(table, path, write_page_checksum=has_checksums, data_page_size=4096, **write_options)
    return path.read_bytes()


def damage_message(path: Path) -> str | None:
    """Return the message about a damaged page; None if the guards accept the file."""
    try:
        (source,) = open_sources([str(path)], setting="paths")
        check_expansion([source], columns=RANDOM_FILE_COLUMNS, max_expansion_ratio=1000, setting="max_expansion_ratio")
        verify_pages(source, RANDOM_FILE_COLUMNS)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("has_checksums", [True, False])
def test_an_undamaged_file_is_accepted(tmp_path: Path, has_checksums: bool) -> None:
    write_random_file(tmp_path / "a.parquet", has_checksums=has_checksums)
    assert damage_message(tmp_path / "a.parquet") is None


def test_a_flipped_bit_in_the_values_of_a_page_with_a_checksum_is_always_detected(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    content = write_random_file(path, has_checksums=True, compression="none", use_dictionary=False)
    item_values = pq.read_table(path)["item"].to_numpy()
    rng = np.random.default_rng(1)
    for row in rng.integers(0, 6000, 60):
        damaged_content = bytearray(content)
        damaged_content[content.index(item_values[row].tobytes()) + int(rng.integers(8))] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged_content)
        group_start = row // 2000 * 2000
        message = damage_message(path)
        assert message is not None
        assert f"a.parquet: column 'item', rows {group_start:,} to {group_start + 1999:,}: a page is damaged (" in message
        assert "copy or write the file again" in message and "\n" not in message


@pytest.mark.parametrize("compression", ["snappy", "zstd"])
def test_with_checksums_a_flipped_bit_anywhere_is_detected_or_changes_no_value(tmp_path: Path, compression: str) -> None:
    """The checksum does not cover the header of a page, where some bits have no effect."""
    path = tmp_path / "a.parquet"
    content = write_random_file(path, has_checksums=True, compression=compression)
    undamaged_table = pq.read_table(path)
    rng = np.random.default_rng(2)
    num_detected = 0
    for position in rng.integers(4, len(content), 60):
        damaged_content = bytearray(content)
        damaged_content[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged_content)
        if damage_message(path) is None:
            (source,) = open_sources([str(path)], setting="paths")
            with source.open() as file:
                assert file.read().equals(undamaged_table)
        else:
            num_detected += 1
    assert num_detected > 40


def test_without_checksums_undecodable_pages_are_rejected(tmp_path: Path) -> None:
    """Damaged bytes of numbers usually decode to other numbers, which only a checksum could detect."""
    path = tmp_path / "a.parquet"
    content = write_random_file(path, has_checksums=False, compression="zstd")
    rng = np.random.default_rng(3)
    messages = []
    for position in rng.integers(4, len(content), 60):
        damaged_content = bytearray(content)
        damaged_content[position : position + 4] = rng.bytes(4)
        path.write_bytes(damaged_content)
        messages.append(damage_message(path))
    assert 0 < sum(message is not None for message in messages) < 60


def test_hive_keys_have_no_pages(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "dt=1" / "a.parquet", x=list(range(1000)))
    damage_data(path)
    (source,) = open_sources([path], setting="paths")
    assert source.columns == ("x", "dt")
    verify_pages(source, ["dt"])
    with raises_input_error("a.parquet: column 'x', rows 0 to 999: a page is damaged"):
        verify_pages(source, ["dt", "x"])
