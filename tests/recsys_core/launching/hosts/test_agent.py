"""Checks of an agent before it starts a rank. test_torchx.py tests how the launching process reports failed checks."""

import itertools
import json
from pathlib import Path

import pytest

from recsys_core.launching.config import TorchxLauncher
from recsys_core.launching.heartbeat import heartbeat
from recsys_core.launching.hosts import agent
from recsys_core.launching.messages import (
    STDERR_PREFIX,
    Host,
    HostReport,
    LaunchFolder,
    LaunchSpec,
    RankLayout,
    running_versions,
)


@pytest.fixture(autouse=True)
def no_wait_for_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "STORAGE_TIMEOUT_S", 0.0)


def write_spec(folder_path: Path, **changes: object) -> LaunchFolder:
    """Write the files of a launch on two hosts, with `changes` to the spec. Return the folder of the launch."""
    job_path = folder_path / "job.json"
    job_path.write_text("{}")
    spec = LaunchSpec(
        token="ours",
        versions=running_versions(),
        module="none",
        job_path=job_path,
        layout=RankLayout(device="cpu", num_hosts=2, ranks_per_host=1),
        launcher=TorchxLauncher(scheduler="slurm", interface="lo", rendezvous_timeout_s=0.1, lease_timeout_s=5.1),
    )
    folder = LaunchFolder(folder_path)
    folder.spec_path.write_text(json.dumps(spec.model_dump(mode="json") | changes))
    return folder


def only_failure(folder: LaunchFolder) -> HostReport:
    """Return the report of the only host that has failed."""
    (host_report,) = folder.end_reports()
    return host_report


def run_agent(folder: LaunchFolder, *, host: int, launch: str = "ours") -> int:
    """Run the agent of a host in this process and return its exit code."""
    return agent.run_agent(folder.spec_path, launch, str(host), "")


def test_a_missing_spec_is_reported_as_a_folder_that_is_not_shared(tmp_path: Path, capfd) -> None:
    assert run_agent(LaunchFolder(tmp_path), host=1) == agent.EXIT_REJECTED
    message = capfd.readouterr().err
    assert message.startswith(STDERR_PREFIX) and f"cannot find {tmp_path}/launch.json" in message
    assert not any(tmp_path.iterdir())


def test_an_agent_writes_no_message_to_the_folder_of_another_launch(tmp_path: Path, capfd) -> None:
    folder = write_spec(tmp_path)
    assert run_agent(folder, host=1, launch="theirs") == agent.EXIT_REJECTED
    assert "its token is ours, but the launching process wrote theirs; the folder is not shared" in capfd.readouterr().err
    assert not folder.end_reports() and not folder.ready_reports()


def test_a_spec_of_another_version_is_rejected_even_if_it_cannot_be_parsed(tmp_path: Path) -> None:
    folder = write_spec(tmp_path, versions={**running_versions(), "torch": "2.99.0"}, setting_of_the_future=1)
    assert run_agent(folder, host=1) == agent.EXIT_REJECTED
    reason = only_failure(folder).reason
    assert f"has torch {running_versions()['torch']} instead of 2.99.0; use the same image" in reason
    assert not only_failure(folder).is_retryable


def test_a_missing_job_file_is_reported_with_its_path(tmp_path: Path) -> None:
    folder = write_spec(tmp_path, job_path="/elsewhere/job.json")
    assert run_agent(folder, host=0) == agent.EXIT_REJECTED
    assert "cannot find /elsewhere/job.json" in only_failure(folder).reason


def test_more_ranks_than_gpus_are_rejected_with_both_numbers(tmp_path: Path) -> None:
    folder = write_spec(tmp_path, layout={"device": "cuda", "num_hosts": 2, "ranks_per_host": 64})
    assert run_agent(folder, host=0) == agent.EXIT_REJECTED
    assert ": the sharding plan needs 64 GPUs per host, but this host has" in only_failure(folder).reason


def test_a_host_that_its_scheduler_starts_a_second_time_is_rejected(tmp_path: Path) -> None:
    folder = write_spec(tmp_path)
    folder.report_ready(HostReport(host=Host(index=1, name="before"), pid=1))
    assert run_agent(folder, host=1) == agent.EXIT_REJECTED
    assert "was started a second time for the same launch" in only_failure(folder).reason


def test_a_host_waits_for_the_first_host_only_until_the_timeout(tmp_path: Path) -> None:
    folder, heartbeat_counter = write_spec(tmp_path), itertools.count()
    with heartbeat(lambda: folder.renew_lease("ours", next(heartbeat_counter)), interval_s=0.1):
        assert run_agent(folder, host=1) == agent.EXIT_REJECTED
    assert "waited 0.1 s, but host 0 did not start" in only_failure(folder).reason and only_failure(folder).is_retryable
    assert list(folder.ready_reports()) == [1]


def test_a_host_that_leaves_the_queue_after_its_run_was_killed_starts_no_rank(tmp_path: Path) -> None:
    folder = write_spec(tmp_path)
    folder.renew_lease("ours", 7)  # the last time, because the launching process has been killed
    assert run_agent(folder, host=0) == agent.EXIT_REJECTED
    assert "started after the launching process had ended" in only_failure(folder).reason
    assert not folder.log_folder(0).exists()
