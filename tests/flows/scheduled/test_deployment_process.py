"""The process of `nightjar up` that runs the deployments: the end of its runs at SIGTERM."""

import asyncio
import signal
import subprocess
from unittest.mock import Mock

import psutil
import pytest

from flows.scheduled.deployment_process import InterruptingRunner


def test_a_run_that_has_just_ended_does_not_prevent_the_interruption_of_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_run, other_run = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    run_processes = [psutil.Process(ended_run.pid), psutil.Process(other_run.pid)]
    ended_run.kill()
    ended_run.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda _: run_processes)
    try:
        asyncio.run(InterruptingRunner.cancel_all(Mock(spec=InterruptingRunner)))
        assert other_run.wait(timeout=60) == -signal.SIGTERM
    finally:
        other_run.kill()
