"""The agent of one host: `python -m recsys_core.launching.agent LAUNCH_JSON TOKEN NODE HEAD_VARIABLE`.

It checks that this host can take part in the launch, runs the ranks under torchrun, and reports how they ended.
"""

import json
import os
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from recsys_core.disk import disk_full_error, is_disk_full
from recsys_core.imports import fast_imports
from recsys_core.launching.messages import (
    FOLDER_VARIABLE,
    NODE_VARIABLE,
    STDERR_PREFIX,
    Host,
    HostFailure,
    HostReady,
    HostRejected,
    LaunchFolder,
    LaunchSpec,
    running_versions,
    wait_for,
)
from recsys_core.launching.network import LOOPBACK_NETWORK, HostNetwork, find_network, listen
from recsys_core.parent_process import die_with_parent, parent_environment
from recsys_core.preflight import cgroup_limits, oom_kills

STORAGE_TIMEOUT_S = 15.0
EXIT_REJECTED = 3


class _FolderError(Exception):
    """The launch folder is missing, is a different one, or is not writable, so this host cannot report through it."""


def main(spec_path: str, token: str, node: str, head_variable: str) -> int:
    """Run the agent; return its exit code, 0 if all ranks of this host exited with code 0.

    head_variable: environment variable in which the scheduler stores the name of node 0's host.
    """
    die_with_parent()
    host, folder = Host(int(node), platform.node()), LaunchFolder(Path(spec_path).parent)
    ram_bytes = psutil.virtual_memory().total
    memory_bytes = min(cgroup_limits().memory_bytes or ram_bytes, ram_bytes)
    oom_kills_before = oom_kills()
    try:
        spec = _read_spec(folder.spec_path, token=token, host=host)
        network = _check_in(spec, folder=folder, host=host, head_name=os.environ.get(head_variable, ""))
        os.environ.update(parent_environment() | {FOLDER_VARIABLE: str(folder.path), NODE_VARIABLE: node})
        num_cores = len(psutil.Process().cpu_affinity() or [1])
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // spec.processes_per_node)))
        os.environ["PYTHONUNBUFFERED"] = "1"
        with fast_imports():
            from recsys_core.launching.torchrun import run_ranks

        rank_failures = run_ranks(spec, folder=folder, host=host, network=network)
    except _FolderError as error:
        sys.stderr.write(f"{STDERR_PREFIX} {error}\n")
        return EXIT_REJECTED
    except HostRejected as error:
        _report_failure(folder, HostFailure(node=host.node, host=host.name, reason=str(error), retryable=error.retryable))
        return EXIT_REJECTED
    if not rank_failures:
        (folder.path / f"done-{node}").touch()
        return 0
    oom_kills_after = oom_kills()
    num_kills = None if oom_kills_after is None or oom_kills_before is None else oom_kills_after - oom_kills_before
    failure = HostFailure(
        node=host.node, host=host.name, rank_failures=rank_failures, oom_kills=num_kills, memory_bytes=memory_bytes
    )
    _report_failure(folder, failure)
    return 1


def _read_spec(path: Path, *, token: str, host: Host) -> LaunchSpec:
    """Read launch.json. Raises HostRejected if the versions differ.

    The versions are compared before the other fields are read, because another version may have other fields.
    """
    advice = "the workspace must be on storage that all hosts mount at the same path"
    if not wait_for(path, timeout_s=STORAGE_TIMEOUT_S):
        raise _FolderError(f"{host} does not see {path}, which the launching process wrote; {advice}")
    spec_fields = json.loads(path.read_bytes())
    if spec_fields["token"] != token:
        raise _FolderError(
            f"{host} sees another {path}: its token is {spec_fields['token']}, but the launching process wrote {token}; "
            f"the folder is not shared; {advice}"
        )
    versions, expected_versions = running_versions(), spec_fields["versions"]
    if versions != expected_versions:
        differing_packages = sorted(
            package
            for package in versions.keys() | expected_versions.keys()
            if versions.get(package) != expected_versions.get(package)
        )
        differences = ", ".join(
            f"{package} {versions.get(package)} instead of {expected_versions.get(package)}" for package in differing_packages
        )
        raise HostRejected(f"{host} has {differences}; use the same image or environment on all hosts")
    return LaunchSpec.model_validate(spec_fields)


def _check_in(spec: LaunchSpec, *, folder: LaunchFolder, host: Host, head_name: str) -> HostNetwork:
    """Check this host, report that it is ready, and wait until node 0 is ready. Raises HostRejected for a failed check."""
    if not spec.job.is_file():
        raise HostRejected(f"{host} does not see {spec.job}; the workspace must have the same path on all hosts")
    if spec.device == "cuda":
        _require_gpus(spec, host)
    network = LOOPBACK_NETWORK
    if spec.num_nodes > 1:
        network = find_network(spec, host=host, head_name=head_name.split(",")[0].strip())
        if host.node == 0:
            network = listen(spec, network, host=host)
    _report_ready(folder, host=host, network=network)
    if spec.lease_timeout_s is not None and not _is_lease_renewed(spec, folder, timeout_s=spec.lease_timeout_s):
        raise HostRejected(f"{host} started after the launching process had ended", retryable=True)
    if not wait_for(folder.path / "ready-0.json", timeout_s=spec.rendezvous_timeout_s):
        raise HostRejected(f"{host} waited {spec.rendezvous_timeout_s:g} s, but node 0 did not start", retryable=True)
    node_0 = HostReady.model_validate_json((folder.path / "ready-0.json").read_bytes())
    return replace(network, rendezvous=(node_0.address, node_0.port))


def _require_gpus(spec: LaunchSpec, host: Host) -> None:
    from torch import cuda

    if cuda.device_count() < spec.processes_per_node:
        raise HostRejected(
            f"{host}: the sharding plan needs {spec.processes_per_node} GPUs per host, but this host has "
            f"{cuda.device_count()}; set sharding.cluster.processes_per_node, or request more GPUs from the scheduler"
        )


def _report_ready(folder: LaunchFolder, *, host: Host, network: HostNetwork) -> None:
    host_ready = HostReady(node=host.node, host=host.name, pid=os.getpid(), address=network.address, port=network.port)
    try:
        folder.write(f"ready-{host.node}.json", host_ready)
    except FileExistsError:
        raise HostRejected(f"{host} was started a second time for the same launch; start a new launch") from None
    except OSError as error:
        if is_disk_full(error):
            raise _FolderError(str(disk_full_error(folder.path, reason=f"{host} has to write into this folder"))) from None
        raise _FolderError(f"{host} cannot write into {folder.path}: {error.strerror}; mount the workspace writable") from None


def _is_lease_renewed(spec: LaunchSpec, folder: LaunchFolder, *, timeout_s: float) -> bool:
    """Wait until the launching process renews the lease; return False if it does not renew the lease in time.

    A host may leave the scheduler's queue long after the launching process has ended.
    """
    initial_lease, deadline = folder.read_lease(spec.token), time.monotonic() + timeout_s
    while folder.read_lease(spec.token) in (initial_lease, None):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _report_failure(folder: LaunchFolder, failure: HostFailure) -> None:
    try:
        folder.write(f"failure-{failure.node}.json", failure)
    except OSError:  # this host has already reported a failure, or cannot write into the folder
        sys.stderr.write(f"{STDERR_PREFIX} {failure.reason}\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
