"""A `nightjar run` that is in progress while a drill stops or starts its servers."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.drills.restartable_server import clean_environment

TIMEOUT_S = 900.0


class StartedRun:
    """A running command `nightjar run --json` and the folder of its run."""

    def __init__(self, config_path: Path, *arguments: str, environment: Mapping[str, str]) -> None:
        self._outputs = config_path.with_name("stdout.txt"), config_path.with_name("stderr.txt")
        self._runs_folder = config_path.parent / "workspace" / "runs"
        with self._outputs[0].open("wb") as stdout, self._outputs[1].open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", "run", str(config_path), "--json", *arguments],
                env=clean_environment() | environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self._descendants: set[psutil.Process] = set()

    @property
    def stderr(self) -> str:
        return self._outputs[1].read_text()

    @property
    def folder(self) -> Path:
        """Folder of the newest run."""
        return max(self._runs_folder.iterdir())

    def wait_until(self, condition: Callable[[Path], bool], *, description: str) -> None:
        """Wait until `condition(run folder)` is true. `description` names the condition in errors."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (any(self._runs_folder.glob("*")) and condition(self.folder)):
            assert self.process.poll() is None, f"the run ended before: {description}\n{self.stderr}"
            assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {description}\n{self.stderr}"
            time.sleep(0.01)
        self._descendants.update(self.children())

    def children(self) -> list[psutil.Process]:
        """Return all descendants of the command's process."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self) -> tuple[int, str]:
        """Wait for the end of the command; return its exit code and stderr. No process of the run may be left."""
        exit_code = self.process.wait(timeout=TIMEOUT_S)
        _, alive = psutil.wait_procs(self._descendants, timeout=10)
        assert not alive, [process.cmdline() for process in alive]
        return exit_code, self.stderr

    @property
    def json_output(self) -> dict[str, Any]:
        """The JSON object on the last line of stdout."""
        json_output: dict[str, Any] = json.loads(self._outputs[0].read_text().splitlines()[-1])
        return json_output


@contextmanager
def started_run(config_path: Path, *arguments: str, **environment: str) -> Iterator[StartedRun]:
    """Start `nightjar run` with these environment variables, and kill it after the body if it has not ended."""
    run = StartedRun(config_path, *arguments, environment=environment)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
