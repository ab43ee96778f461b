"""Fixtures of all drills: signals, a check for processes that a drill leaves behind, and a browser page."""

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil
import pytest

from tests.drills.chromium import browser_page

END_TIMEOUT_S = 10.0
MARK_VARIABLE = "NIGHTJAR_DRILL"


@pytest.fixture(scope="session", autouse=True)
def default_sigint() -> None:
    """Let child processes handle SIGINT. A shell that runs the drills in the background ignores it, and children inherit this.

    Otherwise, Prefect's worker would not end after SIGTERM, which it handles by sending itself SIGINT.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def no_servers() -> Iterator[None]:
    """Remove the settings of Prefect and MLflow that the shell or the tests of another module have left in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_"))]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def processes_left(monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Fail if processes of the drill are alive 10 s after the drill; write their number to the JUnit file."""
    if "tests.gloo" in sys.modules:  # the fork server lives as long as pytest, so it must not inherit the mark
        resource_tracker.ensure_running()
        forkserver.ensure_running()
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK_VARIABLE, mark)
    yield
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left_commands := _commands_with_mark(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    record_property("processes_left", len(left_commands))
    assert not left_commands, left_commands


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of headless Chromium; the drill is skipped if chromium or playwright is not installed."""
    with browser_page() as page:
        yield page


def _commands_with_mark(mark: str) -> list[str]:
    """Return the command lines of the processes that inherited the mark."""
    commands = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK_VARIABLE) == mark and process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline()))
        except psutil.Error:  # a process of another user, or one that has just ended
            continue
    return commands
