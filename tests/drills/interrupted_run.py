"""Runs that get a signal in a stage, sent as a terminal, a container or a service manager sends it."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 240.0


def interrupted(
    file: Path, *arguments: str, begun: Callable[[], bool], number: signal.Signals
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Start a run, send the signal to its process group once `begun` returns true, and return how and after how long it ended.

    Returns: the ended process; seconds between the signal and its end.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", str(file), *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not begun():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the stage did not begin"
        time.sleep(0.005)
    below = psutil.Process(process.pid).children(recursive=True)
    sent = time.monotonic()
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=PATIENCE_S)
    took = time.monotonic() - sent
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive, [survivor.cmdline() for survivor in alive]
    return subprocess.CompletedProcess(process.args, process.returncode, out, err), took


def states(workspace: Path) -> set[str]:
    """Return the states of all flow runs and task runs in the database of the embedded Prefect."""
    with closing(sqlite3.connect(workspace / "prefect" / "prefect.db")) as database:
        return {row[0] for table in ("flow_run", "task_run") for row in database.execute(f"SELECT state_type FROM {table}")}
