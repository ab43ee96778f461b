"""Signals during a run: one line with the command that resumes it, an exit code of its own, nothing left running."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills.interrupted_run import interrupt_run, states
from tests.drills.test_kill_and_resume import write_config


@pytest.mark.drill
def test_sigterm_to_the_process_group_ends_a_run_with_the_command_that_resumes_it(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    runs = tmp_path / "workspace" / "runs"
    answer, _ = interrupt_run(
        file,
        "--until",
        "plan_sharding",
        has_begun=lambda: any(runs.glob("*/ingest_embeddings/manifest.json")),
        number=signal.SIGTERM,
    )
    (run,) = runs.iterdir()
    assert answer.returncode == 143, answer.stderr
    assert answer.stdout == ""
    line = f"interrupted by SIGTERM; resume with: nightjar run {file} --resume {run.name}"
    assert answer.stderr.splitlines()[-1] == line
    assert "Traceback" not in answer.stderr and "prefect" not in answer.stderr.replace(line, "").lower(), answer.stderr
    assert "RUNNING" not in states(tmp_path / "workspace")


FINALIZER = """
import signal, sys, time, weakref
from flows.interruption import Interrupted, end_process, interruptible

class Thing:
    pass

class TerminationSignal(BaseException):
    pass

def terminate(*_):
    raise TerminationSignal

def finalize(reference):
    signal.raise_signal(signal.SIGTERM)

try:
    with interruptible(lambda: "resume with: it"):
        if "like Prefect" in sys.argv:
            signal.signal(signal.SIGTERM, terminate)
        thing = Thing()
        reference = weakref.ref(thing, finalize)
        del thing
        time.sleep(60)
except Interrupted as error:
    end_process(error)
"""


@pytest.mark.parametrize("handler", ["own", "like Prefect"])
def test_after_a_signal_in_a_finalizer_the_process_prints_one_line_and_ends(handler: str) -> None:
    answer = subprocess.run([sys.executable, "-c", FINALIZER, handler], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (143, "interrupted by SIGTERM; resume with: it\n")
