"""A disk or memory limit that is too small for DuckDB ends the stage with one message and no file left."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.log.test_ingest_full_disk import LAST_OUT, log
from tests.recsys_core.ingest.parquet_files import assert_rejects, write_parquet


def test_a_disk_that_fills_up_while_duckdb_spills(tmp_path: Path, small_disk: Path) -> None:
    path = log(tmp_path, rows=400_000, ids=2**40)
    assert_rejects(
        lambda folder: ingest(folder, path, split=LAST_OUT, memory_limit="24MB", threads=1), small_disk,
        ", but the disk has 0.00", " GiB free; free some space, or set workspace",
    )  # fmt: skip


@pytest.mark.parametrize("limit", ["1MB", "2MB", "8MB"])
def test_the_error_names_a_memory_limit_that_is_too_small(tmp_path: Path, limit: str) -> None:
    path = log(tmp_path, rows=200_000, ids=2**40)
    message = f"interactions.memory_limit is {limit}, which is too little: "
    assert_rejects(lambda folder: ingest(folder, path, split=LAST_OUT, memory_limit=limit), tmp_path, message)


@pytest.mark.parametrize("num_values", [7, 3_000])
def test_context_values_pass_through_a_part_with_and_without_a_dictionary(tmp_path: Path, num_values: int) -> None:
    rows = range(6_000)
    values: dict[str, Any] = {
        "text": [None if row % 5 == 0 else f"shop {row % num_values}" for row in rows],
        "amount": [Decimal(row % num_values) / 4 for row in rows],
        "seconds": [float(row % num_values) / 3 for row in rows],
        "is_new": [row % 2 == 0 for row in rows],
        "tags": [[f"tag {row % num_values}"] * (row % 3) for row in rows],
        "seen": pa.array([row % num_values for row in rows], pa.timestamp("us")),
    }
    users = ["ann"] * 5_900 + ["bob"] * 100
    path = write_parquet(tmp_path / "log.parquet", user_id=users, item_id=[row % 50 for row in rows], t=list(rows), **values)
    run = ingest(tmp_path / "stage", path, split=LAST_OUT, context_columns=tuple(values))
    stored = pq.read_table(run.path("context.parquet"))
    assert stored.to_pydict() == pq.read_table(path).select(list(values)).to_pydict()
