"""The sockets and processes of a launch, and a pickle in its store, which must not be loaded."""

import base64
import pickle
import socket
import stat
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from torch.distributed import TCPStore

from recsys_core.launching.config import TorchxLauncher
from recsys_core.launching.hosts.agent import connect_store
from recsys_core.launching.messages import AGENT_MODULE, STORE_VARIABLE, LaunchFolder, LaunchSpec, RankLayout
from recsys_core.launching.torchrun import StaticRendezvous
from tests.recsys_core.launching.listening_sockets import Listening, listening_sockets
from tests.recsys_core.launching.scripted_launches import RANK_MODULE
from tests.recsys_core.launching.test_launch import END_TIMEOUT_S, ranks_import_this_tree, running_launch

__all__ = ["ranks_import_this_tree"]  # a fixture that pytest uses for the tests of this module
LOOPBACK = {"127.0.0.1", "::1"}
C10D_POLL_S = 6.0
"""Time in which torchrun's c10d rendezvous would unpickle the store, which it does every 5 s. nightjar does not use it."""


class EndedLaunch(NamedTuple):
    """Observations of a launch on one host, while its two ranks work and after its launching process is killed.

    Attributes:
        sockets: listening sockets of the launching process and of all processes below it.
        rank_environments: environment variables of each rank.
        store_folder_modes: permissions of the folders in which the ranks meet.
        remaining_commands: command of each process that still runs END_TIMEOUT_S after the kill.
    """

    sockets: Listening
    rank_environments: list[dict[str, str]]
    store_folder_modes: set[int]
    remaining_commands: list[list[str]]


@pytest.fixture(scope="module")
def ended_launch(tmp_path_factory: pytest.TempPathFactory) -> EndedLaunch:
    with running_launch(tmp_path_factory.mktemp("launch"), "local") as (launching_process, descendants):
        rank_environments = [
            environment for environment in (process.environ() for process in descendants) if "RANK" in environment
        ]
        store_folders = {Path(environment[STORE_VARIABLE]).parent for environment in rank_environments}
        folder_modes = {stat.S_IMODE(folder.stat().st_mode) for folder in store_folders}
        sockets = listening_sockets(psutil.Process(launching_process.pid))
        launching_process.kill()
        _, remaining_processes = psutil.wait_procs(descendants, timeout=END_TIMEOUT_S)
        return EndedLaunch(sockets, rank_environments, folder_modes, [process.cmdline() for process in remaining_processes])


def test_on_one_host_only_ranks_listen_and_only_on_loopback(ended_launch: EndedLaunch) -> None:
    assert ended_launch.sockets, "gloo listens on a socket in each rank, but none was found"
    assert {name for name, _ in ended_launch.sockets} == {RANK_MODULE}
    assert {address for _, address in ended_launch.sockets} <= LOOPBACK


def test_ranks_of_one_host_use_loopback_and_meet_in_a_private_folder(ended_launch: EndedLaunch) -> None:
    assert len(ended_launch.rank_environments) == 2 and ended_launch.store_folder_modes == {0o700}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert {environment[variable] for environment in ended_launch.rank_environments} == {"lo"}


def test_every_process_below_a_killed_launching_process_ends(ended_launch: EndedLaunch) -> None:
    assert ended_launch.rank_environments and not ended_launch.remaining_commands


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
    rendezvous = StaticRendezvous(spec, host_index=0, store=store, endpoint=endpoint)
    assert rendezvous.next_rendezvous().world_size == 1
    assert listening_addresses() == addresses_before and endpoint in addresses_before
