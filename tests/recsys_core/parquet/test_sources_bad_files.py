"""Both ingest stages reject damaged or mismatching files before they use a row, and leave no file behind."""

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
Stage = Callable[..., Callable[[Path], object]]


def interactions(path: str | Path, *, root: Path | None = None, **settings: Any) -> Callable[[Path], object]:
    if root is not None:
        config = interaction_logs.InteractionsConfig(
            paths=str(path), split=LEAVE_LAST_OUT, timestamp_column="t", timestamp_unit="us"
        )
        return lambda folder: interaction_logs.ingest_interactions(
            config, embeddings=None, folder=folder, allowed_data_root=root
        )
    return lambda folder: interaction_logs.ingest(folder, str(path), split=LEAVE_LAST_OUT, **settings)


def embeddings(path: str | Path, *, root: Path | None = None, **settings: Any) -> Callable[[Path], object]:
    config = EmbeddingsConfig(paths=str(path), **({"vector_column": "v"} | settings))
    return lambda folder: ingest_embeddings((config,), folder=folder, allowed_data_root=root)


BOTH = pytest.mark.parametrize("stage", [interactions, embeddings])


def damaged(path: Path, cut: Callable[[bytes], bytes]) -> Path:
    write_parquet(path, **VALID_COLUMNS)
    path.write_bytes(cut(path.read_bytes()))
    return path


@BOTH
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda content: b"", "not a readable parquet file (0 bytes): it is empty; write it again"),
        (lambda content: content[: len(content) // 2], "it begins as parquet, but its end is missing: truncated; copy"),
        (lambda content: content[:-1], "its end is missing: truncated"),
        (lambda content: b"id,item\n1,2\n", "(12 bytes): it has no parquet footer; list only parquet files"),
    ],
)
def test_truncated_files_are_rejected(tmp_path: Path, stage: Stage, content: Callable[[bytes], bytes], message: str) -> None:
    path = damaged(tmp_path / "a.parquet", content)
    assert_rejects(stage(path), tmp_path, f"{path}: not a readable parquet file (", message.split("): ")[-1])


@BOTH
def test_missing_files_are_rejected(tmp_path: Path, stage: Stage) -> None:
    assert_rejects(
        stage(tmp_path / "gone.parquet"), tmp_path, f"{stage.__name__}", f"paths: no such file: {tmp_path}/gone.parquet"
    )
    assert_rejects(
        stage(tmp_path / "*.parquet"), tmp_path, f"{stage.__name__}", f"paths: no file matches: {tmp_path}/*.parquet"
    )


@BOTH
def test_tables_without_rows_are_rejected(tmp_path: Path, stage: Stage) -> None:
    pq.write_table(pa.table(VALID_COLUMNS).slice(0, 0), tmp_path / "a.parquet")
    assert_rejects(
        stage(tmp_path / "a.parquet"), tmp_path, f"{tmp_path}/a.parquet: no rows; check the job that writes this table"
    )


@BOTH
def test_a_footer_with_a_wrong_row_count(tmp_path: Path, stage: Stage) -> None:
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table(VALID_COLUMNS), path, compression="none", use_dictionary=False, write_statistics=False)
    patch_footer(path, old=NUM_ROWS, new=NUM_ROWS - 1, occurrence=0)
    assert_rejects(
        stage(path),
        tmp_path,
        f"{path}: not a readable parquet file (",
        "its footer claims 299 rows, but its row groups have 300",
    )


@BOTH
def test_missing_repeated_or_mistyped_columns_are_rejected(tmp_path: Path, stage: Stage) -> None:
    path, table = tmp_path / "a.parquet", pa.table(VALID_COLUMNS)
    pq.write_table(table.rename_columns(["user_id", "itemid", "t", "v"]), path)
    assert_rejects(stage(path), tmp_path, f"{path}: no column 'item_id' ({stage.__name__}", "_column); did you mean 'itemid'?")
    pq.write_table(table.append_column("item_id", table["t"]), path)
    assert_rejects(stage(path), tmp_path, f"{path}: 2 columns are named 'item_id'; rename all but one")
    pq.write_table(table.set_column(1, "item_id", pa.array([0.5] * NUM_ROWS)), path)
    assert_rejects(stage(path), tmp_path, f"{path}: column 'item_id' is double, but ids are integers or strings; cast it")


@BOTH
def test_ids_of_mixed_type_are_rejected(tmp_path: Path, stage: Stage) -> None:
    write_parquet(tmp_path / "log" / "a.parquet", **VALID_COLUMNS)
    write_parquet(tmp_path / "log" / "b.parquet", **(VALID_COLUMNS | {"item_id": [str(row) for row in range(NUM_ROWS)]}))
    assert_rejects(
        stage(tmp_path / "log"),
        tmp_path,
        "b.parquet: column 'item_id' is string, but int64 in ",
        "a.parquet; write one type in all files",
    )


