"""Monitoring of a launch: a deadline for each phase, and an error that explains why a launch failed."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from recsys_core.disk import MIN_STAGE_BYTES, disk_full_error, free_bytes
from recsys_core.errors import InputError, LaunchError, StageError
from recsys_core.launching.failures import error_from_failures
from recsys_core.launching.heartbeat import HeartbeatFile
from recsys_core.launching.messages import STDERR_PREFIX, LaunchFolder, LaunchSpec
from recsys_core.launching.rank import format_stacks

POLL_S = 0.2
STACKS_TIMEOUT_S = 5.0
FAILURES_TIMEOUT_S = 3.0
EXIT_TIMEOUT_S = 30.0

Phase = Literal["queue", "rendezvous", "start", "work"]
"""queue: no host runs yet. rendezvous: until all ranks run. start: until the first heartbeat. work: from then on."""
GroupState = Literal["queued", "running", "ended"]


class HostGroup(Protocol):
    """The agents of one launch, under the control of the launcher that started them."""

    def state(self) -> GroupState:
        """Return the state of the agents: queued until the scheduler has assigned the hosts."""

    def exit_summary(self) -> str:
        """Describe how the agents ended: with an exit code, or in a state that the scheduler reports."""

    def last_log_lines(self, node: int) -> str:
        """Return the last lines that the agent of a host printed; empty while they cannot be read."""

    def end(self) -> None:
        """End all agents and their ranks, and wait until none of them runs."""


@dataclass(frozen=True)
class Deadline:
    """The longest duration of a phase, and the setting that limits it."""

    limit_s: float
    setting: str


class Monitor:
    """Follows a launch through its phases, and raises an error if it fails or a phase exceeds its deadline."""

    def __init__(
        self, spec: LaunchSpec, folder: LaunchFolder, *, deadlines: dict[Phase, Deadline], heartbeat: HeartbeatFile
    ) -> None:
        self._spec, self._folder, self._deadlines, self._heartbeat = spec, folder, dict(deadlines), heartbeat
        self._last_heartbeat_state = heartbeat.mtime_and_size()  # the file of an earlier attempt may exist
        self._phase: Phase = "queue"
        self._phase_start = time.monotonic()

    def wait(self, group: HostGroup, *, poll: Callable[[], None]) -> None:
        """Return when all ranks exited with code 0; raise the errors that `launch` documents. poll: called every 0.2 s."""
        while not self._has_succeeded:
            poll()
            group_state = group.state()
            if self._folder.failures() or group_state == "ended":
                self._wait_for_failures()
                if self._has_succeeded:
                    break
                group.end()
                raise self._failure_error(group)
            self._update_phase(running=group_state == "running")
            if self._phase == "rendezvous":
                self._raise_printed_error(group)
            if time.monotonic() - self._phase_start > self._deadlines[self._phase].limit_s:
                raise self._timeout_error(group)
            time.sleep(POLL_S)
        end_time = time.monotonic() + EXIT_TIMEOUT_S
        while group.state() != "ended" and time.monotonic() < end_time:
            time.sleep(POLL_S)

    @property
    def _has_succeeded(self) -> bool:
        return len(self._folder.finished_nodes()) == self._spec.num_nodes

    def _update_phase(self, *, running: bool) -> None:
        """Move to the next phase if its condition holds. Each heartbeat restarts the deadline of the phase `work`."""
        next_phase = self._phase
        if next_phase == "queue" and (running or self._folder.ready_hosts()):
            next_phase = "rendezvous"
        if next_phase == "rendezvous" and len(self._folder.started_ranks()) == self._spec.world_size:
            next_phase = "start"
        heartbeat_state = self._heartbeat.mtime_and_size()
        if heartbeat_state != self._last_heartbeat_state:
            self._last_heartbeat_state, self._phase_start, next_phase = heartbeat_state, time.monotonic(), "work"
            self._deadlines["work"] = replace(self._deadlines["work"], limit_s=self._heartbeat.current_timeout_s())
        if next_phase != self._phase:
            self._phase, self._phase_start = next_phase, time.monotonic()

    def _raise_printed_error(self, group: HostGroup) -> None:
        """Raise InputError if a missing host printed an error that its agent could not write into the folder."""
        for node in self._missing_nodes:
            error_lines = [line for line in group.last_log_lines(node).splitlines() if line.startswith(STDERR_PREFIX)]
            if error_lines:
                raise InputError(error_lines[-1].removeprefix(STDERR_PREFIX).strip())

    @property
    def _missing_nodes(self) -> list[int]:
        ready_hosts = self._folder.ready_hosts()
        return [node for node in range(self._spec.num_nodes) if node not in ready_hosts]

    def _wait_for_failures(self) -> None:
        """Wait until every host has reported its end. One failure ends all hosts, and the failed host may report last."""
        end_time = time.monotonic() + FAILURES_TIMEOUT_S
        while (
            len(self._folder.failures()) + len(self._folder.finished_nodes()) < self._spec.num_nodes
            and time.monotonic() < end_time
        ):
            time.sleep(POLL_S)

    def _failure_error(self, group: HostGroup) -> InputError | StageError:
        failures = self._folder.failures()
        if failures:
            return error_from_failures(failures, num_nodes=self._spec.num_nodes, folder=self._folder)
        self._raise_printed_error(group)
        if free_bytes(self._folder.path) < MIN_STAGE_BYTES:
            return disk_full_error(self._folder.path, reason="the output of hosts and ranks does not fit")
        return LaunchError(f"{group.exit_summary()}{self._quote_logs(group, range(self._spec.num_nodes))}")

    def _quote_logs(self, group: HostGroup, nodes: Iterable[int]) -> str:
        lines_by_node = {node: group.last_log_lines(node) for node in nodes}
        return "".join(f"\nlast lines of node {node}:\n{log_lines}" for node, log_lines in lines_by_node.items() if log_lines)

    def _timeout_error(self, group: HostGroup) -> InputError | StageError:
        deadline = self._deadlines[self._phase]
        if self._phase in ("queue", "rendezvous"):
            return self._rendezvous_error(group, deadline)
        timeout_text = "did not start within" if self._phase == "start" else "sent no heartbeat for"
        stack_dumps = self._dump_stacks()
        group.end()
        return LaunchError(
            f"the ranks {timeout_text} {deadline.limit_s:g} s; raise {deadline.setting} if this is normal for the model. "
            f"Innermost functions of each rank:\n{stack_dumps}"
        )

    def _dump_stacks(self) -> str:
        self._folder.stacks_request_path.touch()
        stack_paths = [self._folder.stack_path(rank) for rank in self._folder.started_ranks()]
        end_time = time.monotonic() + STACKS_TIMEOUT_S
        while (
            not all(stack_path.is_file() and stack_path.stat().st_size for stack_path in stack_paths)
            and time.monotonic() < end_time
        ):
            time.sleep(POLL_S)
        time.sleep(POLL_S)  # the last dump may not be complete yet
        return format_stacks(self._folder, world_size=self._spec.world_size)

    def _rendezvous_error(self, group: HostGroup, deadline: Deadline) -> InputError | StageError:
        group.end()  # first, because some schedulers provide logs only for hosts that have ended
        ready_hosts, missing_nodes = self._folder.ready_hosts(), self._missing_nodes
        hosts_started = f"{len(ready_hosts)} of {self._spec.num_nodes} hosts started"
        host_names = (
            ", ".join(f"node {node} (host {host_ready.host})" for node, host_ready in sorted(ready_hosts.items())) or "none"
        )
        if missing_nodes:
            self._raise_printed_error(group)
            return LaunchError(
                f"{hosts_started} within {deadline.limit_s:g} s: {host_names}; missing: "
                f"{', '.join(f'node {node}' for node in missing_nodes)}; {group.exit_summary()}; raise {deadline.setting} if "
                f"the hosts need more time to start{self._quote_logs(group, missing_nodes)}"
            )
        late_ranks = sorted(set(range(self._spec.world_size)) - self._folder.started_ranks().keys())
        return LaunchError(
            f"{hosts_started} ({host_names}), but after {deadline.limit_s:g} s ranks {', '.join(map(str, late_ranks))} do not "
            f"run: the hosts could not reach each other at {ready_hosts[0].address}:{ready_hosts[0].port}, or the ranks need "
            f"more time to start; open launcher.rendezvous_port between the hosts, or raise {deadline.setting}"
            f"{self._quote_logs(group, range(self._spec.num_nodes))}"
        )
