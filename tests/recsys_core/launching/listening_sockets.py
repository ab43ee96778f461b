"""The sockets that this process and its descendants listen on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

INTERVAL_S = 0.5
Listening = set[tuple[str, str]]
"""Pairs: the module or command of a process, and an address on which the process listens."""


def listening_sockets(root: psutil.Process | None = None) -> Listening:
    """Return the current listening sockets of a process (default: this process) and of its descendants."""
    root, sockets = root or psutil.Process(), Listening()
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.Error):
            connections = process.net_connections("tcp")
            addresses = {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
            if addresses:
                command = process.cmdline()
                module_or_command = command[command.index("-m") + 1] if "-m" in command else " ".join(command)
                sockets |= {(module_or_command, address) for address in addresses}
    return sockets


@contextmanager
def collect_listening() -> Iterator[Listening]:
    """Yield a set that collects the listening sockets of this process and of its descendants while the block runs."""
    sockets, has_ended = Listening(), threading.Event()

    def collect() -> None:
        while not has_ended.wait(INTERVAL_S):
            sockets.update(listening_sockets())

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    try:
        yield sockets
    finally:
        has_ended.set()
        thread.join()
