"""The sockets that this process and its descendants listen on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

INTERVAL_S = 0.3
Listening = set[tuple[str, str]]
"""Pairs (module or command of the process, address it listens on)."""


def listening(top: psutil.Process | None = None) -> Listening:
    """Return the listening sockets of a process and its descendants at this moment."""
    top, sockets = top or psutil.Process(), Listening()
    for process in [top, *top.children(recursive=True)]:
        with suppress(psutil.Error):
            command = process.cmdline()
            name = command[command.index("-m") + 1] if "-m" in command else " ".join(command)
            connections = process.net_connections("inet")
            sockets |= {(name, connection.laddr.ip) for connection in connections if connection.status == psutil.CONN_LISTEN}
    return sockets


@contextmanager
def collect_listening() -> Iterator[Listening]:
    """Yield a set that collects every listening socket seen while the block runs."""
    sockets, ended = Listening(), threading.Event()

    def collect() -> None:
        while not ended.wait(INTERVAL_S):
            sockets.update(listening())

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    try:
        yield sockets
    finally:
        ended.set()
        thread.join()
