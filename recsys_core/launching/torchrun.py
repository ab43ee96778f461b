"""The ranks of one host under torchrun: rendezvous, reports of failed ranks, and a thread that forwards stack requests.

torchrun's own rendezvous backends are not used. They listen on all interfaces, and the backend c10d stores its state as a
pickle that anyone with access to the port can replace. Here the ranks of a single host connect through a file in a private
folder. Several hosts connect to a TCPStore that listens on one address of host 0, and their agents read only plain strings
from it.
"""

import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from recsys_core.launching.config import LOOPBACK_ADDRESS, LOOPBACK_INTERFACE
from recsys_core.launching.messages import (
    FOLDER_VARIABLE,
    STORE_VARIABLE,
    Host,
    HostReport,
    LaunchFolder,
    LaunchSpec,
    RankReport,
    last_lines,
)
from recsys_core.launching.rank import request_stacks
from recsys_core.preflight import cgroup_limits, count_oom_kills
from recsys_core.termination import parent_environment

RENDEZVOUS_BACKEND = "nightjar"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
STACKS_POLL_S = 0.5


def run_local_agent(spec_path: Path) -> int:
    """Run all ranks of a launch, which are on this host; return the exit code of the agent."""
    spec, folder = LaunchSpec.model_validate_json(spec_path.read_bytes()), LaunchFolder(spec_path.parent)
    host = Host(index=0, name=platform.node())
    folder.report_ready(HostReport(host=host, pid=os.getpid()))
    with local_rendezvous(spec) as rendezvous:
        return run_ranks(spec, folder=folder, host=host, rendezvous=rendezvous, address=LOOPBACK_ADDRESS)


def run_ranks(spec: LaunchSpec, *, folder: LaunchFolder, host: Host, rendezvous: RendezvousHandler, address: str) -> int:
    """Run the ranks of this host until all of them have ended, and report how they ended; return the exit code of the agent.

    Raises DistError if this host cannot connect to the other hosts, or loses the connection.
    """
    num_cores = len(psutil.Process().cpu_affinity() or [1])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // spec.layout.ranks_per_host)))
    os.environ.update(parent_environment() | {FOLDER_VARIABLE: str(folder.path), "PYTHONUNBUFFERED": "1"})
    ram_bytes = psutil.virtual_memory().total
    memory_bytes = min(cgroup_limits().memory_bytes or ram_bytes, ram_bytes)
    log_folder, num_oom_kills_before = folder.log_folder(host.index), count_oom_kills()
    failed_ranks: tuple[RankReport, ...] = ()
    log_folder.mkdir()
    threading.Thread(target=_forward_stack_request, args=(folder, host), daemon=True).start()
    launch_config = LaunchConfig(
        min_nodes=spec.layout.num_hosts,
        max_nodes=spec.layout.num_hosts,
        nproc_per_node=spec.layout.ranks_per_host,
        run_id=spec.token,
        rdzv_backend=RENDEZVOUS_BACKEND,
        rdzv_configs={"handler": rendezvous},
        max_restarts=0,
        local_addr=address,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_folder), redirects=Std.ALL),
    )
    try:
        elastic_launch(launch_config, sys.executable)("-u", "-m", spec.module, str(spec.job_path))
    except ChildFailedError as error:
        failed_ranks = tuple(
            _report_failed_rank(rank, failure, host=host, log_folder=log_folder) for rank, failure in error.failures.items()
        )
    num_oom_kills_after = count_oom_kills()
    num_oom_kills = None
    if num_oom_kills_before is not None and num_oom_kills_after is not None:
        num_oom_kills = num_oom_kills_after - num_oom_kills_before
    host_report = HostReport(
        host=host, pid=os.getpid(), failed_ranks=failed_ranks, num_oom_kills=num_oom_kills, memory_bytes=memory_bytes
    )
    folder.report_end(host_report)
    return 1 if failed_ranks else 0


def _report_failed_rank(rank: int, failure: ProcessFailure, *, host: Host, log_folder: Path) -> RankReport:
    stderr_path = next(iter(sorted(log_folder.glob(f"**/{failure.local_rank}/stderr.log"))), None)
    return RankReport(
        rank=rank,
        host=host,
        pid=failure.pid,
        exit_code=failure.exitcode,
        signal=signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else None,
        traceback=_traceback(failure.error_file_data),
        last_lines="" if stderr_path is None else last_lines(stderr_path),
        timestamp=failure.timestamp,
    )


def _traceback(error_report: Mapping[str, Any]) -> str:
    """Return the traceback that torchrun's `record` wrote; empty if a signal ended the rank first."""
    exception_report = error_report.get("message")
    return str(exception_report["extraInfo"]["py_callstack"]) if isinstance(exception_report, dict) else ""


def _forward_stack_request(folder: LaunchFolder, host: Host) -> None:
    """Wait until the launching process requests stack dumps, and forward the request to the ranks."""
    while not folder.stacks_request_path.exists():
        time.sleep(STACKS_POLL_S)
    request_stacks(folder, host=host)


@contextmanager
def local_rendezvous(spec: LaunchSpec) -> Iterator["StaticRendezvous"]:
    """Yield the rendezvous of a single host. Set the environment variables with which the ranks connect to each other."""
    with tempfile.TemporaryDirectory(prefix="nightjar-") as private_folder:  # has mode 0700
        os.environ[STORE_VARIABLE] = str(Path(private_folder) / "store")
        os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, LOOPBACK_INTERFACE))
        yield StaticRendezvous(spec, host_index=0, store=HashStore(), endpoint=None)


class StaticRendezvous(StaticTCPRendezvous):
    """torchrun's rendezvous for a fixed number of hosts, changed to use `store` and to wait for all hosts.

    Args:
        endpoint: (address, port) of `store`, if the ranks connect to it too; None if the ranks use a FileStore.
    """

    def __init__(self, spec: LaunchSpec, *, host_index: int, store: Store, endpoint: tuple[str, int] | None) -> None:
        address, port = endpoint or (LOOPBACK_ADDRESS, 0)
        timeout_s: Any = spec.launcher.rendezvous_timeout_s  # torch annotates it as int, but a float works too
        super().__init__(address, port, rank=host_index, world_size=spec.layout.num_hosts, run_id=spec.token, timeout=timeout_s)
        self._endpoint = endpoint
        self._host_store = PrefixStore(spec.token, store)

    def get_backend(self) -> str:
        """Return the name of this rendezvous in torchrun's registry."""
        return RENDEZVOUS_BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks connect to the store of host 0's agent."""
        return self._endpoint is not None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all hosts. Raises DistStoreError if a host is missing after the timeout."""
        self._host_store.set(f"host-{self.rank}", "")
        self._host_store.wait([f"host-{host_index}" for host_index in range(self.world_size)], self.timeout)
        store_info = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(self._host_store, self.rank, self.world_size, store_info)

    def num_nodes_waiting(self) -> int:
        """Return 0, because no host joins later. torchrun polls this method, which raises DistError once host 0 is gone."""
        self._host_store.check([f"host-{self.rank}"])
        return 0


def _rendezvous_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    handler: RendezvousHandler = parameters.config["handler"]
    return handler


rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, _rendezvous_handler)
