"""Signals during a run: the last line is the resume command, and no flow run is left in state RUNNING."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills.interrupted_run import ROOT, interrupt_run, state_types
from tests.drills.restartable_server import clean_environment
from tests.drills.test_kill_and_resume import write_config


@pytest.mark.drill
def test_after_sigterm_the_last_line_of_a_run_is_the_resume_command(tmp_path: Path) -> None:
    config_path = write_config(tmp_path)
    runs_folder = tmp_path / "workspace" / "runs"
    process, _ = interrupt_run(
        config_path,
        "--until",
        "plan_sharding",
        has_begun=lambda: any(runs_folder.glob("*/ingest_embeddings/manifest.json")),
        stop_signal=signal.SIGTERM,
    )
    (run_folder,) = runs_folder.iterdir()
    assert process.returncode == 143, process.stderr
    assert process.stdout == ""
    resume_line = f"interrupted by SIGTERM; resume with: nightjar run {config_path} --resume {run_folder.name}"
    assert process.stderr.splitlines()[-1] == resume_line
    assert "Traceback" not in process.stderr and "prefect" not in process.stderr.replace(resume_line, "").lower(), (
        process.stderr
    )
    assert "RUNNING" not in state_types(tmp_path / "workspace")


INTERRUPTED_FLOW = """
import signal
from prefect import flow

@flow
def interrupted_flow():
    try:
        signal.raise_signal(signal.SIGTERM)
    except BaseException:
        raise OSError("the connection was interrupted") from None
"""

SESSION_SCRIPT = """
from pathlib import Path
from flows.cli.commands.session import FlowCommand, flow_session
from flows.interruption import Interrupted, end_process
from flows.servers.prefect_server import embedded_server
from flows.settings.template import starter_config
from tasks.runs.run import Run

config = starter_config().with_absolute_paths(Path.cwd())
try:
    with embedded_server() as server:
        command = FlowCommand(config, server, Run("r", workspace=config.workspace), "nightjar run a.yaml")
        with flow_session(command, "interrupted:interrupted_flow") as interrupted_flow:
            interrupted_flow()
except Interrupted as error:
    end_process(error)
"""


def test_a_flow_run_whose_error_replaces_the_signal_ends_as_crashed(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_FLOW)
    workspace = tmp_path / "workspace"
    process = subprocess.run(
        [sys.executable, "-c", SESSION_SCRIPT],
        cwd=tmp_path,
        env=clean_environment() | {"PREFECT_HOME": str(workspace / "prefect"), "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 143, process.stderr
    assert process.stderr.splitlines()[-1] == "interrupted by SIGTERM; resume with: nightjar run a.yaml"
    assert state_types(workspace) == {"CRASHED"}


FINALIZER_SCRIPT = """
import signal, sys, time, weakref
from flows.interruption import Interrupted, end_process, interruptible
from recsys_core.termination import raise_interrupts

class Finalized:
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
        finalized = Finalized()
        reference = weakref.ref(finalized, finalize)
        del finalized
        time.sleep(float(sys.argv[1]))
        with raise_interrupts():
            print("the next stage has started")
except Interrupted as error:
    end_process(error)
"""


@pytest.mark.parametrize("signal_handler", ["of nightjar", "like Prefect"])
@pytest.mark.parametrize("seconds_to_next_stage", ["60", "0.1"])
def test_a_signal_in_a_finalizer_ends_the_process_with_one_line(signal_handler: str, seconds_to_next_stage: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", FINALIZER_SCRIPT, seconds_to_next_stage, signal_handler],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (process.returncode, process.stdout) == (143, "")
    assert process.stderr == "interrupted by SIGTERM; resume with: it\n"
