"""A run is interrupted by SIGTERM or Ctrl-C in each of its stages and resumed each time: `make drills`."""

import signal
from pathlib import Path

import pytest

from recsys_core.manifests import STAGES
from tests.drills.interrupted_run import interrupt_run, state_types
from tests.drills.test_kill_and_resume import (
    RUN_ID,
    create_run_folder,
    is_stage_in_progress,
    run_pipeline,
    write_config_with_every_stage,
)

pytestmark = pytest.mark.drill
MAX_END_S = 10.0
FINAL_TYPES = {"CRASHED", "COMPLETED", "CANCELLED"}


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_in_any_stage_ends_the_run_in_time_and_prints_the_command_that_resumes_it(
    tmp_path: Path, stop_signal: signal.Signals
) -> None:
    config_path = write_config_with_every_stage(tmp_path)
    run_folder = create_run_folder(config_path)
    for stage in STAGES:

        def has_begun(stage: str = stage) -> bool:
            # A stage of a few milliseconds may be complete before this process sees its folder.
            return is_stage_in_progress(stage, run_folder) or (run_folder / stage).is_dir()

        process, seconds = interrupt_run(config_path, "--resume", RUN_ID, has_begun=has_begun, stop_signal=stop_signal)
        assert process.returncode == 128 + stop_signal, f"{stage}: {process.stderr}"
        resume_line = f"interrupted by {stop_signal.name}; resume with: nightjar run {config_path} --resume {RUN_ID}"
        assert process.stderr.splitlines()[-1] == resume_line, f"{stage}: {process.stderr}"
        assert "Traceback" not in process.stderr and "ConnectError" not in process.stderr, f"{stage}: {process.stderr}"
        # The server may store the state of a task run after the run. The next run ends such task runs.
        assert state_types(tmp_path / "workspace", tables=["flow_run"]) <= FINAL_TYPES, stage
        assert seconds < MAX_END_S, stage
    assert run_pipeline(config_path)["model"]["alias"] == "champion"
    assert state_types(tmp_path / "workspace") <= FINAL_TYPES
