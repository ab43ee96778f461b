"""What an agent looks at before it starts a rank; the hosts' side of tests/recsys_core/launching/test_torchx.py."""

import json
from pathlib import Path

import pytest

from recsys_core.launching import agent
from recsys_core.launching.messages import Failure, Joined, LaunchFolder, Order, running_versions


@pytest.fixture(autouse=True)
def storage_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "STORAGE_WAIT_S", 0.0)


def ordered(folder: Path, **changes: object) -> LaunchFolder:
    job = folder / "job.json"
    job.write_text("{}")
    order = Order(
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
    launch = LaunchFolder(folder)
    launch.order.write_text(json.dumps(order.model_dump(mode="json") | changes))
    return launch


def failure(launch: LaunchFolder) -> Failure:
    (found,) = launch.failures()
    return found


def test_without_the_order_it_says_so_on_stderr_for_it_has_nowhere_else(tmp_path: Path, capfd) -> None:
    assert agent.main(str(tmp_path / "launch.json"), "ours", "1", "") == agent.UNFIT
    said = capfd.readouterr().err
    assert said.startswith(agent.SAYS) and f"(node 1) does not see {tmp_path}/launch.json" in said
    assert not any(tmp_path.iterdir())


def test_another_order_of_the_same_name_is_not_touched(tmp_path: Path, capfd) -> None:
    launch = ordered(tmp_path)
    assert agent.main(str(launch.order), "theirs", "1", "") == agent.UNFIT
    assert "(token ours, not theirs)" in capfd.readouterr().err
    assert not launch.failures() and not launch.joined()


def test_an_order_of_another_version_is_refused_though_it_could_not_be_read(tmp_path: Path) -> None:
    launch = ordered(tmp_path, versions={**running_versions(), "torch": "2.99.0"}, setting_of_the_future=1)
    assert agent.main(str(launch.order), "ours", "1", "") == agent.UNFIT
    reason = failure(launch).reason
    assert f"runs torch {running_versions()['torch']} where the run has 2.99.0; use the same image" in reason
    assert not failure(launch).retryable


def test_a_host_that_does_not_see_the_job_says_which_file(tmp_path: Path) -> None:
    launch = ordered(tmp_path, job="/elsewhere/job.json")
    assert agent.main(str(launch.order), "ours", "0", "") == agent.UNFIT
    assert "does not see /elsewhere/job.json" in failure(launch).reason


def test_more_processes_than_gpus_are_refused_with_both_numbers(tmp_path: Path) -> None:
    launch = ordered(tmp_path, device="cuda", processes_per_node=64)
    assert agent.main(str(launch.order), "ours", "0", "") == agent.UNFIT
    assert "(node 0): the plan wants 64 GPUs per host, but this one has" in failure(launch).reason


def test_a_host_that_its_scheduler_starts_again_refuses(tmp_path: Path) -> None:
    launch = ordered(tmp_path)
    launch.write("joined-1.json", Joined(node=1, host="before", pid=1, address="10.0.0.1", port=0))
    assert agent.main(str(launch.order), "ours", "1", "") == agent.UNFIT
    assert "(node 1) was started a second time for the same attempt" in failure(launch).reason


def test_without_the_first_host_the_others_do_not_wait_for_ever(tmp_path: Path) -> None:
    launch = ordered(tmp_path)
    assert agent.main(str(launch.order), "ours", "1", "") == agent.UNFIT
    assert "node 0 did not start within 0.1 s" in failure(launch).reason and failure(launch).retryable
    assert list(launch.joined()) == [1]


def test_a_host_that_leaves_the_queue_after_its_run_was_killed_starts_no_rank(tmp_path: Path) -> None:
    launch = ordered(tmp_path, lease_timeout_s=0.3)
    launch.renew_lease("ours", 7)  # and never again
    assert agent.main(str(launch.order), "ours", "0", "") == agent.UNFIT
    assert "(node 0) started too late: the process that asked for it is gone" in failure(launch).reason
    assert not launch.node(0).exists()
