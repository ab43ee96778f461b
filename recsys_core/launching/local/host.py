"""This host as the only host of a launch: its agent is a child process that runs the ranks under torchrun."""

import os
import signal
import subprocess
import sys

from recsys_core.launching.messages import AGENT_MODULE, LaunchFolder, last_lines
from recsys_core.launching.monitor import GroupState
from recsys_core.parent_process import parent_environment

TERM_GRACE_S = 8.0


class LocalHost:
    """A HostGroup that consists of this host.

    The constructor starts the agent in a new POSIX session. If this process ends, the agent and its ranks end too.
    """

    def __init__(self, folder: LaunchFolder) -> None:
        self._log_path = folder.path / "agent.log"
        environment = os.environ | parent_environment()
        environment.pop("OMP_NUM_THREADS", None)  # the agent sets it to the number of cores per rank
        with self._log_path.open("wb") as log_file:
            self._agent = subprocess.Popen(
                [sys.executable, "-m", AGENT_MODULE, str(folder.spec_path)],
                start_new_session=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
            )

    def state(self) -> GroupState:
        """Return running or ended; a local agent is never queued."""
        return "running" if self._agent.poll() is None else "ended"

    def exit_summary(self) -> str:
        """Return the exit code or signal of the agent."""
        exit_code = self._agent.returncode
        if exit_code < 0:
            return f"torchrun ended with signal {-exit_code} ({signal.Signals(-exit_code).name})"
        return f"torchrun ended with exit code {exit_code}"

    def last_log_lines(self, host: int) -> str:
        """Return the last lines of agent.log."""
        return last_lines(self._log_path)

    def end(self) -> None:
        """Send SIGTERM, which torchrun forwards to its ranks; send SIGKILL after a grace period."""
        if self._agent.poll() is not None:
            return
        os.killpg(self._agent.pid, signal.SIGTERM)
        try:
            self._agent.wait(TERM_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._agent.pid, signal.SIGKILL)
            self._agent.wait()
