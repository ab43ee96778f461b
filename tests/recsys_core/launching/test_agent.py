"""The checks of an agent before it starts a rank; test_torchx.py has the launching process's side of them."""

import json
from pathlib import Path

import pytest

from recsys_core.launching import agent
from recsys_core.launching.messages import STDERR_PREFIX, HostFailure, HostReady, LaunchFolder, LaunchSpec, running_versions


@pytest.fixture(autouse=True)
def no_wait_for_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "STORAGE_TIMEOUT_S", 0.0)


def write_spec(path: Path, **changes: object) -> LaunchFolder:
    job = path / "job.json"
    job.write_text("{}")
    spec = LaunchSpec(
        token="ours",
        versions=running_versions(),
        module="none",
        job=job,
        device="cpu",
        num_nodes=2,
        processes_per_node=1,
        rendezvous_port=0,
        rendezvous_timeout_s=0.1,
        lease_timeout_s=None,
        interface="lo",
    )
    folder = LaunchFolder(path)
    folder.spec_path.write_text(json.dumps(spec.model_dump(mode="json") | changes))
    return folder


def only_failure(folder: LaunchFolder) -> HostFailure:
    (failure,) = folder.failures()
    return failure


def test_a_missing_spec_is_reported_on_stderr_because_the_folder_is_not_shared(tmp_path: Path, capfd) -> None:
    assert agent.main(str(tmp_path / "launch.json"), "ours", "1", "") == agent.EXIT_REJECTED
    message = capfd.readouterr().err
    assert message.startswith(STDERR_PREFIX) and f"(node 1) does not see {tmp_path}/launch.json" in message
    assert not any(tmp_path.iterdir())


def test_the_folder_of_another_launch_is_not_written_to(tmp_path: Path, capfd) -> None:
    folder = write_spec(tmp_path)
    assert agent.main(str(folder.spec_path), "theirs", "1", "") == agent.EXIT_REJECTED
    assert "its token is ours, but the launching process wrote theirs; the folder is not shared" in capfd.readouterr().err
    assert not folder.failures() and not folder.ready_hosts()


def test_a_spec_of_another_version_is_rejected_even_if_it_cannot_be_parsed(tmp_path: Path) -> None:
    folder = write_spec(tmp_path, versions={**running_versions(), "torch": "2.99.0"}, setting_of_the_future=1)
    assert agent.main(str(folder.spec_path), "ours", "1", "") == agent.EXIT_REJECTED
    reason = only_failure(folder).reason
    assert f"has torch {running_versions()['torch']} instead of 2.99.0; use the same image" in reason
    assert not only_failure(folder).retryable


def test_a_missing_job_file_is_reported_with_its_path(tmp_path: Path) -> None:
    folder = write_spec(tmp_path, job="/elsewhere/job.json")
    assert agent.main(str(folder.spec_path), "ours", "0", "") == agent.EXIT_REJECTED
    assert "does not see /elsewhere/job.json" in only_failure(folder).reason


def test_more_processes_than_gpus_are_rejected_with_both_numbers(tmp_path: Path) -> None:
    folder = write_spec(tmp_path, device="cuda", processes_per_node=64)
    assert agent.main(str(folder.spec_path), "ours", "0", "") == agent.EXIT_REJECTED
    assert "(node 0): the sharding plan needs 64 GPUs per host, but this host has" in only_failure(folder).reason


def test_a_host_that_its_scheduler_starts_a_second_time_is_rejected(tmp_path: Path) -> None:
    folder = write_spec(tmp_path)
    folder.write("ready-1.json", HostReady(node=1, host="before", pid=1, address="10.0.0.1", port=0))
    assert agent.main(str(folder.spec_path), "ours", "1", "") == agent.EXIT_REJECTED
    assert "(node 1) was started a second time for the same launch" in only_failure(folder).reason


def test_a_host_waits_for_the_first_one_only_until_the_timeout(tmp_path: Path) -> None:
    folder = write_spec(tmp_path)
    assert agent.main(str(folder.spec_path), "ours", "1", "") == agent.EXIT_REJECTED
    assert "waited 0.1 s, but node 0 did not start" in only_failure(folder).reason and only_failure(folder).retryable
    assert list(folder.ready_hosts()) == [1]


def test_a_host_that_leaves_the_queue_after_its_run_was_killed_starts_no_rank(tmp_path: Path) -> None:
    folder = write_spec(tmp_path, lease_timeout_s=0.3)
    folder.renew_lease("ours", 7)  # and never again
    assert agent.main(str(folder.spec_path), "ours", "0", "") == agent.EXIT_REJECTED
    assert "(node 0) started after the launching process had ended" in only_failure(folder).reason
    assert not folder.log_folder(0).exists()
