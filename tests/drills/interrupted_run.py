"""A night that gets a signal in a stage, as a terminal, a container or a service manager sends it."""

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
    """How a night ended that got the signal, as the whole process group does, once `begun` holds; seconds that it took."""
    night = subprocess.Popen(
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
        assert night.poll() is None, night.communicate()[1]
        assert time.monotonic() < deadline, "the stage did not begin"
        time.sleep(0.005)
    below = psutil.Process(night.pid).children(recursive=True)
    sent = time.monotonic()
    os.killpg(night.pid, number)
    out, err = night.communicate(timeout=PATIENCE_S)
    took = time.monotonic() - sent
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive, [process.cmdline() for process in alive]
    return subprocess.CompletedProcess(night.args, night.returncode, out, err), took


def states(workspace: Path) -> set[str]:
    """The states of all flow runs and task runs in the embedded Prefect's database."""
    with closing(sqlite3.connect(workspace / "prefect" / "prefect.db")) as database:
        return {row[0] for table in ("flow_run", "task_run") for row in database.execute(f"SELECT state_type FROM {table}")}
