"""Agents on many hosts, one per host, submitted through TorchX."""

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchx.runner import Runner, get_runner
from torchx.specs import AppDef, AppDryRunInfo, AppStatus, BindMount, Resource, Role, VolumeMount, is_terminal, macros
from torchx.specs.api import AppState

from recsys_core.errors import InputError, LaunchError
from recsys_core.launching.config import LOCAL_SCHEDULERS, TorchxLauncher
from recsys_core.launching.host_group import State
from recsys_core.launching.messages import LAST_LINES, LaunchFolder, Order, last_lines
from recsys_core.parent_process import PARENT_VARIABLE, as_parent

logger = logging.getLogger(__name__)
ROLE = "nightjar"
LOGS = "scheduler"
STATUS_S = {True: 0.5, False: 10.0}
"""How often a scheduler is asked, by whether it is a local one. The folder tells sooner how hosts fare."""
SILENT_SCHEDULER_S = 300.0
END_TIMEOUT_S = 60.0
LOG_TIMEOUT_S = 10.0


@contextmanager
def submit(order: Order, folder: LaunchFolder, *, launcher: TorchxLauncher) -> Iterator["TorchxGroup"]:
    """Submits one agent per host; what still runs at the end is cancelled. InputError where the scheduler refuses."""
    with contextlib.closing(get_runner()) as runner:
        with _signal_handlers_kept():
            request = request_of(order, folder, launcher=launcher, runner=runner)
        try:
            handle = runner.schedule(request)
        except Exception as error:  # whatever a scheduler's client throws
            raise LaunchError(f"{launcher.scheduler} did not take the request: {type(error).__name__}: {error}") from error
        logger.info("%s: %d hosts x %d processes", handle, order.num_nodes, order.processes_per_node)
        group = TorchxGroup(runner, handle, folder=folder, is_local=launcher.scheduler in LOCAL_SCHEDULERS)
        try:
            yield group
        finally:
            group.end()


def request_of(order: Order, folder: LaunchFolder, *, launcher: TorchxLauncher, runner: Runner) -> AppDryRunInfo[object]:
    """What would be submitted; printed, it is the scheduler's own text (a batch script, a job's YAML)."""
    is_local = launcher.scheduler in LOCAL_SCHEDULERS
    args = dict(launcher.args)
    if is_local:
        args.setdefault("log_dir", str(folder.path / LOGS))
    role = Role(
        name=ROLE,
        image=launcher.image,
        entrypoint=launcher.python or ("python" if launcher.image else sys.executable),
        args=["-m", "recsys_core.launching.agent", str(folder.order), order.token, macros.replica_id, macros.rank0_env],
        # A replica elsewhere must not take the parent of this very process for its own.
        env={"PYTHONUNBUFFERED": "1", PARENT_VARIABLE: "", **(as_parent() if is_local else {}), **launcher.env},
        num_replicas=order.num_nodes,
        max_retries=0,
        resource=Resource(
            cpu=launcher.cpus or -1,
            gpu=order.processes_per_node if order.device == "cuda" else 0,
            memMB=-1 if launcher.memory_gb is None else int(launcher.memory_gb * 1024),
        ),
        port_map={"rendezvous": order.rendezvous_port} if order.rendezvous_port else {},
        mounts=[
            (VolumeMount if mount.type == "volume" else BindMount)(mount.src, mount.dst, read_only=mount.read_only)
            for mount in launcher.mounts
        ],
    )
    try:
        return runner.dryrun(AppDef(name=ROLE, roles=[role]), launcher.scheduler, cfg=args)
    except KeyError:
        known = ", ".join(sorted(runner.scheduler_backends()))
        raise InputError(f"launcher.scheduler is {launcher.scheduler}, but TorchX has {known}; name one of them") from None
    except Exception as error:  # each scheduler checks its settings in its own way
        given = ", ".join(f"{name}={value}" for name, value in args.items()) or "none"
        raise InputError(
            f"launcher.scheduler {launcher.scheduler} refuses the request ({type(error).__name__}: {error}); "
            f"launcher.args are {given}"
        ) from error


class TorchxGroup:
    """A submitted app."""

    def __init__(self, runner: Runner, handle: str, *, folder: LaunchFolder, is_local: bool) -> None:
        self._runner, self._handle, self._folder, self._is_local = runner, handle, folder, is_local
        self._status: AppStatus | None = None
        self._asked = float("-inf")
        self._answered = time.monotonic()
        self._ended = False

    def state(self) -> State:
        """Asks the scheduler now and then. LaunchError if it has not answered for minutes."""
        if time.monotonic() - self._asked >= STATUS_S[self._is_local]:
            self._ask()
        if self._status is None:
            return "queued"
        if is_terminal(self._status.state):
            return "ended"
        return "running" if self._status.state == AppState.RUNNING else "queued"

    def story(self) -> str:
        """The scheduler's last word."""
        said = "nothing" if self._status is None else " ".join([self._status.state.name, self._status.msg]).strip()
        return f"{self._handle}: the scheduler says {said}"

    def log(self, node: int) -> str:
        """The end of a host's stderr: of a local one at any time, of others once the app has ended."""
        if self._is_local:
            found = next(iter(self._folder.path.glob(f"{LOGS}/**/{ROLE}/{node}/stderr.log")), None)
            return "" if found is None else last_lines(found)
        return self._log_of_ended(node) if self._ended else ""

    def end(self) -> None:
        """Cancels, and waits until the scheduler says that it is over."""
        if self._ended:
            return
        self._ended = True
        try:
            if self.state() != "ended":
                self._runner.cancel(self._handle)
            deadline = time.monotonic() + END_TIMEOUT_S
            while self.state() != "ended" and self._status is not None and time.monotonic() < deadline:
                self._asked = min(self._asked, time.monotonic() - STATUS_S[self._is_local] + 1.0)
                time.sleep(0.1)
        except Exception as error:  # the scheduler cannot be reached: the hosts end when the lease is over
            logger.warning("%s could not be cancelled: %s", self._handle, error)

    def _ask(self) -> None:
        self._asked = time.monotonic()
        try:
            self._status = self._runner.status(self._handle)
            self._answered = time.monotonic()
        except Exception as error:  # a scheduler that is busy, or between two states that TorchX knows
            if time.monotonic() - self._answered > SILENT_SCHEDULER_S:
                raise LaunchError(
                    f"{self._handle}: the scheduler has not told its state for {SILENT_SCHEDULER_S:g} s: {error}"
                ) from error
            logger.debug("%s: no state: %s", self._handle, error)

    def _log_of_ended(self, node: int) -> str:
        lines: list[str] = []

        def read() -> None:
            with contextlib.suppress(Exception):  # a log that is gone or cannot be read says nothing
                lines.extend(line.rstrip() for line in self._runner.log_lines(self._handle, ROLE, node))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(LOG_TIMEOUT_S)
        return "\n".join(lines[-LAST_LINES:])


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """TorchX's local scheduler installs handlers of its own, over those by which the caller ends cleanly."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
