"""Errors of the DuckDB engine if the disk or the memory limit is too small, and the stored context values."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.log.test_ingest_full_disk import LEAVE_LAST_OUT, write_random_log
from tests.recsys_core.ingest.parquet_files import assert_rejects, write_parquet


def test_a_disk_that_fills_up_while_duckdb_spills_is_reported(tmp_path: Path, small_disk: Path) -> None:
    path = write_random_log(tmp_path, num_rows=400_000, num_ids=2**40)
    assert_rejects(
        lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT, memory_limit="24MB", threads=1), small_disk,
        ", but the disk has 0.00", " GiB free; free some space, or set workspace",
    )  # fmt: skip


@pytest.mark.parametrize("memory_limit", ["1MB", "2MB", "8MB"])
def test_the_error_names_a_memory_limit_that_is_too_small(tmp_path: Path, memory_limit: str) -> None:
    path = write_random_log(tmp_path, num_rows=200_000, num_ids=2**40)
    message = f"interactions.memory_limit is {memory_limit}, which is too little: "
    assert_rejects(lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT, memory_limit=memory_limit), tmp_path, message)


@pytest.mark.parametrize("num_distinct_values", [7, 3_000])
def test_context_values_are_stored_unchanged_with_and_without_a_dictionary(tmp_path: Path, num_distinct_values: int) -> None:
    row_range = range(6_000)
    context_columns: dict[str, Any] = {
        "text": [None if row % 5 == 0 else f"shop {row % num_distinct_values}" for row in row_range],
        "amount": [Decimal(row % num_distinct_values) / 4 for row in row_range],
        "seconds": [float(row % num_distinct_values) / 3 for row in row_range],
        "is_new": [row % 2 == 0 for row in row_range],
        "tags": [[f"tag {row % num_distinct_values}"] * (row % 3) for row in row_range],
        "seen": pa.array([row % num_distinct_values for row in row_range], pa.timestamp("us")),
    }
    users = ["ann"] * 5_900 + ["bob"] * 100
    path = write_parquet(
        tmp_path / "log.parquet", user_id=users, item_id=[row % 50 for row in row_range], t=list(row_range), **context_columns
    )
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, context_columns=tuple(context_columns))
    stored_context = pq.read_table(manifest.path("context.parquet"))
    assert stored_context.to_pydict() == pq.read_table(path).select(list(context_columns)).to_pydict()
