import psutil
import pytest

from recsys_core.launching.messages import Host, HostRejected, LaunchSpec
from recsys_core.launching.network import find_network, listen

SPEC = LaunchSpec.model_validate(
    {
        "token": "t",
        "versions": {},
        "module": "none",
        "job": "/job.json",
        "device": "cpu",
        "num_nodes": 2,
        "processes_per_node": 1,
    }
    | {"rendezvous_port": 0, "rendezvous_timeout_s": 5.0, "lease_timeout_s": None}
)


def test_the_first_host_listens_only_on_the_address_of_the_configured_interface() -> None:
    spec, host = SPEC.model_copy(update={"interface": "lo"}), Host(0, "alpha")
    network = listen(spec, find_network(spec, host=host, head_name="elsewhere"), host=host)
    assert (network.interface, network.address) == ("lo", "127.0.0.1")
    assert network.listener is not None and network.listener.getsockname() == ("127.0.0.1", network.port)
    connections = psutil.Process().net_connections()
    assert [one.laddr.ip for one in connections if one.laddr.port == network.port] == ["127.0.0.1"]
    network.listener.close()


def test_an_unknown_interface_is_reported_with_the_interfaces_of_the_host() -> None:
    spec = SPEC.model_copy(update={"interface": "ib7"})
    with pytest.raises(HostRejected, match=r"host alpha \(node 1\) has no IPv4 address on ib7; it has .*lo 127\.0\.0\.1"):
        find_network(spec, host=Host(1, "alpha"), head_name="")


def test_a_host_with_only_a_loopback_address_is_rejected_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "localhost")
    with pytest.raises(
        HostRejected, match=r"resolves its own address to 127\.0\.0\.1, which other hosts cannot reach.*launcher\.interface"
    ):
        find_network(SPEC, host=Host(0, "alpha"), head_name="127.0.0.1")
