"""The embedded Prefect server: Prefect's own ephemeral one, but tied to this process.

The one that Prefect starts by itself outlives a client that is killed; this one asks Linux to end with it, and it starts while
the client is still importing.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from recsys_core.disk import require_free
from recsys_core.errors import StageError
from recsys_core.parent import as_parent, die_with_parent

HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
LEAST_BYTES = 2**25
"""Of a new database, its log and the files of a run's start."""


@contextmanager
def embedded_server(*, log: Path) -> Iterator[Callable[[], None]]:
    """Sets PREFECT_API_URL to a server of our own while the body runs; does nothing where the user has set one.

    Enter before Prefect is imported. Gives a function that returns once the server answers.
    """
    if "PREFECT_API_URL" in os.environ:
        yield lambda: None
        return
    for folder in (log.parent, Path(os.environ.get("PREFECT_HOME", log.parent))):
        require_free(folder, LEAST_BYTES, what="the embedded Prefect server with its database")
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    api = os.environ["PREFECT_API_URL"] = f"http://{HOST}:{port}/api"
    with log.open("ab") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "flows.prefect_server", str(port)],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=os.environ
            | as_parent()
            | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"},
        )
    try:
        yield partial(_wait_until_ready, server, health=f"{api}/health", log=log)
    finally:
        del os.environ["PREFECT_API_URL"]
        server.terminate()
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], *, health: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is never behind a proxy
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with opener.open(health, timeout=5):
                return
        except OSError:  # refused, reset, timed out: not there yet
            time.sleep(0.1)
    require_free(log.parent, LEAST_BYTES, what="the embedded Prefect server, which has ended,")
    how = (
        f"ended with exit code {server.returncode}"
        if server.poll() is not None
        else f"gave no answer within {START_TIMEOUT_S:g} s"
    )
    raise StageError(f"the embedded Prefect server {how}; see {log}")


def main() -> None:
    """Serves Prefect's API on the given port until the parent is gone."""
    die_with_parent()
    import uvicorn

    app = "prefect.server.api.server:create_app"
    uvicorn.run(app, factory=True, host=HOST, port=int(sys.argv[1]), log_level="error", lifespan="on")


if __name__ == "__main__":
    main()
