"""How the agents of a launch meet, and where their ranks find each other.

On one host that is a file in a private folder. With many hosts it is a TCPStore that listens on one address of the first host.
The agents read plain strings from it: torchrun's c10d backend keeps its state there as a pickle, which whoever reaches the
port can replace.
"""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from recsys_core.launching.config import LOOPBACK
from recsys_core.launching.messages import STORE_VARIABLE
from recsys_core.launching.network import LOOPBACK_ADDRESS

BACKEND = "nightjar"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CONNECT_TIMEOUT_S = 60.0


class KnownHosts(RendezvousHandler):
    """A rendezvous of hosts that know their number and how many they are.

    Args:
        endpoint: (address, port) of `store` for the ranks; None: they meet over a file.
    """

    def __init__(
        self, store: Store, *, token: str, node: int, nodes: int, endpoint: tuple[str, int] | None, timeout_s: float
    ) -> None:
        self._store, self._token, self._node, self._nodes = PrefixStore(token, store), token, node, nodes
        self._endpoint, self._timeout = endpoint, timedelta(seconds=timeout_s)

    def get_backend(self) -> str:
        """Name in torchrun's registry."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks connect to the store of the first host's agent."""
        return self._endpoint is not None

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for all hosts. Raises DistStoreError if one is missing at the end of the timeout."""
        self._store.set(f"host-{self._node}", "")
        self._store.wait([f"host-{node}" for node in range(self._nodes)], self._timeout)
        address, port = self._endpoint or (LOOPBACK_ADDRESS, 0)
        return RendezvousInfo(self._store, self._node, self._nodes, RendezvousStoreInfo(address, port))

    def is_closed(self) -> bool:
        """A launch meets once."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """No host joins later. Torchrun calls this all the time. Raises DistError once the first host's agent is gone."""
        self._store.check([f"host-{self._node}"])
        return 0

    def get_run_id(self) -> str:
        """The launch's token."""
        return self._token

    def shutdown(self) -> bool:
        """The store ends with the agent."""
        return True


def _handler_of(parameters: RendezvousParameters) -> RendezvousHandler:
    handler: RendezvousHandler = parameters.config["handler"]
    return handler


rendezvous_handler_registry.register(BACKEND, _handler_of)


@contextmanager
def on_one_host(*, token: str, timeout_s: float) -> Iterator[KnownHosts]:
    """A rendezvous that opens no socket. The ranks meet over a file in a folder of mode 0700, and on the loopback interface."""
    with tempfile.TemporaryDirectory(prefix="nightjar-") as folder:
        os.environ[STORE_VARIABLE] = str(Path(folder) / "store")
        os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, LOOPBACK))
        yield KnownHosts(HashStore(), token=token, node=0, nodes=1, endpoint=None, timeout_s=timeout_s)


def across_hosts(
    endpoint: tuple[str, int], *, listener: socket.socket | None, token: str, node: int, nodes: int, timeout_s: float
) -> KnownHosts:
    """A rendezvous at `endpoint`, where the first host has `listener`. Raises DistNetworkError if it cannot be reached."""
    address, port = endpoint
    connect = timedelta(seconds=min(CONNECT_TIMEOUT_S, timeout_s))
    descriptor = None if listener is None else listener.detach()
    store = TCPStore(
        address, port, is_master=listener is not None, timeout=connect, wait_for_workers=False, master_listen_fd=descriptor
    )
    return KnownHosts(store, token=token, node=node, nodes=nodes, endpoint=endpoint, timeout_s=timeout_s)
