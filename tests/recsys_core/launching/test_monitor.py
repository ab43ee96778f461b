"""The deadlines of a launch, with the files that hosts and ranks would write, but without processes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from recsys_core.errors import LaunchError
from recsys_core.launching.heartbeat import HeartbeatFile
from recsys_core.launching.messages import HostReady, LaunchFolder, LaunchSpec, RankStarted
from recsys_core.launching.monitor import Deadline, GroupState, Monitor, Phase

NUM_NODES = 2
LIMITS: dict[Phase, Deadline] = {
    "queue": Deadline(60.0, "launcher.queue_timeout_s"),
    "rendezvous": Deadline(0.3, "launcher.rendezvous_timeout_s"),
    "start": Deadline(0.3, "training.start_timeout_s"),
    "work": Deadline(0.3, "training.heartbeat_timeout_s"),
}


class RunningGroup:
    """Hosts that run until the monitor ends them."""

    def __init__(self) -> None:
        self.has_ended = False

    def state(self) -> GroupState:
        return "ended" if self.has_ended else "running"

    def exit_summary(self) -> str:
        return "the scheduler ended the hosts"

    def last_log_lines(self, node: int) -> str:
        return f"the last line of host {node}"

    def end(self) -> None:
        self.has_ended = True


def error_of_launch(
    folder: Path, *, num_ready_hosts: int, num_started_ranks: int, poll: Callable[[], None] = lambda: None
) -> str:
    """Return the error of a launch in which no further host or rank starts, and check that its hosts were ended."""
    spec = LaunchSpec(
        device="cpu",
        num_nodes=NUM_NODES,
        processes_per_node=1,
        token="t",
        versions={},
        module="m",
        job=folder / "job.json",
        rendezvous_port=0,
        rendezvous_timeout_s=1.0,
        lease_timeout_s=None,
    )
    launch_folder, group = LaunchFolder(folder), RunningGroup()
    for node in range(num_ready_hosts):
        launch_folder.write(f"ready-{node}.json", HostReady(node=node, host=f"h{node}", pid=1, address="10.0.0.1", port=29500))
    for rank in range(num_started_ranks):
        launch_folder.write(f"rank-{rank}.json", RankStarted(rank=rank, node=rank, host=f"h{rank}", pid=1))
    heartbeat_file = HeartbeatFile(folder / "heartbeat", start_timeout_s=1, timeout_s=None)
    with pytest.raises(LaunchError) as caught:
        Monitor(spec, launch_folder, deadlines=LIMITS, heartbeat=heartbeat_file).wait(group, poll=poll)
    assert group.has_ended
    return str(caught.value)


def test_hosts_that_do_not_start_in_time_are_named_with_the_setting_and_their_logs(tmp_path: Path) -> None:
    message = error_of_launch(tmp_path, num_ready_hosts=1, num_started_ranks=0)
    assert message.startswith("1 of 2 hosts started within 0.3 s: node 0 (host h0); missing: node 1; the scheduler ended")
    assert "raise launcher.rendezvous_timeout_s if" in message and message.endswith("the last line of host 1")


def test_ranks_that_do_not_start_in_time_are_named_with_the_address_and_the_setting(tmp_path: Path) -> None:
    message = error_of_launch(tmp_path, num_ready_hosts=2, num_started_ranks=1)
    assert "after 0.3 s ranks 1 do not run: the hosts could not reach each other at 10.0.0.1:29500" in message
    assert "raise launcher.rendezvous_timeout_s" in message


def test_ranks_without_a_first_heartbeat_are_reported_with_the_setting_for_slow_starts(tmp_path: Path) -> None:
    message = error_of_launch(tmp_path, num_ready_hosts=2, num_started_ranks=2)
    assert message.startswith("the ranks did not start within 0.3 s; raise training.start_timeout_s if")
    assert "rank 0 (host h0, process 1): did not respond" in message


def test_each_heartbeat_sets_the_longest_time_until_the_next_one(tmp_path: Path) -> None:
    def write_heartbeat() -> None:
        if not (tmp_path / "heartbeat").exists():
            (tmp_path / "heartbeat").write_text("0.4")

    message = error_of_launch(tmp_path, num_ready_hosts=2, num_started_ranks=2, poll=write_heartbeat)
    assert message.startswith("the ranks sent no heartbeat for 0.4 s; raise training.heartbeat_timeout_s if")
