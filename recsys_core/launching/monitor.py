"""Monitoring of a launch: a time limit for each phase, an error that explains why a launch failed, and the output of rank 0."""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, Protocol

from recsys_core.disk import MIN_STAGE_BYTES, disk_full_error, free_bytes
from recsys_core.errors import InputError, LaunchError, StageError
from recsys_core.launching.failures import error_from_failures, format_stacks
from recsys_core.launching.heartbeat import HeartbeatFile
from recsys_core.launching.messages import POLL_S, STDERR_PREFIX, LaunchFolder, LaunchSpec, wait_until

logger = logging.getLogger(__name__)
STACKS_TIMEOUT_S = 5.0
REPORTS_TIMEOUT_S = 3.0
EXIT_TIMEOUT_S = 30.0
MAX_LOGGED_LINES = 1_000

Phase = Literal["queue", "rendezvous", "start", "work"]
"""queue: no host runs yet. rendezvous: until all ranks run. start: until the first heartbeat. work: from then on."""
GroupState = Literal["queued", "running", "ended"]


class HostGroup(Protocol):
    """Interface to the agents of one launch, which are on this host or were submitted to a scheduler."""

    def state(self) -> GroupState:
        """Return the state of the agents: queued until the scheduler has assigned the hosts."""

    def exit_summary(self) -> str:
        """Describe how the agents ended: with an exit code, or in a state that the scheduler reports."""

    def last_log_lines(self, host_index: int) -> str:
        """Return the last lines that the agent of a host printed; empty while they cannot be read."""

    def end(self) -> None:
        """End all agents and their ranks, and wait until none of them runs."""


class Monitor:
    """Follows a launch through its phases, and raises an error if the launch fails or a phase takes longer than its limit."""

    def __init__(self, spec: LaunchSpec, folder: LaunchFolder, *, heartbeat_file: HeartbeatFile) -> None:
        self._spec, self._layout, self._folder, self._heartbeat_file = spec, spec.layout, folder, heartbeat_file
        self._last_mtime_and_size = heartbeat_file.mtime_and_size()  # the file of an earlier attempt may exist
        self._phase: Phase = "queue"
        self._phase_start_time = time.monotonic()

    def wait(self, group: HostGroup, *, poll: Callable[[], None]) -> None:
        """Return when all ranks exited with code 0; raise the errors that `launch` documents. poll: called every 0.2 s."""
        while not self._has_succeeded:
            poll()
            group_state = group.state()
            if group_state == "ended" or any(report.has_failed for report in self._folder.end_reports()):
                # One failure ends the agents of all hosts, and the agent of the failed host may be the last to report.
                wait_until(lambda: len(self._folder.end_reports()) == self._layout.num_hosts, timeout_s=REPORTS_TIMEOUT_S)
                if self._has_succeeded:
                    break
                group.end()
                raise self._failure_error(group)
            self._update_phase(is_running=group_state == "running")
            if self._phase == "rendezvous":
                self._raise_printed_error(group)
            limit_s, setting = self._time_limit()
            if time.monotonic() - self._phase_start_time > limit_s:
                raise self._timeout_error(group, limit_s=limit_s, setting=setting)
            time.sleep(POLL_S)
        wait_until(lambda: group.state() == "ended", timeout_s=EXIT_TIMEOUT_S)

    @property
    def _has_succeeded(self) -> bool:
        end_reports = self._folder.end_reports()
        return len(end_reports) == self._layout.num_hosts and not any(report.has_failed for report in end_reports)

    def _time_limit(self) -> tuple[float, str]:
        """Return the longest duration of the phase in seconds, and the setting that limits it."""
        launcher, heartbeat_file = self._spec.launcher, self._heartbeat_file
        limit_and_setting_by_phase: dict[Phase, tuple[float, str]] = {
            "queue": (launcher.queue_timeout_s, "launcher.queue_timeout_s"),
            "rendezvous": (launcher.rendezvous_timeout_s, "launcher.rendezvous_timeout_s"),
            "start": (heartbeat_file.start_timeout_s, "training.start_timeout_s"),
            "work": (heartbeat_file.current_timeout_s(), "training.heartbeat_timeout_s"),
        }
        return limit_and_setting_by_phase[self._phase]

    def _update_phase(self, *, is_running: bool) -> None:
        """Move to the next phase if its condition holds. Each heartbeat restarts the phase `work`."""
        next_phase = self._phase
        if next_phase == "queue" and (is_running or self._folder.ready_reports()):
            next_phase = "rendezvous"
        if next_phase == "rendezvous" and len(self._folder.start_reports()) == self._layout.world_size:
            next_phase = "start"
        mtime_and_size = self._heartbeat_file.mtime_and_size()
        if mtime_and_size != self._last_mtime_and_size:
            self._last_mtime_and_size, self._phase_start_time, next_phase = mtime_and_size, time.monotonic(), "work"
        if next_phase != self._phase:
            self._phase, self._phase_start_time = next_phase, time.monotonic()

    def _raise_printed_error(self, group: HostGroup) -> None:
        """Raise InputError if a missing host printed an error that its agent could not write into the folder."""
        for host_index in self._missing_host_indices:
            error_lines = [line for line in group.last_log_lines(host_index).splitlines() if line.startswith(STDERR_PREFIX)]
            if error_lines:
                raise InputError(error_lines[-1].removeprefix(STDERR_PREFIX).strip())

    @property
    def _missing_host_indices(self) -> list[int]:
        return sorted(set(range(self._layout.num_hosts)) - self._folder.ready_reports().keys())

    def _failure_error(self, group: HostGroup) -> InputError | StageError:
        failure_reports = [report for report in self._folder.end_reports() if report.has_failed]
        if failure_reports:
            return error_from_failures(failure_reports, num_hosts=self._layout.num_hosts, folder=self._folder)
        self._raise_printed_error(group)
        if free_bytes(self._folder.path) < MIN_STAGE_BYTES:
            return disk_full_error(self._folder.path, reason="the output of hosts and ranks does not fit")
        return LaunchError(f"{group.exit_summary()}{self._quote_logs(group, range(self._layout.num_hosts))}")

    def _quote_logs(self, group: HostGroup, host_indices: Iterable[int]) -> str:
        log_lines_by_host_index = {host_index: group.last_log_lines(host_index) for host_index in host_indices}
        return "".join(
            f"\nlast lines of host {host_index}:\n{log_lines}"
            for host_index, log_lines in log_lines_by_host_index.items()
            if log_lines
        )

    def _timeout_error(self, group: HostGroup, *, limit_s: float, setting: str) -> InputError | StageError:
        if self._phase in ("queue", "rendezvous"):
            return self._rendezvous_error(group, limit_s=limit_s, setting=setting)
        timeout_text = "did not start within" if self._phase == "start" else "sent no heartbeat for"
        formatted_stacks = self._dump_stacks()
        group.end()
        return LaunchError(
            f"the ranks {timeout_text} {limit_s:g} s; raise {setting} if this is normal for the model. "
            f"Innermost functions of each rank:\n{formatted_stacks}"
        )

    def _dump_stacks(self) -> str:
        """Request the stack dumps, wait for them, and return them formatted."""
        self._folder.stacks_request_path.touch()
        stack_paths = [self._folder.stack_path(rank) for rank in self._folder.start_reports()]
        wait_until(
            lambda: all(stack_path.is_file() and stack_path.stat().st_size for stack_path in stack_paths),
            timeout_s=STACKS_TIMEOUT_S,
        )
        time.sleep(POLL_S)  # the last dump may be incomplete
        return format_stacks(self._folder, world_size=self._layout.world_size)

    def _rendezvous_error(self, group: HostGroup, *, limit_s: float, setting: str) -> InputError | StageError:
        group.end()  # first, because some schedulers provide logs only for hosts that have ended
        report_by_host_index, missing_host_indices = self._folder.ready_reports(), self._missing_host_indices
        start_summary = f"{len(report_by_host_index)} of {self._layout.num_hosts} hosts started"
        host_names_text = ", ".join(str(report.host) for _, report in sorted(report_by_host_index.items())) or "none"
        if missing_host_indices:
            self._raise_printed_error(group)
            return LaunchError(
                f"{start_summary} within {limit_s:g} s: {host_names_text}; missing: "
                f"{', '.join(f'host {host_index}' for host_index in missing_host_indices)}; {group.exit_summary()}; "
                f"raise {setting} if the hosts need more time to start{self._quote_logs(group, missing_host_indices)}"
            )
        missing_ranks = sorted(set(range(self._layout.world_size)) - self._folder.start_reports().keys())
        return LaunchError(
            f"{start_summary} ({host_names_text}), but after {limit_s:g} s these ranks do not run: "
            f"{', '.join(map(str, missing_ranks))}; "
            f"the hosts could not reach each other at {report_by_host_index[0].address}:{report_by_host_index[0].port}, or the "
            f"ranks need more time to start; open launcher.rendezvous_port between the hosts, or raise {setting}"
            f"{self._quote_logs(group, range(self._layout.num_hosts))}"
        )


