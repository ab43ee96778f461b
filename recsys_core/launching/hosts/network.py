"""The network of one of many hosts: its interface, its address, and the socket on which host 0 listens."""

import os
import platform
import socket
from dataclasses import dataclass

import psutil

from recsys_core.launching.config import LOOPBACK_ADDRESS, LOOPBACK_INTERFACE, TorchxLauncher
from recsys_core.launching.messages import Host


class HostRejected(Exception):
    """A host that cannot take part in the launch. The message names the host, both values and the fix."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


@dataclass(frozen=True)
class HostNetwork:
    """Interface and address by which the other hosts reach this one."""

    interface: str
    address: str


def find_network(launcher: TorchxLauncher, *, host: Host, head_name: str) -> HostNetwork:
    """Return the interface and address by which the other hosts reach this one. head_name: name of host 0.

    Raises HostRejected if the configured interface does not exist, or if the address belongs to the loopback interface.
    """
    address_by_interface, interface = interface_addresses(), launcher.interface_name
    shown_interfaces = ", ".join(f"{name} {address}" for name, address in sorted(address_by_interface.items()))
    if interface is not None:
        if interface not in address_by_interface:
            raise HostRejected(f"{host} has no IPv4 address on {interface}; it has {shown_interfaces}; set launcher.interface")
        return HostNetwork(interface, address_by_interface[interface])
    address = _own_address(head_name)
    interface = {address: name for name, address in address_by_interface.items()}.get(address)
    if interface is None or interface == LOOPBACK_INTERFACE:
        raise HostRejected(
            f"{host} resolves its own address to {address}, which other hosts cannot reach; it has {shown_interfaces}; set "
            "launcher.interface to the interface that connects the hosts"
        )
    return HostNetwork(interface, address)


def listen(launcher: TorchxLauncher, network: HostNetwork, *, host: Host) -> socket.socket:
    """Open the socket of host 0 on its address. Raises HostRejected if the port is not free."""
    port = launcher.rendezvous_port
    try:
        return socket.create_server((network.address, port))
    except OSError as error:
        raise HostRejected(
            f"{host} cannot listen on {network.address}, port {port}: {os.strerror(error.errno or 0)}; stop the process that "
            "uses the port, or set launcher.rendezvous_port to another port, or to 0 for any free port"
        ) from None


def interface_addresses() -> dict[str, str]:
    """Return the first IPv4 address of each network interface."""
    address_by_interface: dict[str, str] = {}
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                address_by_interface.setdefault(interface, entry.address)
    return address_by_interface


def _own_address(head_name: str) -> str:
    """Return the address from which this host connects to host 0.

    If that address is a loopback address, return the address to which this host's own name resolves. On the first host of a
    Kubernetes job, the name of host 0 is "localhost", so the first address is a loopback address.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.connect((head_name or platform.node(), 9))  # connecting a UDP socket sends nothing
            address = str(probe_socket.getsockname()[0])
        return socket.gethostbyname(platform.node()) if address.startswith("127.") else address
    except OSError:
        return LOOPBACK_ADDRESS
