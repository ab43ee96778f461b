"""Package versions that do not fit together, memory and core limits of containers, and the environment of the tests."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from recsys_core import preflight
from recsys_core.preflight import (
    CgroupLimits,
    cgroup_limits,
    check_environment,
    check_versions,
    count_oom_kills,
    describe_memory,
    installed_versions,
)

CPU_VERSIONS = {
    "torch": "2.14.0+cpu",
    "torchrec": "1.9.0",
    "fbgemm-gpu-cpu": "1.9.0",
    "faiss-cpu": "1.15.1",
    "prefect": "3.8.8",
    "fastapi": "0.150.0",
}
GPU_VERSIONS = {"torch": "2.14.0", "torchrec": "1.9.0", "fbgemm-gpu": "1.9.0", "faiss-gpu": "1.15.1"}


@pytest.mark.parametrize("versions", [CPU_VERSIONS, GPU_VERSIONS, CPU_VERSIONS | {"torch": "2.14.1"}])
def test_versions_that_fit_together_are_not_reported(versions: dict[str, str]) -> None:
    assert check_versions(versions) == []


@pytest.mark.parametrize(
    ("versions", "start_of_sentence"),
    [
        (CPU_VERSIONS | {"torch": "2.13.0"}, "torch 2.13.0 with fbgemm-gpu-cpu 1.9.0: fbgemm 1.9 needs torch 2.14"),
        (GPU_VERSIONS | {"torch": "2.15.0"}, "torch 2.15.0 with fbgemm-gpu 1.9.0: fbgemm 1.9 needs torch 2.14"),
        (CPU_VERSIONS | {"torchrec": "1.8.0"}, "torchrec 1.8.0 with fbgemm-gpu-cpu 1.9.0: fbgemm 1.9 needs torchrec 1.9"),
        (GPU_VERSIONS | {"torch": "2.14.0+cpu"}, "torch 2.14.0+cpu is a CPU build, but fbgemm-gpu 1.9.0 needs CUDA"),
        (
            CPU_VERSIONS | {"fbgemm-gpu": "1.9.0", "torch": "2.14.0"},
            "fbgemm-gpu 1.9.0 and fbgemm-gpu-cpu 1.9.0 are installed together",
        ),
        (CPU_VERSIONS | {"faiss-gpu": "1.15.1"}, "faiss-gpu 1.15.1 and faiss-cpu 1.15.1 are installed together"),
        (CPU_VERSIONS | {"fbgemm-gpu-cpu": "0.8.0"}, "fbgemm-gpu-cpu 0.8.0: nightjar needs fbgemm 1.x"),
        (CPU_VERSIONS | {"fastapi": "0.155.1"}, "fastapi 0.155.1: prefect's server needs a version below 0.151"),
    ],
)
def test_a_mismatch_is_reported_in_one_sentence_with_the_versions_and_the_fix(
    versions: dict[str, str], start_of_sentence: str
) -> None:
    (problem,) = check_versions(versions)
    assert problem.startswith(start_of_sentence)
    assert "; run make clean setup" in problem


def test_the_problems_name_each_missing_package() -> None:
    assert check_versions({}) == [
        "torch is not installed; run make setup",
        "torchrec is not installed; run make setup",
        "neither fbgemm-gpu nor fbgemm-gpu-cpu is installed; run make setup",
        "neither faiss-gpu nor faiss-cpu is installed; run make setup",
    ]


def test_the_environment_of_the_tests_has_no_problem(tmp_path: Path) -> None:
    facts, problems = check_environment(tmp_path / "not" / "there")
    assert problems == []
    assert facts.items() >= installed_versions().items()
    assert {"python", "cores", "memory", "gpus", "free disk"} <= set(facts)
    usable_cores, all_cores = re.fullmatch(r"([\d.]+) usable of (\d+)", facts["cores"]).groups()  # type: ignore[union-attr]
    assert 0 < float(usable_cores) <= int(all_cores)


def test_reading_the_versions_imports_no_package() -> None:
    script = "import sys; from recsys_core.preflight import installed_versions; installed_versions(); print(*sys.modules)"
    imported_modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "recsys_core.preflight" in imported_modules
    assert not {"torch", "torchrec", "fbgemm_gpu", "faiss", "prefect", "mlflow"} & set(imported_modules)


def test_if_the_packages_cannot_be_imported_the_problem_has_the_import_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "_GPU_PROBE_SCRIPT", "raise ImportError('undefined symbol: _ZN5torch')")
    _, (problem,) = check_environment(tmp_path)
    assert "do not import together: ImportError: undefined symbol: _ZN5torch" in problem


def test_packages_of_unsuitable_versions_are_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight, "installed_versions", lambda: CPU_VERSIONS | {"torch": "2.13.0"})
    monkeypatch.setattr(preflight, "_GPU_PROBE_SCRIPT", f"open({str(tmp_path / 'ran')!r}, 'w')")
    _, problems = check_environment(tmp_path)
    assert len(problems) == 1
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight, "_MIN_DISK_BYTES", 2**62)
    monkeypatch.setattr(preflight, "_GPU_PROBE_SCRIPT", "print([])")
    _, (problem,) = check_environment(tmp_path)
    assert problem.startswith(f"{tmp_path}: only ")
    assert problem.endswith("; free some space")


def test_the_limits_of_a_cgroup_v2_are_the_lowest_limits_of_the_group_and_its_parents(tmp_path: Path) -> None:
    job_group = tmp_path / "sys" / "service" / "job"
    job_group.mkdir(parents=True)
    (tmp_path / "self").write_text("0::/service/job\n")
    (tmp_path / "sys" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "sys" / "memory.max").write_text("max\n")
    (job_group / "cpu.max").write_text("300000 100000\n")
    (job_group / "memory.max").write_text("4294967296\n")
    (job_group.parent / "cpu.max").write_text("150000 100000\n")
    (job_group.parent / "memory.max").write_text("1073741824\n")
    (job_group.parent / "memory.stat").write_text("anon 1000\nfile 5000\n")
    limits = cgroup_limits(mount_folder=tmp_path / "sys", membership_path=tmp_path / "self")
    assert limits == CgroupLimits(cores=1.5, memory_bytes=2**30, memory_used_bytes=1000)


def test_the_limits_of_a_container_with_cgroup_v1_are_in_the_mounted_folders(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n")
    cpu_folder, memory_folder = tmp_path / "sys" / "cpu,cpuacct", tmp_path / "sys" / "memory"
    cpu_folder.mkdir(parents=True)
    memory_folder.mkdir()
    (cpu_folder / "cpu.cfs_quota_us").write_text("200000\n")
    (cpu_folder / "cpu.cfs_period_us").write_text("100000\n")
    (memory_folder / "memory.limit_in_bytes").write_text("2147483648\n")
    (memory_folder / "memory.stat").write_text("cache 7\ntotal_rss 11\n")
    limits = cgroup_limits(mount_folder=tmp_path / "sys", membership_path=tmp_path / "self")
    assert limits == CgroupLimits(cores=2.0, memory_bytes=2**31, memory_used_bytes=11)


def test_no_quota_and_no_cgroups_mean_no_limit(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("3:cpu:/\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_limits(mount_folder=tmp_path, membership_path=tmp_path / "self") == CgroupLimits()
    assert cgroup_limits(mount_folder=tmp_path, membership_path=tmp_path / "absent") == CgroupLimits()


def test_a_memory_limit_below_the_memory_of_the_machine_is_described() -> None:
    machine_memory = SimpleNamespace(total=64 * 2**30, available=60 * 2**30)
    limits = CgroupLimits(memory_bytes=8 * 2**30, memory_used_bytes=2 * 2**30)
    expected_description = "6.0 GiB available of 8.0 GiB (limit; the machine has 64.0 GiB)"
    assert describe_memory(limits, machine_memory=machine_memory) == expected_description
    assert describe_memory(CgroupLimits(), machine_memory=machine_memory) == "60.0 GiB available of 64.0 GiB"


def test_the_gpus_are_listed_with_their_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight, "_GPU_PROBE_SCRIPT", f"import json; print(json.dumps([['H200', {140 * 2**30}]] * 2))")
    facts, _ = check_environment(tmp_path)
    assert facts["gpus"] == "H200, 140.0 GiB; H200, 140.0 GiB"


@pytest.mark.parametrize(
    ("membership_line", "relative_counter_path", "counter_content"),
    [
        ("0::/job\n", "job/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ("4:memory:/docker/abc\n", "memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
    ids=["v2", "v1 container"],
)
def test_processes_ended_by_the_out_of_memory_killer_are_counted(
    tmp_path: Path, membership_line: str, relative_counter_path: str, counter_content: str
) -> None:
    (tmp_path / "self").write_text(membership_line)
    assert count_oom_kills(mount_folder=tmp_path / "sys", membership_path=tmp_path / "self") is None
    counter_path = tmp_path / "sys" / relative_counter_path
    counter_path.parent.mkdir(parents=True)
    counter_path.write_text(counter_content)
    assert count_oom_kills(mount_folder=tmp_path / "sys", membership_path=tmp_path / "self") == 2
