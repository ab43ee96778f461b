"""Messages between the launching process, the agents and the ranks: small files in a folder that all of them can read.

launch.json       the LaunchSpec; written before any host starts
lease             a counter that the launching process increments while it is alive
ready-N.json      host N has started and passed its checks
rank-R.json       rank R has started
stacks            created by the launching process to request the stack dumps
stack-R.txt       the stack dump of rank R
end-N.json        how host N and its ranks ended
host-N/           logs of the ranks of host N
"""

import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

import recsys_core
from recsys_core.config import Frozen
from recsys_core.disk import atomic_replacement
from recsys_core.launching.config import Launcher

AGENT_MODULE = "recsys_core.launching"
FOLDER_VARIABLE = "NIGHTJAR_LAUNCH"
"""Environment variable with the path of the launch folder. The ranks read it."""
STORE_VARIABLE = "NIGHTJAR_STORE"
"""Environment variable with the path of the FileStore of the ranks. It is set only if all ranks are on one host."""
STDERR_PREFIX = "nightjar agent:"
"""Prefix of a line on stderr by which an agent reports an error if it cannot write the error into the folder."""
NUM_LAST_LINES = 12
MAX_LAST_BYTES = 2**16
"""Number of bytes at the end of a log that are read. A rank that prints in every step may write gigabytes."""
POLL_S = 0.2
Message = TypeVar("Message", bound=Frozen)


class RankLayout(Frozen):
    """How many ranks to start, and on which devices."""

    device: str
    num_hosts: int
    ranks_per_host: int

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return self.num_hosts * self.ranks_per_host


class LaunchSpec(Frozen):
    """The settings of a launch, for its hosts.

    Attributes:
        token: identifies this launch.
        versions: version of each package in the launching process.
        module: the ranks run `python -m <module> <job_path>`.
    """

    token: str
    versions: dict[str, str]
    module: str
    job_path: Path
    layout: RankLayout
    launcher: Launcher


class Host(Frozen):
    """A host of a launch; str() returns its name in error messages. index: number of the host, from 0.

    >>> str(Host(index=1, name="beta"))
    'host 1 (beta)'
    """

    index: int
    name: str

    def __str__(self) -> str:
        return f"host {self.index} ({self.name})"


class RankReport(Frozen):
    """Report that a rank has started, or that it has failed. Only a report of a failure has the fields from `exit_code` on.

    Attributes:
        signal: name of the signal that ended the rank, such as SIGKILL.
        traceback: empty if a signal ended the rank before it wrote a traceback.
        last_lines: last lines of the rank's stderr.
        timestamp: time of the failure in seconds since 1970.
    """

    rank: int
    host: Host
    pid: int
    exit_code: int = 0
    signal: str | None = None
    traceback: str = ""
    last_lines: str = ""
    timestamp: int = 0


class HostReport(Frozen):
    """Report of a host. Each host reports twice: when it is ready, and when it has ended.

    If `reason` and `failed_ranks` are empty in the second report, all ranks of the host exited with code 0.

    Attributes:
        address: address of the host, empty in the second report.
        port: port on which host 0 listens; 0 on the other hosts.
        reason: why the agent rejected its host; empty if it did not.
        is_retryable: whether another attempt may succeed.
        num_oom_kills: number of processes of this host's container that the kernel's out-of-memory killer ended during the
            launch; None if the kernel does not count them.
        memory_bytes: memory limit of the host or container.
    """

    host: Host
    pid: int
    address: str = ""
    port: int = 0
    reason: str = ""
    is_retryable: bool = True
    failed_ranks: tuple[RankReport, ...] = ()
    num_oom_kills: int | None = None
    memory_bytes: int | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the host or one of its ranks failed."""
        return bool(self.reason or self.failed_ranks)


class LaunchFolder:
    """The folder of one launch; its methods read and write the files that the module docstring lists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec_path = path / "launch.json"
        self.stacks_request_path = path / "stacks"

    def log_folder(self, host_index: int) -> Path:
        """Return the folder with the logs of the ranks of a host."""
        return self.path / f"host-{host_index}"

    def stack_path(self, rank: int) -> Path:
        """Return the path of the stack dump of a rank."""
        return self.path / f"stack-{rank}.txt"

    def write_spec(self, spec: LaunchSpec) -> None:
        """Write launch.json."""
        self._write(self.spec_path.name, spec)

    def report_ready(self, report: HostReport) -> None:
        """Report that a host has started. Raises FileExistsError if it has reported before."""
        self._write(f"ready-{report.host.index}.json", report)

    def report_start(self, report: RankReport) -> None:
        """Report that a rank has started."""
        self._write(f"rank-{report.rank}.json", report)

    def report_end(self, report: HostReport) -> None:
        """Report how a host and its ranks ended. Raises FileExistsError if it has reported before."""
        self._write(f"end-{report.host.index}.json", report)

    def _write(self, file_name: str, message: Frozen) -> None:
        """Write a message. If a message of this name exists, raise FileExistsError and leave it unchanged."""
        with (self.path / file_name).open("x") as message_file:
            message_file.write(message.model_dump_json())

    def renew_lease(self, token: str, counter: int) -> None:
        """Set the counter of the launch `token`; a host ends its ranks when the counter stops changing."""
        with atomic_replacement(self.path / "lease") as temporary_path:  # no fsync, because it may take long on a busy disk
            temporary_path.write_text(f"{token} {counter}")

    def read_lease(self, token: str) -> str | None:
        """Return the content of `lease`; None if the file is missing or belongs to another launch."""
        try:
            lease = (self.path / "lease").read_text()
        except OSError:
            return None
        return lease if lease.startswith(token) else None

    def ready_reports(self) -> dict[int, HostReport]:
        """Return the reports of the hosts that are ready, by index of the host."""
        return {report.host.index: report for report in self._read_messages("ready-*.json", HostReport)}

    def end_reports(self) -> list[HostReport]:
        """Return the reports of the hosts that have ended, sorted by index of the host."""
        return sorted(self._read_messages("end-*.json", HostReport), key=lambda report: report.host.index)

    def start_reports(self) -> dict[int, RankReport]:
        """Return the reports of the ranks that have started, by rank."""
        return {report.rank: report for report in self._read_messages("rank-*.json", RankReport)}

    def _read_messages(self, pattern: str, message_type: type[Message]) -> Iterator[Message]:
        for message_path in self.path.glob(pattern):
            try:
                yield message_type.model_validate_json(message_path.read_bytes())
            except (OSError, ValidationError):  # the message is being written, or was cut off by a full disk
                continue


def wait_until(condition: Callable[[], object], *, timeout_s: float) -> bool:
    """Call `condition` five times a second until it returns a true value; return False if it does not within the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def running_versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts, without the build (+cpu, +cu130), which may differ.

    >>> sorted(running_versions())
    ['nightjar', 'torch', 'torchrec']
    """
    version_by_library = {library: metadata.version(library).partition("+")[0] for library in ("torch", "torchrec")}
    return {"nightjar": recsys_core.__version__, **version_by_library}


def last_lines(path: Path) -> str:
    """Return the last NUM_LAST_LINES lines of a log, at most its last MAX_LAST_BYTES bytes."""
    with path.open("rb") as log_file:
        log_file.seek(max(0, path.stat().st_size - MAX_LAST_BYTES))
        last_bytes = log_file.read()
    return "\n".join(last_bytes.decode(errors="replace").splitlines()[-NUM_LAST_LINES:])
