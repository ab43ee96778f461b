"""Local servers that are not a healthy MLflow."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"


@contextmanager
def answering_server(*answers: tuple[int, str]) -> Iterator[str]:
    """Run an HTTP server and yield its address.

    Each request gets the next status and body of `answers`. The last answer is repeated. A path with // gets the
    status 404, as in Prefect.
    """
    remaining_answers = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = remaining_answers.pop(0) if len(remaining_answers) > 1 else remaining_answers[0]
            if "//" in self.path:
                status, body = 404, ""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = do_PATCH = do_PUT = answer

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://{HOST}:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def silent_server() -> Iterator[str]:
    """Run a server that accepts connections and sends nothing. Yield its address."""
    with socket.create_server((HOST, 0)) as listener:
        yield f"http://{HOST}:{listener.getsockname()[1]}"


def closed_address() -> str:
    """Return an address at which no process listens."""
    with socket.create_server((HOST, 0)) as listener:
        return f"http://{HOST}:{listener.getsockname()[1]}"
