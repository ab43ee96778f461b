"""Checks of shared memory, devices and network interfaces."""

import threading
from pathlib import Path

import pytest

from flows.doctor.finding import not_used, ok, run_checks
from flows.doctor.installation import check_devices, check_network, check_shared_memory
from flows.settings.pipeline import PipelineConfig
from flows.settings.template import starter_config
from recsys_core.preflight import Gpu


def config_with(folder: Path, **settings: object) -> PipelineConfig:
    config = starter_config().with_absolute_paths(folder)
    return PipelineConfig.model_validate(config.model_dump(mode="json") | settings)


def torchx(**settings: object) -> dict[str, object]:
    return {
        "launcher": {"kind": "torchx", "scheduler": "slurm", **settings},
        "sharding": {"cluster": {"device": "cpu", "processes_per_node": 1}},
    }


def test_checks_run_at_the_same_time_and_a_check_without_result_is_a_problem() -> None:
    never, barrier = threading.Event(), threading.Barrier(2)

    def wait() -> None:
        barrier.wait(5)

    def fail() -> None:
        barrier.wait(5)
        raise OSError("s3://ada:s3cret@bucket is gone")

    checks = {"first": lambda: (wait(), ok("fine"))[1], "second": fail, "third": lambda: (never.wait(), ok(""))[1]}
    findings = run_checks(checks, timeout_s=0.5)  # type: ignore[arg-type]
    assert findings["first"] == ok("fine")
    assert findings["second"] == ("problem", "OSError: s3://ada:***@bucket is gone")
    assert findings["third"].status == "problem" and findings["third"].text.startswith("no result within 0.5 s")
    never.set()


def test_little_shared_memory_is_a_problem_with_the_option_that_enlarges_it(small_disk: Path) -> None:
    finding = check_shared_memory(small_disk)
    assert finding.status == "problem" and "--shm-size" in finding.text
    assert check_shared_memory(small_disk / "missing").status == "problem"


def test_ranks_without_gpus_are_a_problem(tmp_path: Path) -> None:
    cuda = config_with(tmp_path, sharding={"cluster": {"device": "cuda", "processes_per_node": 2}})
    gpu = Gpu("H100", 2**36)
    assert check_devices(cuda, gpus=()).text.startswith(
        "sharding.cluster has device cuda and 2 ranks, but torch can use 0 GPUs"
    )
    assert check_devices(cuda, gpus=(gpu,)).status == "problem"
    assert check_devices(cuda, gpus=(gpu, gpu)) == ok("2 GPUs (H100), 2 ranks")
    assert check_devices(config_with(tmp_path), gpus=()) == ok("CPU, 2 ranks")
    remote = config_with(tmp_path, **torchx())
    assert check_devices(remote, gpus=()) == not_used("training runs on hosts of slurm, not on this machine")


@pytest.mark.parametrize(
    ("settings", "setting"),
    [({"interface": "ib7"}, "launcher.interface"), ({"env": {"NCCL_SOCKET_IFNAME": "ib7"}}, "launcher.env.NCCL_SOCKET_IFNAME")],
)
def test_an_interface_that_does_not_exist_is_named_with_its_setting(
    tmp_path: Path, settings: dict[str, object], setting: str
) -> None:
    finding = check_network(config_with(tmp_path, **torchx(**settings)))
    assert finding.status == "problem" and finding.text.startswith(f"{setting} is ib7, but this machine has ")
    assert check_network(config_with(tmp_path, **torchx(interface="lo"))).status == "ok"
    assert check_network(config_with(tmp_path)).text.startswith("lo 127.0.0.1")
