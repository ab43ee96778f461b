"""A disk that fills up during the ingest."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.parquet_files import assert_rejects, write_parquet

LEAVE_LAST_OUT = {"kind": "leave_last_out"}


def write_random_log(folder: Path, *, num_rows: int, num_ids: int = 1_000, **columns: Any) -> str:
    """Write a log with random ids. `columns` replace its columns or are added to them."""
    rng = np.random.default_rng(0)
    column_by_name = {name: rng.integers(0, num_ids, num_rows) for name in ("user_id", "item_id")} | {"t": np.arange(num_rows)}
    return write_parquet(folder / "log.parquet", **(column_by_name | columns))


def random_texts(num_rows: int) -> pa.Array:
    """Return random texts of 16 characters, which do not compress well."""
    return pa.array([np.random.default_rng(row).bytes(8).hex() for row in range(num_rows)])


FULL_DISK_CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "the part": (300_000, 0, {"num_ids": 2**40}, {}),
    "the events": (90_000, 0, {}, {}),
    "the ids": (4_000, 850_000, {"item_id": random_texts(4_000)}, {}),
    "the context": (20_000, 0, {"where": random_texts(20_000)}, {"context_columns": ("where",)}),
}
"""For each file that does not fit: number of log rows, number of used bytes, arguments of write_random_log, and settings."""


@pytest.mark.parametrize("large_file", FULL_DISK_CASES)
def test_a_disk_that_fills_up_during_the_ingest_is_reported(tmp_path: Path, small_disk: Path, large_file: str) -> None:
    num_rows, num_used_bytes, log_arguments, settings = FULL_DISK_CASES[large_file]
    path = write_random_log(tmp_path, num_rows=num_rows, **log_arguments)
    (small_disk / "other_file").write_bytes(b"x" * num_used_bytes)
    assert_rejects(
        lambda folder: ingest(folder, path, split=LEAVE_LAST_OUT, **settings), small_disk,
        ", but the disk has 0.00", " GiB free; free some space, or set workspace to a folder on a larger disk",
    )  # fmt: skip
