"""Runs that get a signal during a stage. As with Ctrl-C in a terminal, the whole process group gets it."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0


def interrupt_run(
    config_path: Path, *arguments: str, has_begun: Callable[[], bool], stop_signal: signal.Signals
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Start a run, and send the signal to its process group once `has_begun` returns true.

    Returns:
        The ended process, and the seconds between the signal and the end of the process.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", str(config_path), *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + TIMEOUT_S
    while not has_begun():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the stage did not begin"
        time.sleep(0.001)
    descendants = psutil.Process(process.pid).children(recursive=True)
    signal_time_s = time.monotonic()
    os.killpg(process.pid, stop_signal)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    seconds = time.monotonic() - signal_time_s
    _, alive = psutil.wait_procs(descendants, timeout=10)
    assert not alive, [survivor.cmdline() for survivor in alive]
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr), seconds


def state_types(workspace: Path, *, tables: Sequence[str] = ("flow_run", "task_run")) -> set[str]:
    """Return the state types of all flow runs and task runs in the database of the embedded Prefect server."""
    with closing(sqlite3.connect(workspace / "prefect" / "prefect.db")) as database:
        return {row[0] for table in tables for row in database.execute(f"SELECT state_type FROM {table}")}
