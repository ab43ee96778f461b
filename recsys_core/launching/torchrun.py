"""The ranks of one host under torchrun: rendezvous, failure reports, and a thread that watches the launching process.

torchrun's own rendezvous backends are not used. They listen on all interfaces, and the backend c10d stores its state as a
pickle that anyone with access to the port can replace. Here the ranks of a single host connect through a file in a private
folder. Several hosts connect to a TCPStore that listens on one address of node 0, and their agents read only plain strings
from it.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
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

from recsys_core.launching.config import LOOPBACK_INTERFACE
from recsys_core.launching.messages import (
    STORE_VARIABLE,
    Host,
    HostRejected,
    LaunchFolder,
    LaunchSpec,
    RankFailure,
    last_lines,
)
from recsys_core.launching.network import LOOPBACK_ADDRESS, HostNetwork
from recsys_core.launching.rank import request_stacks

RENDEZVOUS_BACKEND = "nightjar"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CONNECT_TIMEOUT_S = 60.0
POLL_S = 0.5
MAX_POLLS_WITHOUT_LEASE = 4
"""A slow file system may hide the lease for some polls. If the lease of this launch is still missing after so many polls, the
launching process is assumed to have ended."""
TERM_GRACE_S = 8.0


def run_ranks(spec: LaunchSpec, *, folder: LaunchFolder, host: Host, network: HostNetwork) -> tuple[RankFailure, ...]:
    """Run the ranks of this host until all of them have ended; return the failures.

    Raises HostRejected if this host cannot connect to the others, or loses the connection.
    """
    log_folder = folder.log_folder(host.node)
    log_folder.mkdir()
    threading.Thread(target=_watch_launching_process, args=(spec, folder, host.node), daemon=True).start()
    try:
        with _rendezvous(spec, node=host.node, network=network) as handler:
            launch_config = LaunchConfig(
                min_nodes=spec.num_nodes,
                max_nodes=spec.num_nodes,
                nproc_per_node=spec.processes_per_node,
                run_id=spec.token,
                rdzv_backend=handler.get_backend(),
                rdzv_configs={"handler": handler},
                max_restarts=0,
                local_addr=network.address,
                logs_specs=DefaultLogsSpecs(log_dir=str(log_folder), redirects=Std.ALL),
            )
            elastic_launch(launch_config, sys.executable)("-u", "-m", spec.module, str(spec.job))
    except ChildFailedError as error:
        return tuple(_rank_failure(rank, failure, log_folder=log_folder) for rank, failure in error.failures.items())
    except DistError as error:
        if len(folder.started_ranks()) == spec.world_size:
            node_0 = Host(0, folder.ready_hosts()[0].host)
            raise HostRejected(
                f"{host} lost the connection to {node_0}: an agent was killed, or a host is down", retryable=True
            ) from error
        address, port = network.rendezvous
        raise HostRejected(
            f"{host} did not meet the other hosts at {address}:{port}: {str(error).splitlines()[0]}; it must reach that "
            "address (launcher.interface) and port (launcher.rendezvous_port), and hosts must reach each other on any port",
            retryable=True,
        ) from error
    return ()


def _rank_failure(rank: int, failure: ProcessFailure, *, log_folder: Path) -> RankFailure:
    stderr_path = next(iter(sorted(log_folder.glob(f"**/{failure.local_rank}/stderr.log"))), None)
    return RankFailure(
        rank=rank,
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


def _watch_launching_process(spec: LaunchSpec, folder: LaunchFolder, node: int) -> None:
    """Forward a request for stack dumps to the ranks, and end this process and its ranks when the lease is not renewed."""
    has_requested_stacks, lease, renewed_at, num_polls_without_lease = False, None, time.monotonic(), 0
    while True:
        time.sleep(POLL_S)
        if not has_requested_stacks and folder.stacks_request_path.exists():
            has_requested_stacks = True
            request_stacks(folder, node=node)
        if spec.lease_timeout_s is None:
            continue
        # The lease has no timestamp, because the clocks of the hosts differ. This host measures the age with its own clock.
        current_lease = folder.read_lease(spec.token)
        num_polls_without_lease = num_polls_without_lease + 1 if current_lease is None else 0
        if current_lease != lease:
            lease, renewed_at = current_lease, time.monotonic()
        if time.monotonic() - renewed_at > spec.lease_timeout_s or num_polls_without_lease >= MAX_POLLS_WITHOUT_LEASE:
            os.kill(os.getpid(), signal.SIGTERM)  # torchrun forwards it to the ranks
            time.sleep(TERM_GRACE_S)
            os._exit(1)  # the remaining ranks end with this process


@contextmanager
def _rendezvous(spec: LaunchSpec, *, node: int, network: HostNetwork) -> Iterator[RendezvousHandler]:
    """Yield the rendezvous of the hosts. Set the environment variables with which the ranks connect to each other."""
    timeout_s = spec.rendezvous_timeout_s
    if spec.num_nodes > 1:
        os.environ.update({variable: os.environ.get(variable) or network.interface for variable in INTERFACE_VARIABLES})
        store = connect_store(network, timeout_s=timeout_s)
        yield StaticRendezvous(spec, node=node, store=store, endpoint=network.rendezvous)
        return
    with tempfile.TemporaryDirectory(prefix="nightjar-") as private_folder:  # of mode 0700
        os.environ[STORE_VARIABLE] = str(Path(private_folder) / "store")
        os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, LOOPBACK_INTERFACE))
        yield StaticRendezvous(spec, node=node, store=HashStore(), endpoint=None)


def connect_store(network: HostNetwork, *, timeout_s: float) -> Store:
    """Return the store at `network.rendezvous`, which node 0 serves. Raises DistNetworkError if it cannot be reached."""
    address, port = network.rendezvous
    return TCPStore(
        address,
        port,
        is_master=network.listener is not None,
        timeout=timedelta(seconds=min(CONNECT_TIMEOUT_S, timeout_s)),
        wait_for_workers=False,
        master_listen_fd=None if network.listener is None else network.listener.detach(),
    )


class StaticRendezvous(StaticTCPRendezvous):
    """torchrun's rendezvous for fixed hosts with fixed node numbers. This class replaces its store and waits for all hosts.

    endpoint: (address, port) of `store`. The ranks connect to it too. None: the ranks use a FileStore.
    """

    def __init__(self, spec: LaunchSpec, *, node: int, store: Store, endpoint: tuple[str, int] | None) -> None:
        address, port = endpoint or (LOOPBACK_ADDRESS, 0)
        timeout_s: Any = spec.rendezvous_timeout_s  # annotated as int, but a float works too
        super().__init__(address, port, rank=node, world_size=spec.num_nodes, run_id=spec.token, timeout=timeout_s)
        self._endpoint = endpoint
        self._host_store = PrefixStore(spec.token, store)

    def get_backend(self) -> str:
        """Return the name in torchrun's registry."""
        return RENDEZVOUS_BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks connect to the store of node 0's agent."""
        return self._endpoint is not None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all hosts. Raises DistStoreError if one is missing after the timeout."""
        self._host_store.set(f"host-{self.rank}", "")
        self._host_store.wait([f"host-{node}" for node in range(self.world_size)], self.timeout)
        store_info = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(self._host_store, self.rank, self.world_size, store_info)

    def num_nodes_waiting(self) -> int:
        """Return 0: no host joins later. Raises DistError once node 0 is gone; torchrun calls this at every poll."""
        self._host_store.check([f"host-{self.rank}"])
        return 0


def _handler_from(parameters: RendezvousParameters) -> RendezvousHandler:
    handler: RendezvousHandler = parameters.config["handler"]
    return handler


rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, _handler_from)
