"""Figures of the drills for the table in docs/operations.md."""

import time
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest

END_TIMEOUT_S = 10.0
MARK_VARIABLE = "NIGHTJAR_DRILL"


@pytest.fixture(autouse=True)
def processes_left(monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Fail if a process that the drill started is alive 10 s after the drill; the number goes to the JUnit file."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK_VARIABLE, mark)
    yield
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    record_property("processes_left", len(left))
    assert not left, left


def _marked(mark: str) -> list[str]:
    """Return the command lines of the processes that inherited the mark."""
    commands = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK_VARIABLE) == mark and process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline()))
        except psutil.Error:  # a process of another user, or one that has just ended
            continue
    return commands
