"""The network of one of many hosts: its interface, its address, and the socket on which host 0 listens."""

import os
import platform
import socket
from dataclasses import dataclass

import psutil

from recsys_core.launching.config import LOOPBACK_ADDRESS, LOOPBACK_INTERFACE, TorchxLauncher
from recsys_core.launching.messages import Host


class HostRejected(Exception):
    """A host cannot take part in the launch. The message names the host, the actual and the expected value, and the fix."""

    def __init__(self, message: str, *, is_retryable: bool = False) -> None:
        super().__init__(message)
        self.is_retryable = is_retryable


@dataclass(frozen=True)
class HostNetwork:
    """Interface and address by which the other hosts reach this host."""

    interface: str
    address: str


def find_network(launcher: TorchxLauncher, *, host: Host, host_0_name: str) -> HostNetwork:
    """Return the interface and address by which the other hosts reach this host. host_0_name: name of host 0, empty if unknown.

    Raises HostRejected if the configured interface does not exist, or if the address belongs to the loopback interface.
    """
    address_by_interface, interface = interface_addresses(), launcher.interface_name
    shown_interfaces = ", ".join(f"{name} {address}" for name, address in sorted(address_by_interface.items()))
    if interface is not None:
        if interface not in address_by_interface:
            raise HostRejected(f"{host} has no IPv4 address on {interface}; it has {shown_interfaces}; set launcher.interface")
        return HostNetwork(interface, address_by_interface[interface])
    address = _address_towards_host_0(host_0_name)
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
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                address_by_interface.setdefault(interface, address.address)
    return address_by_interface


def _address_towards_host_0(host_0_name: str) -> str:
    """Return the address from which this host connects to host 0.

    If that address is a loopback address, return the address to which this host's own name resolves. On host 0 of a Kubernetes
    job, for example, the name of host 0 is "localhost". If a name cannot be resolved, return the loopback address.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.connect((host_0_name or platform.node(), 9))  # connecting a UDP socket sends nothing
            address = str(probe_socket.getsockname()[0])
        return socket.gethostbyname(platform.node()) if address.startswith("127.") else address
    except OSError:
        return LOOPBACK_ADDRESS
