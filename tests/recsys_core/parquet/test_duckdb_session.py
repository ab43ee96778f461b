"""Errors of DuckDB are raised as input errors with messages of this project."""

from pathlib import Path

from recsys_core.parquet.duckdb_session import database
from tests.recsys_core.ingest.parquet_files import refusal


def test_a_spill_folder_without_disk_space_is_not_reported_as_too_little_memory(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    with (
        refusal(str(spill), "DuckDB spills the ids beyond the memory for ids to this folder, but the disk has "),
        database(
            memory_limit="20MB", num_threads=1, spill_folder=spill, subject="the ids", setting="the memory for ids"
        ) as connection,
    ):
        connection.execute("SET max_temp_directory_size = '1MB'")
        connection.execute("CREATE TABLE ids AS SELECT md5(range::VARCHAR) || md5(range::VARCHAR) AS id FROM range(2000000)")