class RankOutput:
    """Logs stdout and stderr of rank 0, because Prefect shows the log of this process as the log of the run.

    Each line becomes a log record with the attribute `rank`. Only the first 1,000 lines are logged, because a rank that
    prints in every step would fill the log of the run.

    Args:
        log_folder: folder with the logs of the ranks of host 0.
    """

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._offset_bytes_by_path: dict[Path, int] = {}
        self._num_read_lines = 0

    def relay(self) -> None:
        """Log the complete lines that were written since the last call."""
        if self._num_read_lines > MAX_LOGGED_LINES:
            return
        for log_path in self._log_folder.glob("*/attempt_*/0/std*.log"):
            offset_bytes = self._offset_bytes_by_path.setdefault(log_path, 0)
            if log_path.stat().st_size == offset_bytes:
                continue
            with log_path.open("rb") as log_file:
                log_file.seek(offset_bytes)
                unread_bytes = log_file.read()
            complete_line_bytes = unread_bytes[: unread_bytes.rfind(b"\n") + 1]
            self._offset_bytes_by_path[log_path] = offset_bytes + len(complete_line_bytes)
            for line in complete_line_bytes.decode(errors="replace").splitlines():
                self._log_line(line, log_path=log_path)

    def _log_line(self, line: str, *, log_path: Path) -> None:
        self._num_read_lines += 1
        if self._num_read_lines <= MAX_LOGGED_LINES:
            logger.info("rank 0: %s", line, extra={"rank": 0})
        elif self._num_read_lines == MAX_LOGGED_LINES + 1:
            logger.info("rank 0: the following lines are only in %s", log_path, extra={"rank": 0})
