"""Checks of the environment for `nightjar doctor`: package versions, CPU, memory, GPUs and free disk.

An incompatible pair of torch and fbgemm fails at import with an undefined symbol. The versions are therefore read from the
packages' metadata. If they are compatible, a separate process imports torch and lists the GPUs.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from recsys_core.disk import free_bytes
from recsys_core.units import GIB, format_gib

PACKAGES = (
    "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "faiss-cpu", "faiss-gpu", "numpy", "pyarrow", "duckdb",
    "prefect", "mlflow", "fastapi",
)  # fmt: skip
_MIN_DISK_BYTES = GIB
_OOM_FILES = ("memory.events", "memory.oom_control")
_GPU_PROBE_SCRIPT = """
import json, torch, torchrec, faiss
devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps([{"name": device.name, "memory_bytes": device.total_memory} for device in devices]))
"""
_PROBE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of the container or service that this process runs in; None: no limit."""

    cores: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int = 0


@dataclass(frozen=True)
class Preflight:
    """Results of the checks, for `nightjar doctor`.

    problems: one sentence for each problem, with its fix at the end. A run can start if there are none.
    """

    versions: Mapping[str, str]
    machine_cores: int
    usable_cores: float
    machine_memory_bytes: int
    usable_memory_bytes: int
    available_memory_bytes: int
    gpus: tuple[Gpu, ...]
    folder: Path
    free_disk_bytes: int
    problems: list[str]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each result, as the rows of a table."""
        memory = f"{format_gib(self.available_memory_bytes)} available of {format_gib(self.usable_memory_bytes)}"
        if self.usable_memory_bytes < self.machine_memory_bytes:
            memory += f" (limit; the machine has {format_gib(self.machine_memory_bytes)})"
        return [
            ("python", f"{platform.python_version()} ({sys.executable})"),
            *((name, self.versions[name]) for name in PACKAGES if name in self.versions),
            ("cores", f"{self.usable_cores:g} usable of {self.machine_cores}"),
            ("memory", memory),
            (
                "gpus",
                "; ".join(f"{gpu.name}, {format_gib(gpu.memory_bytes)}" for gpu in self.gpus) or "none that torch can use",
            ),
            ("free disk", f"{format_gib(self.free_disk_bytes)} in {self.folder}"),
        ]


def check_environment(folder: Path) -> Preflight:
    """Check the environment, the machine and the disk of `folder`, which need not exist yet."""
    versions = installed_versions()
    problems = check_versions(versions)
    gpus: tuple[Gpu, ...] = ()
    if not problems:
        gpus, problems = _probe_gpus()
    free_disk_bytes = free_bytes(folder)
    if free_disk_bytes < _MIN_DISK_BYTES:
        problems.append(
            f"{folder}: only {format_gib(free_disk_bytes)} of disk free, but a run needs at least "
            f"{format_gib(_MIN_DISK_BYTES)}; free some space"
        )
    limits = cgroup_limits()
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0))
    usable_memory_bytes = min(memory.total, limits.memory_bytes or memory.total)
    return Preflight(
        versions=versions,
        machine_cores=os.cpu_count() or cores,
        usable_cores=min(cores, limits.cores or cores),
        machine_memory_bytes=memory.total,
        usable_memory_bytes=usable_memory_bytes,
        available_memory_bytes=max(0, min(memory.available, usable_memory_bytes - limits.memory_used_bytes)),
        gpus=gpus,
        folder=folder,
        free_disk_bytes=free_disk_bytes,
        problems=problems,
    )


def installed_versions() -> dict[str, str]:
    """Return the versions of the installed PACKAGES, without importing them."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def check_versions(versions: Mapping[str, str]) -> list[str]:
    """Return a sentence with a fix for each conflict among `versions` (package name -> version).

    >>> check_versions({"torch": "2.13.0", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0", "faiss-cpu": "1.15.1"})
    ['torch 2.13.0 with fbgemm-gpu-cpu 1.9.0: fbgemm 1.9 needs torch 2.14; run make clean setup']
    """
    problems = [f"{name} is not installed; run make setup" for name in ("torch", "torchrec") if name not in versions]
    for gpu_package, cpu_package in (("fbgemm-gpu", "fbgemm-gpu-cpu"), ("faiss-gpu", "faiss-cpu")):
        if gpu_package in versions and cpu_package in versions:
            both_packages = f"{gpu_package} {versions[gpu_package]} and {cpu_package} {versions[cpu_package]}"
            problems.append(f"{both_packages} are installed together and overwrite each other's files; run make clean setup")
        if gpu_package not in versions and cpu_package not in versions:
            problems.append(f"neither {gpu_package} nor {cpu_package} is installed; run make setup")
    for fbgemm in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
        if fbgemm in versions:
            problems += _check_fbgemm(fbgemm, versions)
    if "fastapi" in versions and _major_minor(versions["fastapi"]) >= (0, 151):
        problems.append(
            f"fastapi {versions['fastapi']}: prefect's server needs a version below 0.151, because with newer versions the "
            "server rejects the requests of prefect's client; run make clean setup"
        )
    return problems


