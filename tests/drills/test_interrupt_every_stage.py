"""A run is interrupted by SIGTERM or Ctrl-C in each of its stages and resumed each time: `make drills`."""

import signal
from pathlib import Path

import pytest

from recsys_core.manifests import MARKER_NAME, STAGES
from tests.drills.interrupted_run import interrupt_run, states
from tests.drills.test_kill_and_resume import RUN_ID, is_in, run_pipeline, write_config

pytestmark = pytest.mark.drill
WITHIN_S = 10.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_in_any_stage_ends_the_run_in_time_with_the_command_that_resumes_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    file = write_config(tmp_path)
    run = tmp_path / "workspace" / "runs" / RUN_ID
    run.mkdir(parents=True)
    for name in ("config.yaml", MARKER_NAME):  # --resume needs the folder of a run that was started
        (run / name).touch()
    for stage in STAGES:

        def has_begun(stage: str = stage) -> bool:
            return is_in(stage, run)

        process, seconds = interrupt_run(file, "--resume", RUN_ID, has_begun=has_begun, number=number)
        assert process.returncode == 128 + number, f"{stage}: {process.stderr}"
        line = f"interrupted by {number.name}; resume with: nightjar run {file} --resume {RUN_ID}"
        assert process.stderr.splitlines()[-1] == line, f"{stage}: {process.stderr}"
        assert "Traceback" not in process.stderr and "ConnectError" not in process.stderr, f"{stage}: {process.stderr}"
        assert states(tmp_path / "workspace") <= {"CRASHED", "COMPLETED", "CANCELLED"}, stage
        assert seconds < WITHIN_S, stage
    assert run_pipeline(file)["model"]["alias"] == "champion"
