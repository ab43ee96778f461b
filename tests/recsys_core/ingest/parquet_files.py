"""Small parquet files, and the expectation that a stage rejects one."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.errors import InputError


def write_parquet(path: Path, *, row_group: int | None = None, **columns: Any) -> str:
    """Write a parquet file with `columns` and return its path as a string."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group)
    return str(path)


def damage_data(path: str) -> None:
    """Overwrite the first half of the file; the footer stays intact."""
    content = bytearray(Path(path).read_bytes())
    start, stop = 4, len(content) // 2
    content[start:stop] = b"\xff" * (stop - start)
    Path(path).write_bytes(content)


@contextmanager
def input_error(*parts: str) -> Iterator[None]:
    """Expect an InputError of one line whose message holds all `parts` in this order."""
    with pytest.raises(InputError) as caught:
        yield
    message = str(caught.value)
    assert re.search(".*".join(re.escape(part) for part in parts), message), message
    assert "\n" not in message


def assert_rejects(stage: Callable[[Path], object], folder: Path, *parts: str) -> None:
    """Assert that `stage` raises an InputError with `parts` and leaves no folder behind."""
    with input_error(*parts):
        stage(folder / "stage")
    assert [path for path in folder.iterdir() if path.name.startswith("stage")] == []
