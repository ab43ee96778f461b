"""Decompression bombs are rejected before they are decompressed, and damaged pages before their values are used."""

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
from tests.recsys_core.ingest.parquet_files import input_error, write_parquet

ALL = ["user", "item", "t"]
JUDGE = """
import resource, sys
from recsys_core.parquet.guards import check_expansion
from recsys_core.parquet.sources import open_sources
from recsys_core.errors import InputError
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
open_sources([sys.argv[1]], setting="s")
before = peak()
try:
    check_expansion(open_sources([sys.argv[1]], setting="s"), columns=sys.argv[2:], max_expansion_ratio=1000, setting="s")
except InputError as error:
    print((peak() - before) // 1024, "MiB", error)
"""


def check_files(paths: str | list[str], *columns: str, max_expansion_ratio: float = 1000) -> None:
    sources = open_sources([paths] if isinstance(paths, str) else paths, setting="s")
    check_expansion(
        sources, columns=columns, max_expansion_ratio=max_expansion_ratio, setting="interactions.max_expansion_ratio"
    )


def test_bombs_are_rejected_within_a_few_megabytes(tmp_path: Path) -> None:
    cases = {list_bomb(tmp_path / "lists.parquet"): ["item_id", "vector"], text_bomb(tmp_path / "text.parquet"): ["user_id"]}
    for path, columns in cases.items():
        assert Path(path).stat().st_size < 76 * 1024
        process = subprocess.run([sys.executable, "-c", JUDGE, path, *columns], capture_output=True, text=True, check=True)
        grown, _, message = process.stdout.partition(" MiB ")
        assert int(grown) < 64
        assert "is this a decompression bomb? s is 1000; raise it if the file is sound" in message


def test_a_decompression_bomb_is_rejected_with_its_sizes_unless_the_setting_allows_it(tmp_path: Path) -> None:
    path = list_bomb(tmp_path / "bomb.parquet")
    size = Path(path).stat().st_size
    with input_error(
        f"bomb.parquet: {size:,} bytes decode to 9,0", "in the columns ['vector']", "interactions.max_expansion_ratio is"
    ):
        check_files(path, "vector")
    check_files(path, "vector", max_expansion_ratio=1e9)
    check_files(path, "item_id")


def test_a_dictionary_string_counts_as_often_as_it_is_used(tmp_path: Path) -> None:
    path = text_bomb(tmp_path / "bomb.parquet")
    with input_error("bomb.parquet: ", "is this a decompression bomb?"):
        check_files(path, "user_id")
    check_files(path, "user_id", max_expansion_ratio=1e9)


def test_one_long_string_among_short_ones_is_accepted(tmp_path: Path) -> None:
    ids = pa.DictionaryArray.from_arrays(
        pa.array(np.arange(400_000) % 1000), pa.array([f"{n}" for n in range(999)] + ["x" * 10_000])
    )
    short = pa.DictionaryArray.from_arrays(pa.array(np.zeros(400_000, np.int32)), pa.array(["a", "x" * 10_000]))
    check_files(write_parquet(tmp_path / "a.parquet", id=ids, short=short), "id", "short")


def test_strings_in_lists_are_counted_too(tmp_path: Path) -> None:
    values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(400_000, np.int32)), pa.array(["x" * 4096]))
    tags = pa.ListArray.from_arrays(pa.array(np.arange(0, 400_001, 4), pa.int32()), values)
    with input_error("a.parquet: ", "is this a decompression bomb?"):
        check_files(write_parquet(tmp_path / "a.parquet", tags=tags), "tags")


def test_many_small_bombs_are_one_bomb(tmp_path: Path) -> None:
    column = pa.array(np.zeros(30_000_000, np.int64))
    path = Path(write_parquet(tmp_path / "part-0.parquet", row_group_size=30_000_000, x=column))
    paths = [str(path)] + [str(tmp_path / f"part-{index}.parquet") for index in range(1, 6)]
    for other in paths[1:]:
        Path(other).write_bytes(path.read_bytes())
    check_files(paths[:4], "x")
    with input_error("part-0.parquet and 5 more: ", "is this a decompression bomb?"):
        check_files(paths, "x")


