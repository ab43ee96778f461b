"""Process of a server: `python -m flows.servers FD APPLICATION [LIBRARY...]`.

FD is a listening socket, and APPLICATION is a module with the function `create_app`. The process imports the libraries while
the command that started it reads the config. The process imports the application after it has received its environment
variables on stdin, because Prefect and MLflow read the variables when they are imported.
"""

import json
import os
import socket
import sys
from importlib import import_module

import uvicorn

from recsys_core.imports import fast_imports
from recsys_core.termination import die_with_parent

REQUEST_GRACE_S = 2
"""Time for open requests when the server is stopped. It is short, because a page in a browser keeps a connection open."""


def main() -> None:
    """Serve the application on the socket until SIGTERM, or until the parent process ends."""
    die_with_parent()
    socket_fd, application_module, *libraries = sys.argv[1:]
    with fast_imports():
        for library in libraries:
            import_module(library)
        if not receive_start_message():
            return
        app = import_module(application_module).create_app()
    config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=REQUEST_GRACE_S)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(socket_fd))])


def receive_start_message() -> bool:
    """Wait for the start message, and use its log file and environment.

    Return False if the command has ended without a start message, e.g. because the config was invalid.
    """
    message_bytes = sys.stdin.buffer.read()
    if not message_bytes:
        return False
    start_message = json.loads(message_bytes)
    log_fd = os.open(start_message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.environ.update(start_message["environment"])
    return True


if __name__ == "__main__":
    main()
