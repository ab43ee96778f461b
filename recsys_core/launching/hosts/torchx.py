"""Agents on many hosts, one per host, submitted through TorchX."""

import contextlib
import itertools
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
from recsys_core.launching.heartbeat import heartbeat
from recsys_core.launching.messages import AGENT_MODULE, NUM_LAST_LINES, LaunchFolder, LaunchSpec, last_lines
from recsys_core.launching.monitor import GroupState
from recsys_core.termination import PARENT_VARIABLE, parent_environment

logger = logging.getLogger(__name__)
ROLE = "nightjar"
LOG_FOLDER = "scheduler"
LOCAL_STATUS_INTERVAL_S, STATUS_INTERVAL_S = 0.5, 10.0
"""Intervals of status requests. Remote schedulers need few requests, because hosts report their start in the launch folder."""
NO_STATUS_TIMEOUT_S = 300.0
END_TIMEOUT_S = 60.0
LOG_TIMEOUT_S = 10.0
RENEWALS_PER_LEASE = 20


@contextmanager
def submit(spec: LaunchSpec, folder: LaunchFolder, *, launcher: TorchxLauncher) -> Iterator["TorchxGroup"]:
    """Submit one agent per host, and yield the group.

    Until the end of the caller's `with` block, the group can reach the scheduler, and the lease is renewed. The agents end if
    the lease is not renewed.

    Raises InputError if the settings are not valid for the scheduler, and LaunchError if it does not accept the request.
    """
    lease_counter, renewal_interval_s = itertools.count(), launcher.lease_timeout_s / RENEWALS_PER_LEASE
    lease_renewal = heartbeat(lambda: folder.renew_lease(spec.token, next(lease_counter)), interval_s=renewal_interval_s)
    with lease_renewal, contextlib.closing(get_runner()) as runner:
        with _restore_signal_handlers():
            request = build_request(spec, folder, launcher=launcher, runner=runner)
        try:
            app_handle = runner.schedule(request)
        except Exception as error:  # each scheduler's client has its own exceptions
            raise LaunchError(
                f"{launcher.scheduler} did not accept the request: {type(error).__name__}: {error}; check that the scheduler "
                "and its command line tools can be reached from this host"
            ) from error
        logger.info("%s: %d hosts x %d ranks", app_handle, spec.layout.num_hosts, spec.layout.ranks_per_host)
        yield TorchxGroup(runner, app_handle, folder=folder, is_local=launcher.scheduler in LOCAL_SCHEDULERS)


def build_request(spec: LaunchSpec, folder: LaunchFolder, *, launcher: TorchxLauncher, runner: Runner) -> AppDryRunInfo[object]:
    """Return the request to submit. str(request) is the scheduler's own format: a batch script or the YAML of a job."""
    is_local = launcher.scheduler in LOCAL_SCHEDULERS
    scheduler_args = dict(launcher.args)
    if is_local:
        scheduler_args.setdefault("log_dir", str(folder.path / LOG_FOLDER))
    role = Role(
        name=ROLE,
        image=launcher.image,
        entrypoint=launcher.python or ("python" if launcher.image else sys.executable),
        args=["-m", AGENT_MODULE, str(folder.spec_path), spec.token, macros.replica_id, macros.rank0_env],
        # An agent ends if its parent is not the process in PARENT_VARIABLE. On another host, this process is not the parent.
        env={"PYTHONUNBUFFERED": "1", PARENT_VARIABLE: "", **(parent_environment() if is_local else {}), **launcher.env},
        num_replicas=spec.layout.num_hosts,
        max_retries=0,
        resource=Resource(
            cpu=launcher.cpus or -1,
            gpu=spec.layout.ranks_per_host if spec.layout.device == "cuda" else 0,
            memMB=-1 if launcher.memory_gb is None else int(launcher.memory_gb * 1024),
        ),
        port_map={"rendezvous": launcher.rendezvous_port} if launcher.rendezvous_port else {},
        mounts=[
            (VolumeMount if mount.type == "volume" else BindMount)(mount.src, mount.dst, read_only=mount.read_only)
            for mount in launcher.mounts
        ],
    )
    try:
        return runner.dryrun(AppDef(name=ROLE, roles=[role]), launcher.scheduler, cfg=scheduler_args)
    except KeyError:
        schedulers_text = ", ".join(sorted(runner.scheduler_backends()))
        raise InputError(
            f"launcher.scheduler is {launcher.scheduler}, but TorchX has {schedulers_text}; choose one of them"
        ) from None
    except Exception as error:  # each scheduler validates its settings with its own exceptions
        args_text = ", ".join(f"{name}={value}" for name, value in scheduler_args.items()) or "empty"
        raise InputError(
            f"launcher.scheduler {launcher.scheduler} rejects the request ({type(error).__name__}: {error}); correct the "
            f"settings of launcher, in particular launcher.args: {args_text}"
        ) from error


