"""The sockets that a launch opens, and a pickle in its store, which must not be loaded."""

import base64
import pickle
import socket
import stat
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from recsys_core.launching.config import TorchxLauncher
from recsys_core.launching.hosts.agent import connect_store
from recsys_core.launching.messages import AGENT_MODULE, STORE_VARIABLE, LaunchFolder, LaunchSpec, RankLayout
from recsys_core.launching.torchrun import StaticRendezvous
from tests.recsys_core.launching.listening_sockets import listening_sockets
from tests.recsys_core.launching.scripted_launches import RANK_MODULE
from tests.recsys_core.launching.test_launch import ranks_import_this_tree, running_launch

__all__ = ["ranks_import_this_tree"]  # a fixture that pytest uses for the tests of this module
LOOPBACK = {"127.0.0.1", "::1"}
C10D_POLL_S = 6.0
"""Time in which torchrun's c10d rendezvous, which nightjar does not use, would unpickle the store: it does so every 5 s."""


def test_on_one_host_only_ranks_listen_and_only_on_loopback(tmp_path: Path) -> None:
    with running_launch(tmp_path, "local") as (launching_process, _):
        sockets = listening_sockets(psutil.Process(launching_process.pid))
    assert sockets, "gloo listens on a socket in each rank, but none was found"
    assert {name for name, _ in sockets} == {RANK_MODULE}
    assert {address for _, address in sockets} <= LOOPBACK


def test_ranks_of_one_host_use_loopback_and_meet_in_a_private_folder(tmp_path: Path) -> None:
    with running_launch(tmp_path, "local") as (launching_process, _):
        environments = [process.environ() for process in psutil.Process(launching_process.pid).children(recursive=True)]
        rank_environments = [environment for environment in environments if "RANK" in environment]
        store_folders = {Path(environment[STORE_VARIABLE]).parent for environment in rank_environments}
        folder_modes = {stat.S_IMODE(folder.stat().st_mode) for folder in store_folders}
    assert len(rank_environments) == 2 and folder_modes == {0o700}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert {environment[variable] for environment in rank_environments} == {"lo"}


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)


@pytest.mark.drill
@pytest.mark.skipif(find_spec("torchx") is None, reason="torchx is not installed")
def test_on_two_hosts_a_pickle_in_the_store_is_not_loaded(tmp_path: Path) -> None:
    with running_launch(tmp_path, "torchx") as (launching_process, _):
        sockets = listening_sockets(psutil.Process(launching_process.pid))
        assert {name for name, _ in sockets} == {AGENT_MODULE, RANK_MODULE} and {address for _, address in sockets} <= LOOPBACK
        folder = LaunchFolder(tmp_path / "logs")
        first_host = folder.ready_reports()[0]
        store = TCPStore(first_host.address, first_host.port, None, False, wait_for_workers=False)
        token = LaunchSpec.model_validate_json(folder.spec_path.read_bytes()).token
        store.set(f"torch.rendezvous.{token}", base64.b64encode(pickle.dumps(Payload(tmp_path / "was loaded"))).decode())
        time.sleep(C10D_POLL_S)
        assert launching_process.poll() is None
    assert not (tmp_path / "was loaded").exists()


def test_the_store_of_the_first_host_opens_no_second_socket() -> None:
    layout, launcher = RankLayout(device="cpu", num_hosts=1, ranks_per_host=1), TorchxLauncher(scheduler="slurm")
    spec = LaunchSpec(token="t", versions={}, module="none", job_path=Path("job.json"), layout=layout, launcher=launcher)
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = listener.getsockname()

    def listening_addresses() -> set[object]:
        return {
            connection.laddr for connection in psutil.Process().net_connections() if connection.status == psutil.CONN_LISTEN
        }

    addresses_before = listening_addresses()
    store = connect_store(endpoint, listener=listener, timeout_s=5.0)
    handler = StaticRendezvous(spec, host_index=0, store=store, endpoint=endpoint)
    assert handler.next_rendezvous().world_size == 1
    assert listening_addresses() == addresses_before and endpoint in addresses_before
