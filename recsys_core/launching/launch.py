"""A launch, which starts and monitors all ranks, and leaves none of them running.

A failed launch is not restarted in place, because torchrun's own restart is unreliable (pytorch/pytorch#135712, #167288). The
caller starts a new launch from the last verified checkpoint.
"""

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import torch

from recsys_core.errors import InputError
from recsys_core.launching.config import Launcher, LocalLauncher
from recsys_core.launching.heartbeat import HeartbeatFile
from recsys_core.launching.messages import AGENT_MODULE, LaunchFolder, LaunchSpec, RankLayout, last_lines, running_versions
from recsys_core.launching.monitor import GroupState, HostGroup, Monitor, RankOutput
from recsys_core.termination import parent_environment

TERM_GRACE_S = 8.0


def launch(
    job_path: Path,
    *,
    layout: RankLayout,
    folder: Path,
    heartbeat_file: HeartbeatFile,
    poll: Callable[[], None] = lambda: None,
    launcher: Launcher = LocalLauncher(),  # noqa: B008  the default is frozen
    module: str = "recsys_core.training",
) -> None:
    """Run `python -m <module> <job_path>` as the ranks of `layout`; return when all of them have exited with code 0.

    The output of rank 0 is logged.

    Args:
        job_path: JSON of a TrainJob or ExportJob.
        layout: number of hosts and ranks, and the device of the ranks.
        folder: new folder for the messages and logs of hosts and ranks. This folder, the job file and the heartbeat file must
            have the same paths on all hosts.
        heartbeat_file: the file that the ranks change while they work.
        poll: called about five times a second.
        launcher: starts the ranks on this host, or on many hosts through TorchX.

    Raises:
        InputError: the layout needs more GPUs or hosts than are available, a host was rejected, or a rank raised InputError.
        StageError: a rank raised StageError, for example because the loss is not finite.
        LaunchError: the hosts did not connect to each other, a rank failed, or the heartbeat stopped. The message names host
            and rank, and quotes the traceback, the last lines of the log, or the innermost functions of each rank.
    """
    if launcher.kind == "local":
        _require_local_capacity(layout)
    elif find_spec("torchx") is None:
        raise InputError(
            "launcher.kind is torchx, but the package torchx is not installed; install nightjar with the extra torchx, e.g. "
            'pip install ".[torchx]"'
        )
    folder.mkdir(parents=True)
    launch_folder = LaunchFolder(folder.absolute())
    spec = LaunchSpec(
        token=secrets.token_hex(8),
        versions=running_versions(),
        module=module,
        job_path=job_path.absolute(),
        layout=layout,
        launcher=launcher,
    )
    rank_output = RankOutput(launch_folder.log_folder(0))

    def poll_and_relay() -> None:
        poll()
        rank_output.relay()

    monitor = Monitor(spec, launch_folder, heartbeat_file=heartbeat_file)
    launch_folder.write_spec(spec)
    with _exit_on_sigterm(), ExitStack() as exit_stack:
        host_group: HostGroup
        if launcher.kind == "local":
            host_group = LocalHost(launch_folder)
        else:
            from recsys_core.launching.hosts.torchx import submit

            host_group = exit_stack.enter_context(submit(spec, launch_folder, launcher=launcher))
        try:
            monitor.wait(host_group, poll=poll_and_relay)
        finally:
            host_group.end()
            poll_and_relay()


def _require_local_capacity(layout: RankLayout) -> None:
    """Raise InputError unless this host alone can run the ranks of `layout`."""
    if layout.num_hosts != 1:
        raise InputError(
            f"plan.json: the plan was made for {layout.num_hosts} hosts, but launcher.kind is local, which starts ranks on "
            "this host only; set launcher.kind to torchx, or sharding.cluster.num_nodes to 1"
        )
    if layout.device == "cuda" and torch.cuda.device_count() < layout.ranks_per_host:
        raise InputError(
            f"plan.json: the plan needs {layout.ranks_per_host} GPUs on this host, but there are {torch.cuda.device_count()}; "
            "reduce sharding.cluster.processes_per_node, or set sharding.cluster.device to cpu"
        )


class LocalHost:
    """A HostGroup that consists of this host.

    The constructor starts the agent in a new POSIX session. If this process ends, the agent and its ranks end too.
    """

    def __init__(self, launch_folder: LaunchFolder) -> None:
        self._log_path = launch_folder.path / "agent.log"
        environment = os.environ | parent_environment()
        environment.pop("OMP_NUM_THREADS", None)  # the agent sets it to the number of cores per rank
        with self._log_path.open("wb") as log_file:
            self._agent = subprocess.Popen(
                [sys.executable, "-m", AGENT_MODULE, str(launch_folder.spec_path)],
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

    def last_log_lines(self, host_index: int) -> str:
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


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that `finally` blocks end the ranks. If the caller has set a handler, change nothing."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def raise_exit(signal_number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signal_number)

    signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
