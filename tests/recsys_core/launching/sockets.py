"""The sockets that this process and all below it listen on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

INTERVAL_S = 0.1
Listening = set[tuple[str, str]]
"""(module or command of the process, address that it listens on)."""


def listening(of: psutil.Process | None = None) -> Listening:
    """Those of a process and of all below it, now."""
    top, sockets = of or psutil.Process(), Listening()
    for process in [top, *top.children(recursive=True)]:
        with suppress(psutil.Error):
            command = process.cmdline()
            name = command[command.index("-m") + 1] if "-m" in command else " ".join(command)
            connections = process.net_connections("inet")
            sockets |= {(name, one.laddr.ip) for one in connections if one.status == psutil.CONN_LISTEN}
    return sockets


@contextmanager
def noticed() -> Iterator[Listening]:
    """Those that were open at any of many moments of the block."""
    sockets, ended = Listening(), threading.Event()

    def look() -> None:
        while not ended.wait(INTERVAL_S):
            sockets.update(listening())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield sockets
    finally:
        ended.set()
        thread.join()
