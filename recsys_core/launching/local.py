"""The agent of this host, as a child in a session of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from recsys_core.launching.host_group import State
from recsys_core.launching.messages import LaunchFolder, Order, last_lines
from recsys_core.parent_process import as_parent

TERM_GRACE_S = 8.0


@contextmanager
def start_here(order: Order, folder: LaunchFolder) -> Iterator["LocalGroup"]:
    """Starts torchrun's agent; it dies with this process, its ranks with it."""
    cores = len(psutil.Process().cpu_affinity() or [1])
    environment = os.environ | as_parent() | {"OMP_NUM_THREADS": str(max(1, cores // order.processes_per_node))}
    command = [sys.executable, "-m", "recsys_core.launching.agent", str(folder.order), order.token, "0", ""]
    with (folder.path / "agent.log").open("wb") as output:
        agent = subprocess.Popen(
            command, start_new_session=True, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield LocalGroup(agent, folder)
    finally:
        LocalGroup(agent, folder).end()


class LocalGroup:
    """torchrun on this host."""

    def __init__(self, agent: subprocess.Popen[bytes], folder: LaunchFolder) -> None:
        self._agent, self._folder = agent, folder

    def state(self) -> State:
        """Never queued."""
        return "running" if self._agent.poll() is None else "ended"

    def story(self) -> str:
        """The exit code or signal."""
        code = self._agent.returncode
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        return f"torchrun ended with {how}"

    def log(self, node: int) -> str:
        """The end of agent.log."""
        return last_lines(self._folder.path / "agent.log")

    def end(self) -> None:
        """torchrun passes SIGTERM on; its ranks die with it on SIGKILL."""
        if self._agent.poll() is not None:
            return
        os.killpg(self._agent.pid, signal.SIGTERM)
        try:
            self._agent.wait(TERM_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._agent.pid, signal.SIGKILL)
            self._agent.wait()
