"""The agent of a host, started by TorchX: `python -m recsys_core.launching LAUNCH_JSON TOKEN HOST HOST_0_VARIABLE`.

The agent checks that its host can take part in the launch, connects to the other hosts, and runs the ranks of its host.
"""

import json
import os
import platform
import signal
import socket
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

from torch import cuda
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from recsys_core.disk import disk_full_error, is_disk_full
from recsys_core.launching.config import LOOPBACK_ADDRESS, TorchxLauncher
from recsys_core.launching.hosts.network import HostRejected, find_network, listen
from recsys_core.launching.messages import (
    POLL_S,
    STDERR_PREFIX,
    Host,
    HostReport,
    LaunchFolder,
    LaunchSpec,
    running_versions,
    wait_until,
)
from recsys_core.launching.torchrun import (
    INTERFACE_VARIABLES,
    StaticRendezvous,
    local_rendezvous,
    run_ranks,
)

STORAGE_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 60.0
EXIT_REJECTED = 3
TERM_GRACE_S = 8.0
MAX_POLLS_WITHOUT_LEASE = 10
"""A slow file system may hide the lease for some polls. If the lease of this launch is still missing after this many polls, the
launching process is assumed to have ended."""


class _FolderError(Exception):
    """The launch folder is missing, not shared with the launching process, or not writable, so it cannot hold a report."""


def run_agent(spec_path: Path, token: str, host_index: str, host_0_variable: str) -> int:
    """Run the agent; return its exit code, which is 0 if all ranks of this host exited with code 0.

    host_0_variable: environment variable in which the scheduler stores the name of host 0.
    """
    host, folder = Host(index=int(host_index), name=platform.node()), LaunchFolder(spec_path.parent)
    try:
        spec = _read_spec(spec_path, token=token, host=host)
        host_0_name = os.environ.get(host_0_variable, "").split(",")[0].strip()
        return _check_and_run(spec, folder=folder, host=host, host_0_name=host_0_name)
    except _FolderError as error:
        sys.stderr.write(f"{STDERR_PREFIX} {error}\n")
    except HostRejected as error:
        host_report = HostReport(host=host, pid=os.getpid(), reason=str(error), is_retryable=error.is_retryable)
        try:
            folder.report_end(host_report)
        except OSError:  # this host has already reported its end, or cannot write into the folder
            sys.stderr.write(f"{STDERR_PREFIX} {error}\n")
    return EXIT_REJECTED


def _read_spec(spec_path: Path, *, token: str, host: Host) -> LaunchSpec:
    """Read launch.json.

    Raises HostRejected if this host has other package versions than the launching process, and _FolderError if launch.json is
    missing or belongs to another launch.

    The versions are compared before the other fields are read, because another version may have other fields.
    """
    advice = "the workspace must be on storage that all hosts mount at the same path"
    # NFS refreshes its cache when a folder is listed.
    if not wait_until(lambda: any(spec_path.parent.glob(spec_path.name)), timeout_s=STORAGE_TIMEOUT_S):
        raise _FolderError(f"{host} cannot find {spec_path}, which the launching process wrote; {advice}")
    spec_fields = json.loads(spec_path.read_bytes())
    if spec_fields["token"] != token:
        raise _FolderError(
            f"{host} has another file at {spec_path}: its token is {spec_fields['token']}, but the launching process wrote "
            f"{token}; the folder is not shared; {advice}"
        )
    host_versions, expected_versions = running_versions(), spec_fields["versions"]
    differences_text = ", ".join(
        f"{package} {host_versions.get(package)} instead of {expected_versions.get(package)}"
        for package in sorted(host_versions.keys() | expected_versions.keys())
        if host_versions.get(package) != expected_versions.get(package)
    )
    if differences_text:
        raise HostRejected(f"{host} has {differences_text}; use the same image or environment on all hosts")
    return LaunchSpec.model_validate(spec_fields)