def test_bombs(tmp_path: Path) -> None:
    message = ("is this a decompression bomb?", "max_expansion_ratio is 1000; raise it if the file is sound")
    lists = list_bomb(tmp_path / "lists.parquet")
    assert_rejects(embeddings(lists, vector_column="vector"), tmp_path, f"{lists}: ", "decode to 9,0", *message)
    assert_rejects(
        interactions(lists, context_columns=("vector",), timestamp_column="t"), tmp_path,
        f"{lists}: ", *message,
    )  # fmt: skip


@BOTH
@pytest.mark.parametrize("way", ["root/../secret.parquet", "root/link.parquet", "root"])
def test_paths_that_leave_data_root(tmp_path: Path, stage: Stage, way: str) -> None:
    secret = write_parquet(tmp_path / "secret.parquet", **VALID_COLUMNS)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link.parquet").symlink_to(secret)
    message = f"resolves to {secret}, which is not below allowed_data_root ({tmp_path / 'root'}); move"
    assert_rejects(stage(tmp_path / way, root=tmp_path / "root"), tmp_path, f"{stage.__name__}", message)


def noise(path: Path, *, checksums: bool, compression: str) -> bytes:
    random = np.random.default_rng(0)
    table = pa.table(
        {
            "user_id": [f"user-{number}" for number in random.integers(0, 50, 2000)],
            "item_id": [f"item-{number}" for number in range(2000)],
            "t": pa.array(random.integers(0, 10**9, 2000), pa.timestamp("us")),
            "v": list(random.normal(size=(2000, 4)).astype(np.float32)),
        }
    )
    pq.write_table(table, path, write_page_checksum=checksums, compression=compression, data_page_size=2048, row_group_size=900)
    return path.read_bytes()


def stored(folder: Path) -> list[bytes]:
    """Return the files of a stage without its manifest and without the parts, whose row order depends on the threads."""
    return [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file() and path.name != "manifest.json"]


@BOTH
@pytest.mark.parametrize(("checksums", "compression"), [(True, "snappy"), (False, "zstd"), (False, "none")])
def test_flipped_bytes_give_an_error_or_a_complete_stage(
    tmp_path: Path, stage: Stage, checksums: bool, compression: str
) -> None:
    """With checksums, an accepted file has the original values. Without checksums, a number may have changed."""
    path = tmp_path / "a.parquet"
    content = noise(path, checksums=checksums, compression=compression)
    stage(path)(tmp_path / "whole")
    expected, refused = stored(tmp_path / "whole"), 0
    random = np.random.default_rng(4)
    for index, place in enumerate(random.integers(4, len(content), 8)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        folder = tmp_path / "stage" / str(index)
        try:
            stage(path)(folder)
        except InputError as error:
            refused += 1
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error), error
            assert not folder.exists() and not list(folder.parent.glob(f"{folder.name}*"))
        else:
            assert not checksums or stored(folder) == expected
    assert not checksums or refused >= 4


def test_a_string_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    letters = pa.py_buffer(b"\xff\xfe" + b"ab" * (NUM_ROWS - 1))
    broken = pa.StringArray.from_buffers(NUM_ROWS, pa.py_buffer(np.arange(0, 2 * NUM_ROWS + 2, 2, dtype=np.int32)), letters)
    for column, settings in (("item_id", {}), ("place", {"context_columns": ("place",)})):
        path = write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | {column: broken}))
        message = f"{path}: column {column!r}: damaged, or not of the declared type ("
        assert_rejects(interactions(path, **settings), tmp_path, message, "is not valid UTF8!); copy or write the file again")
    path = write_parquet(tmp_path / "a.parquet", **(VALID_COLUMNS | {"item_id": broken}))
    assert_rejects(embeddings(path), tmp_path, f"{path}: column 'item_id': damaged, or not UTF-8 (", "write it again")


def test_a_wrong_checksum_inside_a_gzip_page_is_rejected(tmp_path: Path) -> None:
    """DuckDB ignores the gzip checksum, so without this check the error would be about a bad row."""
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table(VALID_COLUMNS | {"t": list(range(-1, NUM_ROWS - 1))}), path, compression="gzip", use_dictionary=False
    )
    chunk = pq.read_metadata(path).row_group(0).column(2)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size - 6] ^= 1  # gzip ends in a CRC-32 and a length
    path.write_bytes(content)
    assert_rejects(interactions(path), tmp_path, f"{path}: column 't', rows 0 to 299: a page is damaged (GZipCodec failed")