def test_small_data_that_compresses_well_is_accepted(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", x=pa.nulls(5_000_000, pa.int64()), t=["same"] * 5_000_000)
    check_files(path, "x", "t", max_expansion_ratio=1.1)


def log(path: Path, *, checksums: bool, compression: str = "snappy", dictionary: bool = True) -> bytes:
    random = np.random.default_rng(0)
    table = pa.table(
        {
            "user": [f"user-{number}" for number in random.integers(0, 500, 6000)],
            "item": random.integers(0, 2**60, 6000),
            "t": pa.array(random.integers(0, 10**9, 6000), pa.timestamp("us")),
        }
    )
    written: dict[str, Any] = {"compression": compression, "use_dictionary": dictionary, "row_group_size": 2000}
    pq.write_table(table, path, write_page_checksum=checksums, data_page_size=4096, **written)
    return path.read_bytes()


def verdict(path: Path) -> str | None:
    """Return the message of verify_pages, or None for a valid file."""
    try:
        (source,) = open_sources([str(path)], setting="s")
        check_expansion([source], columns=ALL, max_expansion_ratio=1000, setting="s")
        verify_pages(source, ALL)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("checksums", [True, False])
def test_a_whole_file_passes(tmp_path: Path, checksums: bool) -> None:
    log(tmp_path / "a.parquet", checksums=checksums)
    assert verdict(tmp_path / "a.parquet") is None


def test_a_flipped_byte_in_the_values_of_a_page_with_a_checksum_is_always_found(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    content = log(path, checksums=True, compression="none", dictionary=False)
    items = pq.read_table(path)["item"].to_numpy()
    random = np.random.default_rng(1)
    for row in random.integers(0, 6000, 60):
        damaged = bytearray(content)
        damaged[content.index(items[row].tobytes()) + int(random.integers(8))] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        start = row // 2000 * 2000
        message = verdict(path)
        assert message is not None
        assert f"a.parquet: column 'item', rows {start:,} to {start + 1999:,}: a page is damaged (" in message
        assert "copy or write the file again" in message and "\n" not in message


@pytest.mark.parametrize("compression", ["snappy", "zstd"])
def test_with_checksums_a_flipped_byte_anywhere_is_found_or_changes_nothing(tmp_path: Path, compression: str) -> None:
    """The checksum does not cover the page header, where an unused byte may flip without effect."""
    path = tmp_path / "a.parquet"
    content = log(path, checksums=True, compression=compression)
    undamaged_table = pq.read_table(path)
    random = np.random.default_rng(2)
    num_found = 0
    for position in random.integers(4, len(content), 60):
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        if verdict(path) is None:
            (source,) = open_sources([str(path)], setting="s")
            with source.open() as file:
                assert file.read().equals(undamaged_table)
        else:
            num_found += 1
    assert num_found > 40


def test_without_checksums_undecodable_pages_are_rejected_and_no_other_error_is_raised(tmp_path: Path) -> None:
    """Most damage to plain numbers decodes to other numbers, which only a checksum could detect."""
    path = tmp_path / "a.parquet"
    content = log(path, checksums=False, compression="zstd")
    random = np.random.default_rng(3)
    verdicts = []
    for position in random.integers(4, len(content), 60):
        damaged = bytearray(content)
        damaged[position : position + 4] = random.bytes(4)
        path.write_bytes(damaged)
        verdicts.append(verdict(path))
    assert 0 < sum(message is not None for message in verdicts) < 60


def test_hive_keys_have_no_pages(tmp_path: Path) -> None:
    (source,) = open_sources([write_parquet(tmp_path / "dt=1" / "a.parquet", x=[1])], setting="s")
    verify_pages(source, ["dt", "x"])
    verify_pages(source, ["dt"])