def _check_and_run(spec: LaunchSpec, *, folder: LaunchFolder, host: Host, host_0_name: str) -> int:
    """Check this host, report that it is ready, connect to the other hosts, and run the ranks. Raises HostRejected."""
    launcher, num_local_ranks = spec.launcher, spec.layout.ranks_per_host
    assert isinstance(launcher, TorchxLauncher)
    if not spec.job_path.is_file():
        raise HostRejected(f"{host} cannot find {spec.job_path}; the workspace must have the same path on all hosts")
    if spec.layout.device == "cuda" and cuda.device_count() < num_local_ranks:
        raise HostRejected(
            f"{host}: the sharding plan needs {num_local_ranks} GPUs per host, but this host has {cuda.device_count()}; "
            "set sharding.cluster.processes_per_node, or request more GPUs from the scheduler"
        )
    network, listener = None, None
    if spec.layout.num_hosts > 1:
        network = find_network(launcher, host=host, host_0_name=host_0_name)
        listener = listen(launcher, network, host=host) if host.index == 0 else None
    address = network.address if network else LOOPBACK_ADDRESS
    port = listener.getsockname()[1] if listener else 0
    _report_ready(folder, HostReport(host=host, pid=os.getpid(), address=address, port=port))
    # The scheduler may start this host long after the launching process has ended, so wait until the lease is renewed.
    initial_lease = folder.read_lease(spec.token)
    if not wait_until(lambda: folder.read_lease(spec.token) not in (initial_lease, None), timeout_s=launcher.lease_timeout_s):
        raise HostRejected(f"{host} started after the launching process had ended", is_retryable=True)
    if not wait_until(lambda: 0 in folder.ready_reports(), timeout_s=launcher.rendezvous_timeout_s):
        raise HostRejected(f"{host} waited {launcher.rendezvous_timeout_s:g} s, but host 0 did not start", is_retryable=True)
    host_0 = folder.ready_reports()[0]
    threading.Thread(target=_watch_lease, args=(spec, folder, launcher.lease_timeout_s), daemon=True).start()
    try:
        rendezvous_context: AbstractContextManager[StaticRendezvous]
        if network is None:
            rendezvous_context = local_rendezvous(spec)
        else:
            for variable in INTERFACE_VARIABLES:
                os.environ[variable] = os.environ.get(variable) or network.interface
            endpoint = host_0.address, host_0.port
            store = connect_store(endpoint, listener=listener, timeout_s=launcher.rendezvous_timeout_s)
            rendezvous_context = nullcontext(StaticRendezvous(spec, host_index=host.index, store=store, endpoint=endpoint))
        with rendezvous_context as rendezvous:
            return run_ranks(spec, folder=folder, host=host, rendezvous=rendezvous, address=address)
    except DistError as error:
        if len(folder.start_reports()) == spec.layout.world_size:
            message = f"{host} lost the connection to {host_0.host}: an agent was killed, or a host is down"
        else:
            message = (
                f"{host} could not connect to the other hosts at {host_0.address}:{host_0.port}: {str(error).splitlines()[0]}; "
                "all hosts must reach this address (launcher.interface) and port (launcher.rendezvous_port), and each other on "
                "any port"
            )
        raise HostRejected(message, is_retryable=True) from error


def connect_store(endpoint: tuple[str, int], *, listener: socket.socket | None, timeout_s: float) -> Store:
    """Return the store at the address and port `endpoint`; serve it with `listener` on host 0.

    Args:
        listener: socket on host 0; None on the other hosts.

    Raises:
        DistNetworkError: the store cannot be reached.
    """
    address, port = endpoint
    return TCPStore(
        address,
        port,
        is_master=listener is not None,
        timeout=timedelta(seconds=min(CONNECT_TIMEOUT_S, timeout_s)),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _report_ready(folder: LaunchFolder, host_report: HostReport) -> None:
    host = host_report.host
    try:
        folder.report_ready(host_report)
    except FileExistsError:
        raise HostRejected(f"{host} was started a second time for the same launch; start a new launch") from None
    except OSError as error:
        if is_disk_full(error):
            raise _FolderError(str(disk_full_error(folder.path, reason=f"{host} has to write into this folder"))) from None
        raise _FolderError(f"{host} cannot write into {folder.path}: {error.strerror}; mount the workspace writable") from None


def _watch_lease(spec: LaunchSpec, folder: LaunchFolder, timeout_s: float) -> None:
    """End this process and its ranks when the lease is not renewed for `timeout_s`.

    The lease has no timestamp, because the clocks of the hosts differ. This host measures with its own clock how long the
    lease has not changed.
    """
    lease, renewal_time, num_polls_without_lease = None, time.monotonic(), 0
    while time.monotonic() - renewal_time <= timeout_s and num_polls_without_lease < MAX_POLLS_WITHOUT_LEASE:
        time.sleep(POLL_S)
        current_lease = folder.read_lease(spec.token)
        num_polls_without_lease = num_polls_without_lease + 1 if current_lease is None else 0
        if current_lease != lease:
            lease, renewal_time = current_lease, time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)  # torchrun forwards the signal to the ranks
    time.sleep(TERM_GRACE_S)
    os._exit(1)  # the kernel then kills the remaining ranks, see register_rank
