"""The network of one host: its interface, its address, and the socket on which node 0 listens."""

import os
import platform
import socket
from dataclasses import dataclass, replace

import psutil

from recsys_core.launching.config import LOOPBACK_INTERFACE
from recsys_core.launching.messages import Host, HostRejected, LaunchSpec

LOOPBACK_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class HostNetwork:
    """Interface and address by which the other hosts reach this one, and the rendezvous of all hosts.

    rendezvous: address and port on which node 0 listens. listener: the socket with which node 0 listens; None on other hosts.
    """

    interface: str
    address: str
    rendezvous: tuple[str, int] = (LOOPBACK_ADDRESS, 0)
    listener: socket.socket | None = None

    @property
    def port(self) -> int:
        """Port on which this host listens; 0 without a listener."""
        return 0 if self.listener is None else int(self.listener.getsockname()[1])


LOOPBACK_NETWORK = HostNetwork(LOOPBACK_INTERFACE, LOOPBACK_ADDRESS)


def find_network(spec: LaunchSpec, *, host: Host, head_name: str) -> HostNetwork:
    """Return the interface and address by which the other hosts reach this one. head_name: host name of node 0.

    Raises HostRejected if the configured interface does not exist, or if the address belongs to the loopback interface.
    """
    address_by_interface = interface_addresses()
    shown_interfaces = ", ".join(
        f"{interface_name} {address}" for interface_name, address in sorted(address_by_interface.items())
    )
    if spec.interface is not None:
        if spec.interface not in address_by_interface:
            raise HostRejected(
                f"{host} has no IPv4 address on {spec.interface}; it has {shown_interfaces}; set launcher.interface"
            )
        return HostNetwork(spec.interface, address_by_interface[spec.interface])
    address = _own_address(head_name)
    interface = next(
        (interface_name for interface_name, interface_address in address_by_interface.items() if interface_address == address),
        None,
    )
    if interface is None or interface == LOOPBACK_INTERFACE:
        raise HostRejected(
            f"{host} resolves its own address to {address}, which other hosts cannot reach; it has {shown_interfaces}; set "
            "launcher.interface to the interface that connects the hosts"
        )
    return HostNetwork(interface, address)


def listen(spec: LaunchSpec, network: HostNetwork, *, host: Host) -> HostNetwork:
    """Open the socket of node 0 on its address. Raises HostRejected if the port is not free."""
    try:
        return replace(network, listener=socket.create_server((network.address, spec.rendezvous_port)))
    except OSError as error:
        raise HostRejected(
            f"{host} cannot listen on {network.address}, port {spec.rendezvous_port}: {os.strerror(error.errno or 0)}; stop "
            "the process that uses the port, or set launcher.rendezvous_port to another port, or to 0 for any free port"
        ) from None


def interface_addresses() -> dict[str, str]:
    """Return the first IPv4 address of each network interface."""
    address_by_interface = {}
    for interface, interface_entries in psutil.net_if_addrs().items():
        ipv4_addresses = [
            address_entry.address for address_entry in interface_entries if address_entry.family == socket.AF_INET
        ]
        if ipv4_addresses:
            address_by_interface[interface] = ipv4_addresses[0]
    return address_by_interface


def _own_address(head_name: str) -> str:
    """Return the address from which this host connects to node 0.

    If that address is a loopback address, return the address to which this host's own name resolves. On the first host of a
    Kubernetes job, the name of node 0 is "localhost", so the first address is a loopback address.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.connect((head_name or platform.node(), 9))  # connecting a UDP socket sends nothing
            address = str(probe_socket.getsockname()[0])
        return socket.gethostbyname(platform.node()) if address.startswith("127.") else address
    except OSError:
        return LOOPBACK_ADDRESS
