"""DuckDB sessions: messages about a full disk, and signals during a query."""

import os
import signal
import threading
from pathlib import Path

import duckdb
import pytest

from recsys_core.parquet.duckdb_session import database, raise_interrupts
from tests.recsys_core.ingest.parquet_files import input_error


def test_a_spill_folder_without_disk_space_is_reported_as_a_full_disk(tmp_path: Path) -> None:
    spill_folder = tmp_path / "spill"
    with (
        input_error(str(spill_folder), "DuckDB spills the ids beyond the memory for ids to this folder, but the disk has "),
        database(
            memory_limit="20MB", num_threads=1, spill_folder=spill_folder, subject="the ids", setting="the memory for ids"
        ) as connection,
    ):
        connection.execute("SET max_temp_directory_size = '1MB'")
        connection.execute("CREATE TABLE ids AS SELECT md5(range::VARCHAR) || md5(range::VARCHAR) AS id FROM range(2000000)")


def test_a_signal_during_a_query_raises_the_exception_of_its_handler() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGTERM, interrupt)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    endless_query = "SELECT count(*) FROM range(100000000) a, range(1000) b WHERE a.range * b.range % 7 = 3"
    try:
        with pytest.raises(KeyboardInterrupt), raise_interrupts(), duckdb.connect(config={"threads": 1}) as connection:
            timer.start()
            connection.sql(endless_query).fetchall()
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, previous_handler)


def test_an_ordinary_runtime_error_passes_through_raise_interrupts() -> None:
    with pytest.raises(RuntimeError, match=r"^ordinary$"), raise_interrupts():
        raise RuntimeError("ordinary")
