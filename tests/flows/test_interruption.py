"""Signals during a run: one line that says how to resume, an exit code of its own, nothing left running."""

import signal
from pathlib import Path

from tests.drills.interrupting import interrupted, states
from tests.drills.test_kill_and_resume import write_config


def test_sigterm_to_the_process_group_ends_a_night_with_the_line_that_resumes_it(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    runs = tmp_path / "workspace" / "runs"
    answer, _ = interrupted(
        file, "--until", "plan_sharding", begun=lambda: any(runs.glob("*/embeddings/manifest.json")), number=signal.SIGTERM
    )
    (run,) = runs.iterdir()
    assert answer.returncode == 143, answer.stderr
    assert answer.stdout == ""
    line = f"interrupted by SIGTERM; resume with: nightjar run {file} --resume {run.name}"
    assert answer.stderr.splitlines()[-1] == line
    assert "Traceback" not in answer.stderr and "prefect" not in answer.stderr.replace(line, "").lower(), answer.stderr
    assert "RUNNING" not in states(tmp_path / "workspace")
