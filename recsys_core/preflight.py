"""Checks of the environment for `nightjar doctor`: package versions, CPU, memory, GPUs and free disk.

An incompatible pair of torch and fbgemm fails at import with an undefined symbol. The versions are therefore read from the
packages' metadata. If they are compatible, a separate process imports torch and lists the GPUs.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from recsys_core.disk import free_bytes
from recsys_core.units import GIB, format_gib

PACKAGES = (
    "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "faiss-cpu", "faiss-gpu", "numpy", "pyarrow", "duckdb",
    "prefect", "mlflow", "fastapi",
)  # fmt: skip
_MIN_DISK_BYTES = GIB
_OOM_FILE_NAMES = ("memory.events", "memory.oom_control")
_GPU_PROBE_SCRIPT = """
import json, torch, torchrec, faiss
devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps([[device.name, device.total_memory] for device in devices]))
"""
_PROBE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of the container or service that this process runs in; None: no limit."""

    cores: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int = 0


def check_environment(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Check the environment, the machine and the disk of `folder`, which need not exist yet.

    Returns:
        properties: versions, cores, memory, GPUs and free disk by name, as text.
        problems: one sentence for each problem, with the fix at its end. If the list is empty, a run can start.
    """
    version_by_package = installed_versions()
    problems = check_versions(version_by_package)
    gpus_text = ""
    if not problems:
        gpus_text, problems = _probe_gpus()
    free_disk_bytes = free_bytes(folder)
    if free_disk_bytes < _MIN_DISK_BYTES:
        problems.append(
            f"{folder}: only {format_gib(free_disk_bytes)} of disk free, but a run needs at least "
            f"{format_gib(_MIN_DISK_BYTES)}; free some space"
        )
    limits, num_cores = cgroup_limits(), len(os.sched_getaffinity(0))
    properties = {
        "python": f"{platform.python_version()} ({sys.executable})",
        **version_by_package,
        "cores": f"{min(num_cores, limits.cores or num_cores):g} usable of {os.cpu_count() or num_cores}",
        "memory": describe_memory(limits, machine_memory=psutil.virtual_memory()),
        "gpus": gpus_text or "none that torch can use",
        "free disk": f"{format_gib(free_disk_bytes)} in {folder}",
    }
    return properties, problems


def describe_memory(limits: CgroupLimits, *, machine_memory: Any) -> str:
    """Return the available and the usable memory as text.

    machine_memory: the result of psutil.virtual_memory(), or an object with its attributes `total` and `available`, in bytes.
    """
    usable_bytes = min(machine_memory.total, limits.memory_bytes or machine_memory.total)
    available_bytes = max(0, min(machine_memory.available, usable_bytes - limits.memory_used_bytes))
    memory_text = f"{format_gib(available_bytes)} available of {format_gib(usable_bytes)}"
    return (
        memory_text
        if usable_bytes == machine_memory.total
        else f"{memory_text} (limit; the machine has {format_gib(machine_memory.total)})"
    )


def installed_versions() -> dict[str, str]:
    """Return the versions of the installed PACKAGES, without importing them."""
    version_by_package = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            version_by_package[package] = metadata.version(package)
    return version_by_package


def check_versions(version_by_package: Mapping[str, str]) -> list[str]:
    """Return a sentence with a fix for each conflict among the versions.

    >>> check_versions({"torch": "2.13.0", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0", "faiss-cpu": "1.15.1"})
    ['torch 2.13.0 with fbgemm-gpu-cpu 1.9.0: fbgemm 1.9 needs torch 2.14; run make clean setup']
    """
    problems = [
        f"{package} is not installed; run make setup" for package in ("torch", "torchrec") if package not in version_by_package
    ]
    for gpu_package, cpu_package in (("fbgemm-gpu", "fbgemm-gpu-cpu"), ("faiss-gpu", "faiss-cpu")):
        if gpu_package in version_by_package and cpu_package in version_by_package:
            packages_text = (
                f"{gpu_package} {version_by_package[gpu_package]} and {cpu_package} {version_by_package[cpu_package]}"
            )
            problems.append(f"{packages_text} are installed together and overwrite each other's files; run make clean setup")
        if gpu_package not in version_by_package and cpu_package not in version_by_package:
            problems.append(f"neither {gpu_package} nor {cpu_package} is installed; run make setup")
    for fbgemm_package in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
        if fbgemm_package in version_by_package:
            problems += _check_fbgemm(fbgemm_package, version_by_package)
    if "fastapi" in version_by_package and _major_minor(version_by_package["fastapi"]) >= (0, 151):
        problems.append(
            f"fastapi {version_by_package['fastapi']}: prefect's server needs a version below 0.151, because with newer "
            "versions the server rejects the requests of prefect's client; run make clean setup"
        )
    return problems


def _check_fbgemm(fbgemm_package: str, version_by_package: Mapping[str, str]) -> list[str]:
    fbgemm_version = version_by_package[fbgemm_package]
    torch_version, torchrec_version = version_by_package.get("torch"), version_by_package.get("torchrec")
    major, minor = _major_minor(fbgemm_version)
    if major != 1:
        return [f"{fbgemm_package} {fbgemm_version}: nightjar needs fbgemm 1.x; run make clean setup"]
    problems = []
    # fbgemm 1.X is compiled against torch 2.(X + 5), and torchrec 1.X requires fbgemm 1.X.
    if torch_version is not None and _major_minor(torch_version) != (2, minor + 5):
        problems.append(
            f"torch {torch_version} with {fbgemm_package} {fbgemm_version}: fbgemm 1.{minor} needs torch 2.{minor + 5}; "
            "run make clean setup"
        )
    if torch_version is not None and torch_version.endswith("+cpu") and fbgemm_package == "fbgemm-gpu":
        problems.append(
            f"torch {torch_version} is a CPU build, but {fbgemm_package} {fbgemm_version} needs CUDA; run make clean setup, "
            "with DEVICE=gpu on a GPU machine"
        )
    if torchrec_version is not None and _major_minor(torchrec_version) != (1, minor):
        problems.append(
            f"torchrec {torchrec_version} with {fbgemm_package} {fbgemm_version}: fbgemm 1.{minor} needs torchrec 1.{minor}; "
            "run make clean setup"
        )
    return problems


def cgroup_limits(
    *, mount_folder: Path = Path("/sys/fs/cgroup"), membership_path: Path = Path("/proc/self/cgroup")
) -> CgroupLimits:
    """Return the lowest limits of this process's cgroups (v1 or v2) and their parent groups.

    Args:
        mount_folder: folder under which the cgroup hierarchies are mounted.
        membership_path: file that lists the cgroups of this process, one line `number:controllers:path` for each.
    """
    core_limits: list[float] = []
    limit_and_used_bytes: list[tuple[int, int]] = []
    for hierarchy_folder, cgroup_folder in _cgroup_folders(mount_folder, membership_path):
        for folder in (cgroup_folder, *(parent for parent in cgroup_folder.parents if parent.is_relative_to(hierarchy_folder))):
            quota_and_period = _read_integers(folder / "cpu.max") or [
                *_read_integers(folder / "cpu.cfs_quota_us"),
                *_read_integers(folder / "cpu.cfs_period_us"),
            ]
            if len(quota_and_period) == 2 and quota_and_period[0] > 0:
                core_limits.append(quota_and_period[0] / quota_and_period[1])
            memory_limits = _read_integers(folder / "memory.max") or _read_integers(folder / "memory.limit_in_bytes")
            if memory_limits:
                limit_and_used_bytes.append((memory_limits[0], _anonymous_bytes(folder / "memory.stat")))
    memory_bytes, memory_used_bytes = min(limit_and_used_bytes, default=(None, 0))
    return CgroupLimits(min(core_limits, default=None), memory_bytes, memory_used_bytes)


def count_oom_kills(
    *, mount_folder: Path = Path("/sys/fs/cgroup"), membership_path: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the number of processes of this cgroup (v1 or v2) that the out-of-memory killer has ended; None: unknown."""
    for hierarchy_folder, cgroup_folder in _cgroup_folders(mount_folder, membership_path):
        # In a container, the listed path may belong to the host and not be mounted, so the root of the hierarchy is read too.
        for path in (folder / name for folder in (cgroup_folder, hierarchy_folder) for name in _OOM_FILE_NAMES):
            words = path.read_text().split() if path.is_file() else []
            if "oom_kill" in words:
                return int(words[words.index("oom_kill") + 1])
    return None


def _cgroup_folders(mount_folder: Path, membership_path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of each cgroup hierarchy, and the folder of this process's cgroup in it."""
    for line in membership_path.read_text().splitlines() if membership_path.exists() else ():
        _, controllers, cgroup_path = line.split(":", 2)
        yield mount_folder / controllers, mount_folder / controllers / cgroup_path.lstrip("/")


def _read_integers(path: Path) -> list[int]:
    """Return the integers in a control file; an empty list if the file is missing or contains `max`."""
    words = path.read_text().split() if path.is_file() else []
    return [] if "max" in words else [int(word) for word in words]


def _anonymous_bytes(statistics_path: Path) -> int:
    """Return the bytes of anonymous memory from `memory.stat`. Other used memory is page cache, which the kernel can drop."""
    has_statistics = statistics_path.is_file()
    name_value_pairs = (line.split() for line in statistics_path.read_text().splitlines()) if has_statistics else ()
    return sum(int(value) for name, value in name_value_pairs if name in ("anon", "total_rss"))


def _probe_gpus() -> tuple[str, list[str]]:
    """Import the training libraries in a separate process. Return the GPUs as text, and a problem if the imports fail."""
    try:
        probe_process = subprocess.run(
            [sys.executable, "-c", _GPU_PROBE_SCRIPT], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "", [
            f"the imports of torch, torchrec and faiss took more than {_PROBE_TIMEOUT_S:g} s; "
            "check for a very slow disk or a GPU that hangs"
        ]
    if probe_process.returncode != 0:
        reason = (probe_process.stderr.strip().splitlines() or [f"exit code {probe_process.returncode}"])[-1]
        return "", [f"torch, torchrec and faiss do not import together: {reason}; run make clean setup"]
    gpus = json.loads(probe_process.stdout.splitlines()[-1])
    return "; ".join(f"{name}, {format_gib(memory_bytes)}" for name, memory_bytes in gpus), []


def _major_minor(version: str) -> tuple[int, int]:
    """Return major and minor version: 2.14.1+cpu -> (2, 14)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def is_compatible_server(server_version: str, client_version: str) -> bool:
    """Return whether the server has the client's major version and at least its minor version.

    >>> [is_compatible_server(version, "3.9.1") for version in ("3.9.0", "3.10.2", "3.8.8", "4.0.0")]
    [True, True, False, False]
    """
    server_major, server_minor = _major_minor(server_version)
    client_major, client_minor = _major_minor(client_version)
    return server_major == client_major and server_minor >= client_minor
