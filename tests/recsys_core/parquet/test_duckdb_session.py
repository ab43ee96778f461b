"""DuckDB sessions: messages about a full disk."""

from pathlib import Path

from recsys_core.parquet.duckdb_session import database
from tests.recsys_core.ingest.parquet_files import raises_input_error


def test_a_spill_folder_without_disk_space_is_reported_as_a_full_disk(tmp_path: Path) -> None:
    spill_folder = tmp_path / "spill"
    with (
        raises_input_error(
            str(spill_folder), "DuckDB spills the ids beyond the memory for ids to this folder, but the disk has "
        ),
        database(
            memory_limit="20MB", num_threads=1, spill_folder=spill_folder, subject="the ids", setting="the memory for ids"
        ) as connection,
    ):
        connection.execute("SET max_temp_directory_size = '1MB'")
        connection.execute("CREATE TABLE ids AS SELECT md5(range::VARCHAR) || md5(range::VARCHAR) AS id FROM range(2000000)")