class TorchxGroup:
    """A HostGroup whose agents are one submitted TorchX app."""

    def __init__(self, runner: Runner, app_handle: str, *, folder: LaunchFolder, is_local: bool) -> None:
        self._runner, self._app_handle, self._folder, self._is_local = runner, app_handle, folder, is_local
        self._status_interval_s = LOCAL_STATUS_INTERVAL_S if is_local else STATUS_INTERVAL_S
        self._status: AppStatus | None = None
        self._last_request_time = float("-inf")
        self._last_status_time = time.monotonic()
        self._is_end_requested = False

    def state(self) -> GroupState:
        """Return the state, requested from the scheduler at intervals. Raises LaunchError after 5 minutes without a status."""
        if time.monotonic() - self._last_request_time >= self._status_interval_s:
            self._request_status()
        if self._status is None:
            return "queued"
        if is_terminal(self._status.state):
            return "ended"
        return "running" if self._status.state == AppState.RUNNING else "queued"

    def exit_summary(self) -> str:
        """Return the last status that the scheduler reported."""
        status_text = "none" if self._status is None else " ".join([self._status.state.name, self._status.msg]).strip()
        return f"{self._app_handle}: last status reported by the scheduler: {status_text}"

    def last_log_lines(self, host_index: int) -> str:
        """Return the last lines of a host's stderr. Remote schedulers provide a log only after the app has ended."""
        if self._is_local:
            stderr_path = next(iter(self._folder.path.glob(f"{LOG_FOLDER}/**/{ROLE}/{host_index}/stderr.log")), None)
            return "" if stderr_path is None else last_lines(stderr_path)
        return self._fetch_log(host_index) if self._is_end_requested else ""

    def end(self) -> None:
        """Cancel the app and wait until the scheduler reports its end."""
        if self._is_end_requested:
            return
        self._is_end_requested = True
        try:
            if self.state() != "ended":
                self._runner.cancel(self._app_handle)
            deadline_s = time.monotonic() + END_TIMEOUT_S
            while self.state() != "ended" and self._status is not None and time.monotonic() < deadline_s:
                # Ask again after a second: the usual interval is too long for a user who waits for the command to end.
                self._last_request_time = min(self._last_request_time, time.monotonic() - self._status_interval_s + 1.0)
                time.sleep(0.1)
        except Exception as error:  # the scheduler cannot be reached; the hosts end when their lease expires
            logger.warning("%s could not be cancelled: %s", self._app_handle, error)

    def _request_status(self) -> None:
        self._last_request_time = time.monotonic()
        try:
            self._status = self._runner.status(self._app_handle)
            self._last_status_time = time.monotonic()
        except Exception as error:  # the scheduler is busy, or the job is in a state that TorchX does not support
            if time.monotonic() - self._last_status_time > NO_STATUS_TIMEOUT_S:
                raise LaunchError(
                    f"{self._app_handle}: the scheduler has returned no status for {NO_STATUS_TIMEOUT_S:g} s: {error}"
                ) from error
            logger.debug("%s: no status: %s", self._app_handle, error)

    def _fetch_log(self, host_index: int) -> str:
        """Read the log in a thread with a deadline, because some schedulers block."""
        log_lines: list[str] = []

        def read_lines() -> None:
            with contextlib.suppress(Exception):  # the log is missing or cannot be read
                log_lines.extend(line.rstrip() for line in self._runner.log_lines(self._app_handle, ROLE, host_index))

        reader_thread = threading.Thread(target=read_lines, daemon=True)
        reader_thread.start()
        reader_thread.join(LOG_TIMEOUT_S)
        return "\n".join(log_lines[-NUM_LAST_LINES:])


@contextmanager
def _restore_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers of the caller, which TorchX's local scheduler replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler_by_signal = {signal_number: signal.getsignal(signal_number) for signal_number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signal_number, handler in handler_by_signal.items():
            signal.signal(signal_number, handler)
