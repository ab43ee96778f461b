"""Where a host of a launch is reached: its network interface, its address, and the port of the first host."""

import os
import platform
import socket
from dataclasses import dataclass

import psutil

from recsys_core.launching.config import LOOPBACK
from recsys_core.launching.messages import Order, Unfit

LOOPBACK_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """Where the hosts meet. endpoint: address and port of the first host. listener: its open socket, on the first host."""

    interface: str
    address: str
    endpoint: tuple[str, int]
    listener: socket.socket | None = None


def network_of(order: Order, *, node: int, host: str, head: str) -> tuple[str, str]:
    """(interface, address) by which the others reach this host. head: name of the first host, as the scheduler gives it.

    Raises Unfit where the configured interface does not exist, or without one no address but the loopback's is known.
    """
    by_interface = _addresses()
    known = ", ".join(f"{name} {address}" for name, address in sorted(by_interface.items()))
    if order.interface is not None:
        if order.interface not in by_interface:
            raise Unfit(
                f"host {host} (node {node}) has no IPv4 address on {order.interface}; it has {known}; set launcher.interface"
            )
        return order.interface, by_interface[order.interface]
    address = _own_address(head)
    interface = next((name for name, one in by_interface.items() if one == address), None)
    if interface is None or interface == LOOPBACK:
        raise Unfit(
            f"host {host} (node {node}) finds {address} as its own address, which other hosts cannot reach; it has {known}; "
            "set launcher.interface to the one that connects the hosts"
        )
    return interface, address


def listen(order: Order, address: str, *, host: str) -> socket.socket:
    """The first host's socket, on `address` alone; Unfit if something else listens on the port."""
    try:
        return socket.create_server((address, order.rendezvous_port))
    except OSError as error:
        raise Unfit(
            f"port {order.rendezvous_port} on host {host} (node 0) cannot be listened on at {address}: "
            f"{os.strerror(error.errno or 0)}; end what uses it, or set launcher.rendezvous_port to another port, or to 0 for "
            "a free one"
        ) from None


def _addresses() -> dict[str, str]:
    """The first IPv4 address of each network interface."""
    ipv4 = {name: [one.address for one in of if one.family == socket.AF_INET] for name, of in psutil.net_if_addrs().items()}
    return {name: of[0] for name, of in ipv4.items() if of}


def _own_address(head: str) -> str:
    """The address that this host would use to reach the first one; that of its own name where this is the loopback's."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((head or platform.node(), 9))  # sends nothing
            address = str(probe.getsockname()[0])
        # The first host of a Kubernetes job gets "localhost" for its own name.
        return socket.gethostbyname(platform.node()) if address.startswith("127.") else address
    except OSError:
        return LOOPBACK_ADDRESS
