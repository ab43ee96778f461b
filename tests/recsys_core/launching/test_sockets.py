"""What a launch listens on, and what a value that is put into its store does."""

import base64
import pickle
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from recsys_core.launching.messages import LaunchFolder, Order, Unfit
from recsys_core.launching.network import listen, network_of
from recsys_core.launching.rendezvous import across_hosts
from tests.recsys_core.launching.launches import RANKS
from tests.recsys_core.launching.sockets import listening
from tests.recsys_core.training.test_launch import ranks_find_this_tree, working

__all__ = ["ranks_find_this_tree"]
LOOPBACK = {"127.0.0.1", "::1"}
AGENT = "recsys_core.launching.agent"
STARTED_STATE_S = 6.0
"""c10d's rendezvous reads its state again every five seconds."""


def order(**changes: object) -> Order:
    facts = {
        "token": "ours", "versions": {}, "module": "none", "job": "/job.json", "device": "cpu", "num_nodes": 2,
        "processes_per_node": 1, "rendezvous_port": 0, "rendezvous_timeout_s": 5.0, "lease_timeout_s": None,
    }  # fmt: skip
    return Order.model_validate(facts | changes)


def test_on_one_host_the_agent_listens_on_nothing_and_its_ranks_on_the_loopback_alone(tmp_path: Path) -> None:
    with working(tmp_path, "local") as (flow, _):
        sockets = listening(psutil.Process(flow.pid))
    assert sockets, "gloo's ranks listen for each other"
    assert {name for name, _ in sockets} == {RANKS}
    assert {address for _, address in sockets} <= LOOPBACK


class Payload:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)


@pytest.mark.drill
@pytest.mark.skipif(find_spec("torchx") is None, reason="no torchx here")
def test_on_two_hosts_a_pickle_put_into_the_store_is_not_run(tmp_path: Path) -> None:
    with working(tmp_path, "torchx") as (flow, _):
        sockets = listening(psutil.Process(flow.pid))
        assert {name for name, _ in sockets} == {AGENT, RANKS} and {address for _, address in sockets} <= LOOPBACK
        folder = LaunchFolder(tmp_path / "logs")
        first = folder.joined()[0]
        store = TCPStore(first.address, first.port, None, False, wait_for_workers=False)
        token = Order.model_validate_json(folder.order.read_bytes()).token
        store.set(f"torch.rendezvous.{token}", base64.b64encode(pickle.dumps(Payload(tmp_path / "was run"))).decode())
        time.sleep(STARTED_STATE_S)
        assert flow.poll() is None
    assert not (tmp_path / "was run").exists()


def test_the_first_host_listens_on_the_one_address_of_the_configured_interface() -> None:
    ordered = order(interface="lo")
    interface, address = network_of(ordered, node=0, host="alpha", head="elsewhere")
    listener = listen(ordered, address, host="alpha")
    port = listener.getsockname()[1]
    before = {one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}
    handler = across_hosts((address, port), listener=listener, token="ours", node=0, nodes=1, timeout_s=5.0)
    assert handler.next_rendezvous().world_size == 1
    after = {one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}
    assert (interface, address) == ("lo", "127.0.0.1") and after == before and (address, port) in after


def test_an_interface_that_the_host_has_not_is_named_with_those_it_has() -> None:
    with pytest.raises(Unfit, match=r"host alpha \(node 1\) has no IPv4 address on ib7; it has .*lo 127\.0\.0\.1"):
        network_of(order(interface="ib7"), node=1, host="alpha", head="")


def test_a_host_that_knows_no_address_but_the_loopback_asks_for_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "localhost")
    with pytest.raises(Unfit, match=r"finds 127\.0\.0\.1 as its own address, which other hosts cannot reach.*launcher\.interf"):
        network_of(order(), node=0, host="alpha", head="127.0.0.1")
