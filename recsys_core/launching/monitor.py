"""Follows an attempt from phase to phase: hosts are waited for, ranks meet, the first sign of life, work."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recsys_core.disk import MIN_STAGE_BYTES, disk_full_error, free_bytes
from recsys_core.errors import InputError, LaunchError, StageError
from recsys_core.launching.agent import SAYS
from recsys_core.launching.failures import error_of, where_ranks_are
from recsys_core.launching.host_group import Group
from recsys_core.launching.messages import LaunchFolder, Order

POLL_S = 0.2
STACKS_WAIT_S = 5.0
LAST_WORDS_WAIT_S = 3.0
EXIT_WAIT_S = 30.0

Phase = Literal["queue", "meeting", "start", "work"]


@dataclass(frozen=True)
class Deadline:
    """How long a phase may last, and the setting that says so."""

    limit_s: float
    setting: str


class Watch:
    """alive: the file that ranks touch while they work; of an earlier attempt it may be there already."""

    def __init__(self, order: Order, folder: LaunchFolder, *, deadlines: dict[Phase, Deadline], alive: Path) -> None:
        self._order, self._folder, self._deadlines, self._alive = order, folder, deadlines, alive
        self._last_sign = self._sign()
        self._phase: Phase = "queue"
        self._since = time.monotonic()

    def until_end(self, group: Group, *, poll: Callable[[], None]) -> None:
        """Returns when all ranks ended well, and raises what `launch` does. poll: called about five times a second."""
        while not self._is_done:
            poll()
            state = group.state()
            if self._folder.failures() or state == "ended":
                self._await_last_words()
                if self._is_done:
                    break
                group.end()
                raise self._error(group)
            self._advance(running=state == "running")
            if self._phase == "meeting":
                self._listen(group)
            if time.monotonic() - self._since > self._deadlines[self._phase].limit_s:
                raise self._too_late(group)
            time.sleep(POLL_S)
        deadline = time.monotonic() + EXIT_WAIT_S
        while group.state() != "ended" and time.monotonic() < deadline:
            time.sleep(POLL_S)

    @property
    def _is_done(self) -> bool:
        return len(self._folder.done()) == self._order.num_nodes

    def _sign(self) -> tuple[int, int] | None:
        # Compared with itself, never with a clock: the file's times may be those of another host.
        if not self._alive.is_file():
            return None
        now = self._alive.stat()
        return now.st_mtime_ns, now.st_size

    def _advance(self, *, running: bool) -> None:
        phase = self._phase
        if phase == "queue" and (running or self._folder.joined()):
            phase = "meeting"
        if phase == "meeting" and len(self._folder.ranks()) == self._order.world_size:
            phase = "start"
        sign = self._sign()
        if sign != self._last_sign:
            self._last_sign, self._since, phase = sign, time.monotonic(), "work"
        if phase != self._phase:
            self._phase, self._since = phase, time.monotonic()

    def _listen(self, group: Group) -> None:
        """InputError as soon as the agent of a host that is missing says why it cannot write it into the folder."""
        for node in self._missing:
            said = [line.removeprefix(SAYS).strip() for line in group.log(node).splitlines() if line.startswith(SAYS)]
            if said:
                raise InputError(said[-1])

    @property
    def _missing(self) -> list[int]:
        joined = self._folder.joined()
        return [node for node in range(self._order.num_nodes) if node not in joined]

    def _await_last_words(self) -> None:
        """One host's failure ends the others'; the cause may be told by any of them."""
        deadline = time.monotonic() + LAST_WORDS_WAIT_S
        while len(self._folder.failures()) + len(self._folder.done()) < self._order.num_nodes and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _error(self, group: Group) -> InputError | StageError:
        failures = self._folder.failures()
        if failures:
            return error_of(failures, nodes=self._order.num_nodes, folder=self._folder)
        self._listen(group)
        if free_bytes(self._folder.path) < MIN_STAGE_BYTES:
            return disk_full_error(self._folder.path, needed="what hosts and ranks write does not fit")
        return LaunchError(f"{group.story()}{self._logs(group, range(self._order.num_nodes))}")

    def _logs(self, group: Group, nodes: range | list[int]) -> str:
        tails = [(node, group.log(node)) for node in nodes]
        return "".join(f"\nlast lines of node {node}:\n{tail}" for node, tail in tails if tail)

    def _too_late(self, group: Group) -> InputError | StageError:
        deadline = self._deadlines[self._phase]
        if self._phase in ("queue", "meeting"):
            return self._not_met(group, deadline)
        what = "did not start within" if self._phase == "start" else "gave no sign of life for"
        stacks = self._ask_for_stacks()
        group.end()
        return LaunchError(
            f"the ranks {what} {deadline.limit_s:g} s; raise {deadline.setting} if that is normal here. They were in:\n{stacks}"
        )

    def _ask_for_stacks(self) -> str:
        self._folder.stacks.touch()
        paths = [self._folder.stack(rank) for rank in self._folder.ranks()]
        deadline = time.monotonic() + STACKS_WAIT_S
        while not all(path.is_file() and path.stat().st_size for path in paths) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        time.sleep(POLL_S)  # the last lines of the last stack
        return where_ranks_are(self._folder, world_size=self._order.world_size)

    def _not_met(self, group: Group, deadline: Deadline) -> InputError | StageError:
        group.end()  # before the logs are read: of ended hosts they can be had
        joined, missing = self._folder.joined(), self._missing
        there = ", ".join(f"node {node} (host {one.host})" for node, one in sorted(joined.items())) or "none"
        count = f"{len(joined)} of {self._order.num_nodes} hosts"
        if missing:
            self._listen(group)
            return LaunchError(
                f"{count} started within {deadline.limit_s:g} s: {there}; missing: "
                f"{', '.join(f'node {node}' for node in missing)}; {group.story()}; raise {deadline.setting} if hosts take "
                f"longer here{self._logs(group, missing)}"
            )
        late = sorted(set(range(self._order.world_size)) - self._folder.ranks().keys())
        return LaunchError(
            f"{count} started ({there}), but after {deadline.limit_s:g} s ranks {', '.join(map(str, late))} do not run: the "
            f"hosts did not meet at {joined[0].address}:{joined[0].port} (open launcher.rendezvous_port between them), or "
            f"starting takes longer here (raise {deadline.setting}){self._logs(group, range(self._order.num_nodes))}"
        )
