"""The time limits of a launch, and the output of rank 0. The tests write the files that hosts and ranks would write."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from recsys_core.errors import LaunchError
from recsys_core.launching import monitor
from recsys_core.launching.config import TorchxLauncher
from recsys_core.launching.heartbeat import HeartbeatFile
from recsys_core.launching.messages import Host, HostReport, LaunchFolder, LaunchSpec, RankLayout, RankReport
from recsys_core.launching.monitor import MAX_LOGGED_LINES, GroupState, Monitor, RankOutput

NUM_HOSTS = 2


class RunningGroup:
    """Hosts that run until the monitor ends them."""

    def __init__(self) -> None:
        self.has_ended = False

    def state(self) -> GroupState:
        return "ended" if self.has_ended else "running"

    def exit_summary(self) -> str:
        return "the scheduler ended the hosts"

    def last_log_lines(self, host_index: int) -> str:
        return f"the last line of host {host_index}"

    def end(self) -> None:
        self.has_ended = True


@pytest.fixture(autouse=True)
def no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only briefly for the stacks of the ranks, which are not real processes."""
    monkeypatch.setattr(monitor, "STACKS_TIMEOUT_S", 0.1)


def error_of_launch(
    folder: Path, *, num_ready_hosts: int, num_started_ranks: int, poll: Callable[[], None] = lambda: None
) -> str:
    """Return the message of a launch in which only some hosts and ranks start. Assert that the monitor ended the hosts."""
    spec = LaunchSpec(
        token="t",
        versions={},
        module="m",
        job_path=folder / "job.json",
        layout=RankLayout(device="cpu", num_hosts=NUM_HOSTS, ranks_per_host=1),
        launcher=TorchxLauncher(scheduler="slurm", rendezvous_timeout_s=0.3),
    )
    launch_folder, group = LaunchFolder(folder), RunningGroup()
    hosts = [Host(index=index, name=f"h{index}") for index in range(NUM_HOSTS)]
    for host in hosts[:num_ready_hosts]:
        launch_folder.report_ready(HostReport(host=host, pid=1, address="10.0.0.1", port=29500))
    for host in hosts[:num_started_ranks]:
        launch_folder.report_start(RankReport(rank=host.index, host=host, pid=1))
    heartbeat_file = HeartbeatFile(folder / "heartbeat", start_timeout_s=0.3, timeout_s=None)
    with pytest.raises(LaunchError) as error_info:
        Monitor(spec, launch_folder, heartbeat_file=heartbeat_file).wait(group, poll=poll)
    assert group.has_ended
    return str(error_info.value)


def test_hosts_that_do_not_start_in_time_are_named_with_the_setting_and_their_logs(tmp_path: Path) -> None:
    message = error_of_launch(tmp_path, num_ready_hosts=1, num_started_ranks=0)
    assert message.startswith("1 of 2 hosts started within 0.3 s: host 0 (h0); missing: host 1; the scheduler ended")
    assert "raise launcher.rendezvous_timeout_s if" in message and message.endswith("the last line of host 1")


def test_ranks_that_do_not_start_in_time_are_named_with_the_address_and_the_setting(tmp_path: Path) -> None:
    message = error_of_launch(tmp_path, num_ready_hosts=2, num_started_ranks=1)
    assert "after 0.3 s these ranks do not run: 1; the hosts could not reach each other at 10.0.0.1:29500" in message
    assert "raise launcher.rendezvous_timeout_s" in message


def test_the_error_about_a_missing_first_heartbeat_names_the_setting(tmp_path: Path) -> None:
    message = error_of_launch(tmp_path, num_ready_hosts=2, num_started_ranks=2)
    assert message.startswith("the ranks did not start within 0.3 s; raise training.start_timeout_s if")
    assert "rank 0 (host h0, process 1): did not respond" in message


def test_the_content_of_the_heartbeat_file_limits_the_time_until_the_next_heartbeat(tmp_path: Path) -> None:
    def write_heartbeat() -> None:
        if not (tmp_path / "heartbeat").exists():
            (tmp_path / "heartbeat").write_text("0.4")

    message = error_of_launch(tmp_path, num_ready_hosts=2, num_started_ranks=2, poll=write_heartbeat)
    assert message.startswith("the ranks sent no heartbeat for 0.4 s; raise training.heartbeat_timeout_s if")


def test_complete_lines_of_rank_0_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rank_output = RankOutput(tmp_path / "host-0")
    rank_output.relay()  # no rank has started
    for rank in (0, 1):
        rank_folder = tmp_path / "host-0" / "token" / "attempt_0" / str(rank)
        rank_folder.mkdir(parents=True)
        (rank_folder / "stderr.log").write_text(f"a warning of rank {rank}\nhalf a")
    rank_output.relay()
    with (tmp_path / "host-0" / "token" / "attempt_0" / "0" / "stderr.log").open("a") as file:
        file.write(" line\n")
    rank_output.relay()
    rank_output.relay()
    assert [record.getMessage() for record in caplog.records] == ["rank 0: a warning of rank 0", "rank 0: half a line"]
    assert {record.__dict__["rank"] for record in caplog.records} == {0}


def test_only_the_first_lines_of_a_rank_are_logged_and_then_the_path_of_its_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    output_path = tmp_path / "host-0" / "token" / "attempt_0" / "0" / "stdout.log"
    output_path.parent.mkdir(parents=True)
    output_path.write_text("line\n" * (MAX_LOGGED_LINES + 100))
    rank_output = RankOutput(tmp_path / "host-0")
    rank_output.relay()
    rank_output.relay()
    assert len(caplog.records) == MAX_LOGGED_LINES + 1
    assert str(output_path) in caplog.records[-1].getMessage()