def _check_fbgemm(name: str, versions: Mapping[str, str]) -> list[str]:
    version, torch, torchrec = versions[name], versions.get("torch"), versions.get("torchrec")
    major, minor = _major_minor(version)
    if major != 1:
        return [f"{name} {version}: nightjar needs fbgemm 1.x; run make clean setup"]
    problems = []
    # fbgemm 1.X is compiled against torch 2.(X + 5), and torchrec 1.X requires fbgemm 1.X.
    if torch is not None and _major_minor(torch) != (2, minor + 5):
        problems.append(
            f"torch {torch} with {name} {version}: fbgemm 1.{minor} needs torch 2.{minor + 5}; run make clean setup"
        )
    if torch is not None and torch.endswith("+cpu") and name == "fbgemm-gpu":
        problems.append(
            f"torch {torch} is a CPU build, but {name} {version} needs CUDA; run make clean setup, "
            "with DEVICE=gpu on a GPU machine"
        )
    if torchrec is not None and _major_minor(torchrec) != (1, minor):
        problems.append(
            f"torchrec {torchrec} with {name} {version}: fbgemm 1.{minor} needs torchrec 1.{minor}; run make clean setup"
        )
    return problems


def cgroup_limits(*, mounts: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> CgroupLimits:
    """Return the lowest limits of this process's cgroups (v1 or v2) and their parent groups.

    Args:
        mounts: folder under which the cgroup hierarchies are mounted.
        membership: file that lists the cgroups of this process, one line `number:controllers:path` for each.
    """
    core_limits: list[float] = []
    memory_limits_and_use: list[tuple[int, int]] = []
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        mount = mounts / controllers
        group = mount / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(mount))):
            quota_and_period = _read_integers(folder / "cpu.max") or [
                *_read_integers(folder / "cpu.cfs_quota_us"),
                *_read_integers(folder / "cpu.cfs_period_us"),
            ]
            if len(quota_and_period) == 2 and quota_and_period[0] > 0:
                core_limits.append(quota_and_period[0] / quota_and_period[1])
            memory_limit = _read_integers(folder / "memory.max") or _read_integers(folder / "memory.limit_in_bytes")
            if memory_limit:
                memory_limits_and_use.append((memory_limit[0], _anonymous_bytes(folder / "memory.stat")))
    memory_bytes, memory_used_bytes = min(memory_limits_and_use, default=(None, 0))
    return CgroupLimits(min(core_limits, default=None), memory_bytes, memory_used_bytes)


def oom_kills(*, mounts: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the number of processes of this cgroup (v1 or v2) that the out-of-memory killer has ended; None: unknown."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        # The mount point is read too, because in a container `path` may be a host path that the container does not mount.
        mount = mounts / controllers
        for file in (folder / name for folder in (mount / path.lstrip("/"), mount) for name in _OOM_FILES):
            words = file.read_text().split() if file.is_file() else []
            if "oom_kill" in words:
                return int(words[words.index("oom_kill") + 1])
    return None


def _read_integers(path: Path) -> list[int]:
    """Return the integers in a control file; an empty list if the file is missing or contains `max`."""
    words = path.read_text().split() if path.is_file() else []
    return [] if "max" in words else [int(word) for word in words]


def _anonymous_bytes(path: Path) -> int:
    """Return the bytes of anonymous memory. The other used memory is page cache, which the kernel can drop."""
    pairs = (line.split() for line in path.read_text().splitlines()) if path.is_file() else ()
    return sum(int(value) for name, value in pairs if name in ("anon", "total_rss"))


def _probe_gpus() -> tuple[tuple[Gpu, ...], list[str]]:
    """List the GPUs in a separate process that imports the training libraries; return problems if the imports fail."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _GPU_PROBE_SCRIPT], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return (), [
            f"the imports of torch, torchrec and faiss took more than {_PROBE_TIMEOUT_S:g} s; "
            "check for a very slow disk or a GPU that hangs"
        ]
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        return (), [f"torch, torchrec and faiss do not import together: {reason}; run make clean setup"]
    return tuple(Gpu(**fields) for fields in json.loads(probe.stdout.splitlines()[-1])), []


def _major_minor(version: str) -> tuple[int, int]:
    """Return major and minor version: 2.14.1+cpu -> (2, 14)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
