"""A disk or memory limit that is too small for DuckDB ends the stage with one message and no file left."""

from pathlib import Path

import pytest

from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.log.test_ingest_full_disk import LAST_OUT, log
from tests.recsys_core.ingest.parquet_files import refuses


def test_a_disk_that_fills_up_while_duckdb_spills(tmp_path: Path, small_disk: Path) -> None:
    path = log(tmp_path, rows=400_000, ids=2**40)
    refuses(
        lambda folder: ingest(folder, path, split=LAST_OUT, memory_limit="24MB", threads=1), small_disk,
        ", but the disk has 0.00", " GiB free; free some space, or set workspace",
    )  # fmt: skip


@pytest.mark.parametrize("limit", ["1MB", "2MB", "8MB"])
def test_a_memory_limit_that_is_too_small_is_named(tmp_path: Path, limit: str) -> None:
    path = log(tmp_path, rows=200_000, ids=2**40)
    message = f"interactions.memory_limit is {limit}, which is too little: "
    refuses(lambda folder: ingest(folder, path, split=LAST_OUT, memory_limit=limit), tmp_path, message)
