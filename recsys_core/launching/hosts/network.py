"""The network interface and address of one of several hosts, and the socket on which host 0 listens."""

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

    Raises HostRejected if the configured interface has no IPv4 address, or if other hosts cannot reach the address.
    """
    networks, configured_interface = host_networks(), launcher.interface_name
    networks_text = ", ".join(f"{network.interface} {network.address}" for network in networks)
    if configured_interface is not None:
        for network in networks:
            if network.interface == configured_interface:
                return network
        raise HostRejected(
            f"{host} has no IPv4 address on {configured_interface}; it has {networks_text}; set launcher.interface"
        )
    address = _own_address(host_0_name)
    interface = {network.address: network.interface for network in networks}.get(address)
    if interface is None or interface == LOOPBACK_INTERFACE:
        raise HostRejected(
            f"{host} resolves its own address to {address}, which other hosts cannot reach; it has {networks_text}; set "
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


def host_networks() -> list[HostNetwork]:
    """Return the IPv4 addresses of this host. An interface may have several addresses."""
    return [
        HostNetwork(interface, address.address)
        for interface, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if address.family == socket.AF_INET
    ]


def _own_address(host_0_name: str) -> str:
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
