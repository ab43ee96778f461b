"""What the launching process and the hosts tell each other: small files in one folder that all of them see.

launch.json       the order: what to run, how many, which versions; written before any host starts
lease             a counter that the launching process raises while it lives
joined-N.json     host N has started, sees this folder and is fit to work
rank-R.json       rank R runs
stack-R.txt       in which function rank R was, once `stacks` exists
failure-N.json    why host N gave up
done-N            all ranks of host N ended well
node-N/           logs of its ranks
"""

import errno
import os
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

import recsys_core
from recsys_core.atomic import write_text
from recsys_core.config import Frozen

FOLDER_VARIABLE, NODE_VARIABLE = "NIGHTJAR_LAUNCH", "NIGHTJAR_NODE"
STORE_VARIABLE = "NIGHTJAR_STORE"
"""Environment variable with the rendezvous file of the ranks of one host; unset where ranks of several hosts meet."""
LAST_LINES = 12
Message = TypeVar("Message", bound=Frozen)


class Order(Frozen):
    """What every host is asked to do.

    versions: package -> version of the launching process. interface: the network by which hosts reach each other; None: the one
    that leads to the first host.
    """

    token: str
    versions: dict[str, str]
    module: str
    job: Path
    device: str
    num_nodes: int
    processes_per_node: int
    interface: str | None = None
    rendezvous_port: int
    rendezvous_timeout_s: float
    lease_timeout_s: float | None

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_nodes * self.processes_per_node


class Joined(Frozen):
    """A host that has started. port is where the first one listens for the others."""

    node: int
    host: str
    pid: int
    address: str
    port: int


class StartedRank(Frozen):
    """A rank that runs."""

    rank: int
    node: int
    host: str
    pid: int


class RankFailure(Frozen):
    """How one rank ended. signal is a name such as SIGKILL; traceback is empty where Python could not write one."""

    rank: int
    exit_code: int
    signal: str | None
    traceback: str
    last_lines: str
    timestamp: int


class Failure(Frozen):
    """Why a host gave up: what its agent found (`reason`), or how its ranks ended.

    retryable: whether another attempt may fare better. oom_kills: processes that the kernel's out-of-memory killer ended
    meanwhile in the host's container, None where the kernel does not tell.
    """

    node: int
    host: str
    reason: str = ""
    retryable: bool = True
    ranks: tuple[RankFailure, ...] = ()
    oom_kills: int | None = None
    memory_bytes: int | None = None


class Unfit(Exception):
    """This host cannot take part; the message names it, both values and the way out. retryable as in Failure."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class LaunchFolder:
    """The folder of one attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def order(self) -> Path:
        """launch.json."""
        return self.path / "launch.json"

    @property
    def lease(self) -> Path:
        """The launching process's sign of life."""
        return self.path / "lease"

    @property
    def stacks(self) -> Path:
        """Its existence asks the hosts for stack-R.txt."""
        return self.path / "stacks"

    def node(self, node: int) -> Path:
        """Where the ranks of a host write their logs."""
        return self.path / f"node-{node}"

    def stack(self, rank: int) -> Path:
        """Where a rank writes in which functions its threads are."""
        return self.path / f"stack-{rank}.txt"

    def write(self, name: str, message: Frozen) -> None:
        """Puts a message there, whole or not at all; one that is there already stays, and FileExistsError is raised."""
        target, staging = self.path / name, self.path / f".{name}"
        with staging.open("x") as file:  # by one writer alone; a hard link would do it too, but not on every file system
            try:
                if target.exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
                file.write(message.model_dump_json())
                file.flush()
            except BaseException:
                staging.unlink()
                raise
        staging.rename(target)

    def renew_lease(self, token: str, count: int) -> None:
        """Says that the attempt `token` is still wanted."""
        write_text(self.lease, f"{token} {count}")

    def lease_of(self, token: str) -> str | None:
        """What stands in `lease`; None where it is gone or another attempt's."""
        try:
            text = self.lease.read_text()
        except OSError:
            return None
        return text if text.startswith(token) else None

    def joined(self) -> dict[int, Joined]:
        """The hosts that have started, by number."""
        return {message.node: message for message in self._read("joined-*.json", Joined)}

    def ranks(self) -> dict[int, StartedRank]:
        """The ranks that run, by rank."""
        return {message.rank: message for message in self._read("rank-*.json", StartedRank)}

    def failures(self) -> list[Failure]:
        """Of the hosts that gave up."""
        return list(self._read("failure-*.json", Failure))

    def done(self) -> set[int]:
        """The hosts whose ranks all ended well."""
        return {int(path.name.removeprefix("done-")) for path in self.path.glob("done-*")}

    def _read(self, pattern: str, kind: type[Message]) -> Iterator[Message]:
        for path in sorted(self.path.glob(pattern)):
            try:
                yield kind.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):  # a network file system may show a name before its content
                continue


def running_versions() -> dict[str, str]:
    """Of what has to be the same on all hosts. The build (+cpu, +cu130) may differ: the launching host needs no GPU.

    >>> sorted(running_versions())
    ['nightjar', 'torch', 'torchrec']
    """
    versions = {name: metadata.version(name).partition("+")[0] for name in ("torch", "torchrec")}
    return {"nightjar": recsys_core.__version__, **versions}


def wait_for(path: Path, *, timeout_s: float) -> bool:
    """Whether the file is there, or appears in time: a network file system may show it late."""
    deadline = time.monotonic() + timeout_s
    while not path.is_file():
        if time.monotonic() > deadline:
            return False
        if path.parent.is_dir():
            next(path.parent.iterdir(), None)  # listing a folder makes NFS look again
        time.sleep(0.2)
    return True


def last_lines(path: Path) -> str:
    """The end of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-LAST_LINES:])
