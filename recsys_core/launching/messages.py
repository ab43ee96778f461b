"""Messages between the launching process and the hosts: small files in a folder that all of them can read.

launch.json       the LaunchSpec; written before any host starts
lease             a counter that the launching process increments while it is alive
ready-N.json      host N has started and passed its checks
rank-R.json       rank R has started
stacks            created by the launching process to request the stack dumps
stack-R.txt       the stack dump of rank R
failure-N.json    why host N stopped, or how its ranks failed
done-N            all ranks of host N exited with code 0
node-N/           logs of the ranks of host N
"""

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

import recsys_core
from recsys_core.atomic import write_text
from recsys_core.config import Frozen

FOLDER_VARIABLE, NODE_VARIABLE = "NIGHTJAR_LAUNCH", "NIGHTJAR_NODE"
STORE_VARIABLE = "NIGHTJAR_STORE"
"""Environment variable with the path of the ranks' FileStore. It is set only if all ranks are on one host."""
STDERR_PREFIX = "nightjar agent:"
"""Prefix of a line on stderr by which an agent reports an error that it cannot write into the folder."""
NUM_LAST_LINES = 12
Message = TypeVar("Message", bound=Frozen)


class ProcessLayout(Frozen):
    """How many ranks to start, and on which devices."""

    device: str
    num_nodes: int
    processes_per_node: int

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return self.num_nodes * self.processes_per_node


class LaunchSpec(ProcessLayout):
    """The settings of a launch, for its hosts.

    token: identifies this launch. versions: package -> version in the launching process. module: the ranks run
    `python -m <module> <job>`. interface: network interface that connects the hosts; None: the interface that leads to
    node 0. rendezvous_port: 0 for any free port. lease_timeout_s: None if the hosts are children of the launching process.
    """

    token: str
    versions: dict[str, str]
    module: str
    job: Path
    interface: str | None = None
    rendezvous_port: int
    rendezvous_timeout_s: float
    lease_timeout_s: float | None


class HostReady(Frozen):
    """A host that has started and passed its checks. port: the port on which node 0 listens; 0 on the other hosts."""

    node: int
    host: str
    pid: int
    address: str
    port: int


class RankStarted(Frozen):
    """A rank that has started."""

    rank: int
    node: int
    host: str
    pid: int


class RankFailure(Frozen):
    """A failed rank. signal: a name such as SIGKILL. traceback: empty if a signal ended the rank before it wrote one."""

    rank: int
    exit_code: int
    signal: str | None
    traceback: str
    last_lines: str
    timestamp: int


class HostFailure(Frozen):
    """The reason for which a host stopped: a failed check of its agent (`reason`), or the failures of its ranks.

    retryable: whether another attempt may succeed. oom_kills: number of processes of this host's container that the kernel's
    out-of-memory killer ended during the launch; None if the kernel does not count them. memory_bytes: the memory limit.
    """

    node: int
    host: str
    reason: str = ""
    retryable: bool = True
    rank_failures: tuple[RankFailure, ...] = ()
    oom_kills: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Host:
    """A host of a launch, as error messages name it.

    >>> str(Host(1, "beta"))
    'host beta (node 1)'
    """

    node: int
    name: str

    def __str__(self) -> str:
        return f"host {self.name} (node {self.node})"


class HostRejected(Exception):
    """A host that cannot take part in the launch. The message names the host, both values and the fix."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class LaunchFolder:
    """The folder of one launch; its methods read and write the files that the module docstring lists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def spec_path(self) -> Path:
        """Path of launch.json."""
        return self.path / "launch.json"

    @property
    def stacks_request_path(self) -> Path:
        """The file whose existence requests the stack dumps."""
        return self.path / "stacks"

    def log_folder(self, node: int) -> Path:
        """Return the folder with the logs of the ranks of a host."""
        return self.path / f"node-{node}"

    def stack_path(self, rank: int) -> Path:
        """Return the path of the stack dump of a rank."""
        return self.path / f"stack-{rank}.txt"

    def write(self, file_name: str, message: Frozen) -> None:
        """Write a message atomically. If a message of this name exists, raise FileExistsError and leave it unchanged."""
        path, staging_path = self.path / file_name, self.path / f".{file_name}"
        # Mode "x" fails for a second writer. The creation of a hard link would fail too, but some file
        # systems do not support hard links.
        with staging_path.open("x") as staging_file:
            try:
                if path.exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
                staging_file.write(message.model_dump_json())
                staging_file.flush()
            except BaseException:
                staging_path.unlink()
                raise
        staging_path.rename(path)

    def renew_lease(self, token: str, count: int) -> None:
        """Set the counter of the launch `token`; a host ends its ranks when the counter stops changing."""
        write_text(self.path / "lease", f"{token} {count}")

    def read_lease(self, token: str) -> str | None:
        """Return the content of `lease`; None if the file is missing or belongs to another launch."""
        try:
            lease = (self.path / "lease").read_text()
        except OSError:
            return None
        return lease if lease.startswith(token) else None

    def ready_hosts(self) -> dict[int, HostReady]:
        """Return the hosts that are ready, by node."""
        return {message.node: message for message in self._read_messages("ready-*.json", HostReady)}

    def started_ranks(self) -> dict[int, RankStarted]:
        """Return the ranks that have started, by rank."""
        return {message.rank: message for message in self._read_messages("rank-*.json", RankStarted)}

    def failures(self) -> list[HostFailure]:
        """Return the failures of all hosts that have reported one."""
        return list(self._read_messages("failure-*.json", HostFailure))

    def finished_nodes(self) -> set[int]:
        """Return the nodes whose ranks all exited with code 0."""
        return {int(path.name.removeprefix("done-")) for path in self.path.glob("done-*")}

    def _read_messages(self, pattern: str, message_type: type[Message]) -> Iterator[Message]:
        for path in sorted(self.path.glob(pattern)):
            try:
                yield message_type.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):  # a network file system may show a name before its content
                continue


def running_versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts, without the build (+cpu, +cu130), which may differ.

    >>> sorted(running_versions())
    ['nightjar', 'torch', 'torchrec']
    """
    library_versions = {library: metadata.version(library).partition("+")[0] for library in ("torch", "torchrec")}
    return {"nightjar": recsys_core.__version__, **library_versions}


def wait_for(path: Path, *, timeout_s: float) -> bool:
    """Wait for a file that another host writes; return whether it exists."""
    deadline = time.monotonic() + timeout_s
    while not path.is_file():
        if time.monotonic() > deadline:
            return False
        if path.parent.is_dir():
            next(path.parent.iterdir(), None)  # NFS refreshes its cache when a folder is listed
        time.sleep(0.2)
    return True


def last_lines(path: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:])
