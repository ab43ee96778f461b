"""A disk that is too small ends the stage with one message and no file left, whenever it is full."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.parquet_files import assert_rejects, write_parquet

LAST_OUT = {"kind": "leave_last_out"}


def log(folder: Path, *, rows: int, ids: int = 1_000, **columns: Any) -> str:
    random = np.random.default_rng(0)
    column_by_name = {name: random.integers(0, ids, rows) for name in ("user_id", "item_id")} | {"t": np.arange(rows)}
    return write_parquet(folder / "log.parquet", **(column_by_name | columns))


def words(rows: int) -> pa.Array:
    return pa.array([np.random.default_rng(row).bytes(8).hex() for row in range(rows)])


CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "the part": (300_000, 0, {"ids": 2**40}, {}),
    "the events": (90_000, 0, {}, {}),
    "the ids": (4_000, 850_000, {"item_id": words(4_000)}, {}),
    "the context": (20_000, 0, {"where": words(20_000)}, {"context_columns": ("where",)}),
}
"""The rows of a log, the bytes already on the disk, the columns and the settings."""


@pytest.mark.parametrize("case", CASES)
def test_a_disk_that_fills_up_while_the_log_is_written(tmp_path: Path, small_disk: Path, case: str) -> None:
    rows, there, columns, settings = CASES[case]
    path = log(tmp_path, rows=rows, **columns)
    (small_disk / "already").write_bytes(b"x" * there)
    assert_rejects(
        lambda folder: ingest(folder, path, split=LAST_OUT, **settings), small_disk,
        ", but the disk has 0.00", " GiB free; free some space, or set workspace to a folder on a larger disk",
    )  # fmt: skip
