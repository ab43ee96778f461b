"""The interface and the address on which the first host listens."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from recsys_core.launching.config import TorchxLauncher
from recsys_core.launching.hosts.network import HostRejected, find_network, listen
from recsys_core.launching.messages import Host

LAUNCHER = TorchxLauncher(scheduler="slurm")


def test_the_first_host_listens_only_on_the_address_of_the_configured_interface() -> None:
    launcher, host = LAUNCHER.model_copy(update={"interface": "lo"}), Host(index=0, name="alpha")
    network = find_network(launcher, host=host, host_0_name="elsewhere")
    listener = listen(launcher, network, host=host)
    assert (network.interface, network.address) == ("lo", "127.0.0.1")
    port = listener.getsockname()[1]
    addresses = [connection.laddr for connection in psutil.Process().net_connections()]
    assert [address.ip for address in addresses if address.port == port] == ["127.0.0.1"]
    listener.close()


def test_an_unknown_interface_is_reported_with_the_interfaces_of_the_host() -> None:
    launcher = LAUNCHER.model_copy(update={"interface": "ib7"})
    with pytest.raises(HostRejected, match=r"host 1 \(alpha\) has no IPv4 address on ib7; it has .*lo 127\.0\.0\.1"):
        find_network(launcher, host=Host(index=1, name="alpha"), host_0_name="")


def test_a_host_whose_name_resolves_to_loopback_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "localhost")
    with pytest.raises(
        HostRejected, match=r"resolves its own address to 127\.0\.0\.1, which other hosts cannot reach.*launcher\.interface"
    ):
        find_network(LAUNCHER, host=Host(index=0, name="alpha"), host_0_name="127.0.0.1")


def test_a_host_is_reached_by_the_second_address_of_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [
        SimpleNamespace(family=socket.AF_INET6, address="fe80::1"),
        SimpleNamespace(family=socket.AF_INET, address="10.0.0.1"),
        SimpleNamespace(family=socket.AF_INET, address="10.0.0.2"),
    ]
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth0": addresses})
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.0.0.2")
    host = Host(index=0, name="alpha")
    network = find_network(LAUNCHER, host=host, host_0_name="127.0.0.1")
    assert (network.interface, network.address) == ("eth0", "10.0.0.2")
    configured_network = find_network(LAUNCHER.model_copy(update={"interface": "eth0"}), host=host, host_0_name="127.0.0.1")
    assert (configured_network.interface, configured_network.address) == ("eth0", "10.0.0.1")
