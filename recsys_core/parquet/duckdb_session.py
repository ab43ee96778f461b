"""DuckDB as a stage uses it: bounded in memory, spilling into the stage's own folder, its errors told as ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

from recsys_core.disk import too_small
from recsys_core.errors import InputError, first_line

DAMAGED = (duckdb.Error, duckdb.IOException, duckdb.InvalidInputException)
"""What a damaged file ends in (the base class itself: a broken page header); their other subclasses are our mistakes."""


@contextmanager
def database(
    *, memory_limit: str, threads: int | None, spill: Path, wanted: str, setting: str = "interactions.memory_limit"
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in memory that spills to `spill`. InputError where memory or disk are too small, or a file is damaged.

    wanted: what is made, for messages. setting: what memory_limit is called there.
    """
    settings: dict[str, Any] = {"memory_limit": memory_limit, "temp_directory": str(spill)}
    if threads is not None:
        settings["threads"] = threads
    try:
        with duckdb.connect(config=settings) as connection:
            yield connection
    except duckdb.OutOfMemoryException as error:
        told = first_line(error)
        # Nowhere left to spill to.
        if "failed to offload" in told.lower() or ("temp" in told.lower() and "director" in told.lower()):
            raise too_small(spill, needed=f"what {wanted} take beyond {setting} is spilled here") from error
        raise InputError(f"{setting} is {memory_limit}, which is too little: {told}") from error
    except duckdb.Error as error:
        told = first_line(error)
        if "no space left" in told.lower():
            raise too_small(spill.parent, needed=f"{wanted} does not fit") from error
        if type(error) not in DAMAGED:
            raise
        raise InputError(f"{wanted}: {told}") from error
