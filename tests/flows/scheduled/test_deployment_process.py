"""The process of `nightjar up` that runs the deployments: the end of its runs at SIGTERM."""

import asyncio
import signal
import subprocess
from unittest.mock import Mock

import psutil
import pytest

from flows.scheduled.deployment_process import InterruptingRunner


def test_a_run_that_has_just_ended_does_not_prevent_the_interruption_of_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_process, other_process = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    child_processes = [psutil.Process(ended_process.pid), psutil.Process(other_process.pid)]
    ended_process.kill()
    ended_process.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda _: child_processes)
    try:
        asyncio.run(InterruptingRunner.cancel_all(Mock(spec=InterruptingRunner)))
        assert other_process.wait(timeout=60) == -signal.SIGTERM
    finally:
        other_process.kill()
