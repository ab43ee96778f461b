"""Small parquet files, and assertions about the rejection of an input."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.errors import InputError


def write_parquet(path: Path, *, row_group_size: int | None = None, **columns: Any) -> str:
    """Write a parquet file with `columns` and return its path as a string. By default it has one row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return str(path)


def damage_data(path: str) -> None:
    """Overwrite the first half of the file. The footer stays intact."""
    content = bytearray(Path(path).read_bytes())
    start, stop = 4, len(content) // 2
    content[start:stop] = b"\xff" * (stop - start)
    Path(path).write_bytes(content)


@contextmanager
def raises_input_error(*message_parts: str) -> Iterator[None]:
    """Assert that the block raises an InputError. The message is one line and has `message_parts` in this order."""
    with pytest.raises(InputError) as error_info:
        yield
    message = str(error_info.value)
    assert re.search(".*".join(re.escape(part) for part in message_parts), message), message
    assert "\n" not in message


def assert_rejects(write_stage: Callable[[Path], object], folder: Path, *message_parts: str) -> None:
    """Assert that `write_stage` raises an InputError with `message_parts` in this order and leaves no stage in `folder`."""
    with raises_input_error(*message_parts):
        write_stage(folder / "stage")
    assert [path for path in folder.iterdir() if path.name.startswith("stage")] == []
