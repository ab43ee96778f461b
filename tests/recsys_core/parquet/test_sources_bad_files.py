"""Damaged or mismatching files, which both ingest stages reject before they use a row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.errors import InputError
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from tests.recsys_core.ingest import interaction_logs
from tests.recsys_core.ingest.forged_parquet import list_bomb, patch_footer
from tests.recsys_core.ingest.parquet_files import assert_rejects, write_parquet

LEAVE_LAST_OUT: dict[str, Any] = {"kind": "leave_last_out"}
NUM_ROWS = 300
VALID_COLUMNS: dict[str, Any] = {
    "user_id": [1, 1, 1, 2] * (NUM_ROWS // 4),
    "item_id": list(range(NUM_ROWS)),
    "t": list(range(NUM_ROWS)),
    "v": [[float(row + 1)] for row in range(NUM_ROWS)],
}
StageFactory = Callable[..., Callable[[Path], object]]
"""Type of `interactions` and `embeddings`. The name of each function is also the name of its config section in messages."""


def interactions(path: str | Path, *, data_root: Path | None = None, **settings: Any) -> Callable[[Path], object]:
    """Return a function that ingests the file as a log."""
    if data_root is not None:
        config = interaction_logs.InteractionsConfig(
            paths=str(path), split=LEAVE_LAST_OUT, timestamp_column="t", timestamp_unit="us"
        )
        return lambda folder: interaction_logs.ingest_interactions(
            config, embeddings=None, folder=folder, allowed_data_root=data_root
        )
    return lambda folder: interaction_logs.ingest(folder, str(path), split=LEAVE_LAST_OUT, **settings)


def embeddings(path: str | Path, *, data_root: Path | None = None, **settings: Any) -> Callable[[Path], object]:
    """Return a function that ingests the file as vectors."""
    config = EmbeddingsConfig(paths=str(path), **({"vector_column": "v"} | settings))
    return lambda folder: ingest_embeddings((config,), folder=folder, allowed_data_root=data_root)


for_both_stages = pytest.mark.parametrize("stage_factory", [interactions, embeddings])


def write_damaged_file(path: Path, damage: Callable[[bytes], bytes]) -> Path:
    """Write a valid file, then replace its content by `damage(content)`."""
    write_parquet(path, **VALID_COLUMNS)
    path.write_bytes(damage(path.read_bytes()))
    return path


@for_both_stages
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "it is empty; write it again"),
        (
            lambda content: content[: len(content) // 2],
            "it begins as parquet, but its end is missing, so it is truncated; copy",
        ),
        (lambda content: content[:-1], "its end is missing, so it is truncated"),
        (lambda content: b"id,item\n1,2\n", "it has no parquet footer; list only parquet files"),
    ],
)
def test_truncated_files_and_files_that_are_not_parquet_are_rejected(
    tmp_path: Path, stage_factory: StageFactory, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = write_damaged_file(tmp_path / "a.parquet", damage)
    assert_rejects(stage_factory(path), tmp_path, f"{path}: not a readable parquet file (", message)


@for_both_stages
def test_missing_files_are_rejected(tmp_path: Path, stage_factory: StageFactory) -> None:
    assert_rejects(
        stage_factory(tmp_path / "gone.parquet"),
        tmp_path,
        stage_factory.__name__,
        f"paths: no such file: {tmp_path}/gone.parquet",
    )
    assert_rejects(
        stage_factory(tmp_path / "*.parquet"),
        tmp_path,
        stage_factory.__name__,
        f"paths: no file matches: {tmp_path}/*.parquet",
    )


@for_both_stages
def test_tables_without_rows_are_rejected(tmp_path: Path, stage_factory: StageFactory) -> None:
    pq.write_table(pa.table(VALID_COLUMNS).slice(0, 0), tmp_path / "a.parquet")
    assert_rejects(
        stage_factory(tmp_path / "a.parquet"), tmp_path, f"{tmp_path}/a.parquet: no rows; check the job that writes this table"
    )


@for_both_stages
def test_a_footer_with_a_wrong_row_count_is_rejected(tmp_path: Path, stage_factory: StageFactory) -> None:
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table(VALID_COLUMNS), path, compression="none", use_dictionary=False, write_statistics=False)
    patch_footer(path, old=NUM_ROWS, new=NUM_ROWS - 1, occurrence=0)
    assert_rejects(
        stage_factory(path),
        tmp_path,
        f"{path}: not a readable parquet file (",
        "its footer claims 299 rows, but its row groups have 300",
    )


@for_both_stages
def test_missing_repeated_or_mistyped_columns_are_rejected(tmp_path: Path, stage_factory: StageFactory) -> None:
    path, table = tmp_path / "a.parquet", pa.table(VALID_COLUMNS)
    pq.write_table(table.rename_columns(["user_id", "itemid", "t", "v"]), path)
    assert_rejects(
        stage_factory(path),
        tmp_path,
        f"{path}: no column 'item_id' ({stage_factory.__name__}",
        "_column); did you mean 'itemid'?",
    )
    pq.write_table(table.append_column("item_id", table["t"]), path)
    assert_rejects(stage_factory(path), tmp_path, f"{path}: 2 columns are named 'item_id'; rename all but one")
    pq.write_table(table.set_column(1, "item_id", pa.array([0.5] * NUM_ROWS)), path)
    assert_rejects(
        stage_factory(path), tmp_path, f"{path}: column 'item_id' is double, but ids are integers or strings; cast it"
    )


@for_both_stages
def test_ids_of_mixed_type_are_rejected(tmp_path: Path, stage_factory: StageFactory) -> None:
    write_parquet(tmp_path / "log" / "a.parquet", **VALID_COLUMNS)
    write_parquet(tmp_path / "log" / "b.parquet", **(VALID_COLUMNS | {"item_id": [str(row) for row in range(NUM_ROWS)]}))
    assert_rejects(
        stage_factory(tmp_path / "log"),
        tmp_path,
        "b.parquet: column 'item_id' is string, but int64 in ",
        "a.parquet; write one type in all files",
    )


def test_decompression_bombs_are_rejected(tmp_path: Path) -> None:
    message_parts = ("is this a decompression bomb?", "max_expansion_ratio is 1000; raise it if the file is sound")
    bomb_path = list_bomb(tmp_path / "lists.parquet")
    assert_rejects(embeddings(bomb_path, vector_column="vector"), tmp_path, f"{bomb_path}: ", "decode to 9,0", *message_parts)
    assert_rejects(
        interactions(bomb_path, context_columns=("vector",), timestamp_column="t"), tmp_path,
        f"{bomb_path}: ", *message_parts,
    )  # fmt: skip


@for_both_stages
def test_paths_that_lead_out_of_allowed_data_root_are_rejected(tmp_path: Path, stage_factory: StageFactory) -> None:
    outside_path = write_parquet(tmp_path / "secret.parquet", **VALID_COLUMNS)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link.parquet").symlink_to(outside_path)
    message = f"resolves to {outside_path}, which is not below allowed_data_root ({tmp_path / 'root'}); move"
    assert_rejects(stage_factory(tmp_path / "root", data_root=tmp_path / "root"), tmp_path, stage_factory.__name__, message)


def write_random_file(path: Path, *, has_checksums: bool, compression: str) -> bytes:
    """Write a file that is both a valid log and a valid vector file. Return its content."""
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "user_id": [f"user-{number}" for number in rng.integers(0, 50, 2000)],
            "item_id": [f"item-{number}" for number in range(2000)],
            "t": pa.array(rng.integers(0, 10**9, 2000), pa.timestamp("us")),
            "v": list(rng.normal(size=(2000, 4)).astype(np.float32)),
        }
    )
    pq.write_table(
        table, path, write_page_checksum=has_checksums, compression=compression, data_page_size=2048, row_group_size=900
    )
    return path.read_bytes()


def stage_contents(folder: Path) -> list[bytes]:
    """Return the content of each file of a stage. Skip the manifest, and the parts, whose row order depends on the threads."""
    return [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file() and path.name != "manifest.json"]


@for_both_stages
@pytest.mark.parametrize(("has_checksums", "compression"), [(True, "snappy"), (False, "zstd"), (False, "none")])
def test_a_file_with_a_flipped_bit_is_rejected_or_ingested_completely(
    tmp_path: Path, stage_factory: StageFactory, has_checksums: bool, compression: str
) -> None:
    """With checksums, an accepted file has the original values. Without checksums, a number may have changed."""
    path = tmp_path / "a.parquet"
    content = write_random_file(path, has_checksums=has_checksums, compression=compression)
    stage_factory(path)(tmp_path / "undamaged")
    expected_contents, num_rejected = stage_contents(tmp_path / "undamaged"), 0
    rng = np.random.default_rng(4)
    for index, position in enumerate(rng.integers(4, len(content), 8)):
        damaged_content = bytearray(content)
        damaged_content[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged_content)
        folder = tmp_path / "stage" / str(index)
        try:
            stage_factory(path)(folder)
        except InputError as error:
            num_rejected += 1
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error), error
            assert not folder.exists() and not list(folder.parent.glob(f"{folder.name}*"))
        else:
            if has_checksums:
                assert stage_contents(folder) == expected_contents
    if has_checksums:
        assert num_rejected >= 4


def test_a_string_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    text_bytes = pa.py_buffer(b"\xff\xfe" + b"ab" * (NUM_ROWS - 1))
    invalid_texts = pa.StringArray.from_buffers(
        NUM_ROWS, pa.py_buffer(np.arange(0, 2 * NUM_ROWS + 2, 2, dtype=np.int32)), text_bytes
    )
    for column, settings in (("item_id", {}), ("place", {"context_columns": ("place",)})):
        path = write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | {column: invalid_texts}))
        message = f"{path}: column {column!r}: damaged, or not of the declared type ("
        assert_rejects(interactions(path, **settings), tmp_path, message, "is not valid UTF8!); copy or write the file again")
    path = write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | {"item_id": invalid_texts}))
    assert_rejects(embeddings(path), tmp_path, f"{path}: column 'item_id': damaged, or not UTF-8 (", "write it again")


def test_a_wrong_checksum_inside_a_gzip_page_is_rejected(tmp_path: Path) -> None:
    """DuckDB ignores the checksum of gzip. If nightjar ignored it too, the message would be about the time -1 in row 0."""
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table(VALID_COLUMNS | {"t": list(range(-1, NUM_ROWS - 1))}), path, compression="gzip", use_dictionary=False
    )
    chunk = pq.read_metadata(path).row_group(0).column(2)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size - 6] ^= 1  # gzip ends in a CRC-32 and a length
    path.write_bytes(content)
    assert_rejects(interactions(path), tmp_path, f"{path}: column 't', rows 0 to 299: a page is damaged (GZipCodec failed")
