"""Process of the MLflow server: `python -m flows.servers.mlflow_process FD`, where FD is a listening socket.

`nightjar ui` and `nightjar up` start it. They do not start `mlflow server`, because that command starts the application in a
subprocess, which would survive a SIGKILL of the command.
"""

import base64
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from flows.servers.server_process import REQUEST_GRACE_S, WORKSPACE_VARIABLE, inherited_socket, receive_start_message
from recsys_core.parent_process import die_with_parent

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PASSWORD_VARIABLE = "NIGHTJAR_MLFLOW_PASSWORD"  # noqa: S105 a name
"""Environment variable of the server process with its password, as user:password. It is not in the environment of a command."""


class BasicAuthentication:
    """ASGI middleware that asks for a password (HTTP basic authentication) before every request except the health check."""

    def __init__(self, app: "ASGIApp", *, password: str) -> None:
        self._app = app
        self._expected_header = b"Basic " + base64.b64encode(password.encode())

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass on a request with the password, the health check, and the start and stop of the application."""
        header = dict(scope.get("headers", ())).get(b"authorization", b"")
        is_health_check = scope["type"] == "http" and scope["path"] == "/health"
        if scope["type"] == "lifespan" or is_health_check or secrets.compare_digest(header, self._expected_header):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            from starlette.responses import PlainTextResponse

            headers = {"WWW-Authenticate": 'Basic realm="nightjar", charset="UTF-8"'}
            await PlainTextResponse("a password is required", status_code=401, headers=headers)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})


def main() -> None:
    """Serve MLflow's pages and API on the socket until SIGTERM, or until the parent process ends."""
    die_with_parent()
    if not receive_start_message():
        return
    import uvicorn
    from mlflow.server import constants

    from tasks.registry.mlflow_client import connect, tracking_uri

    workspace = Path(os.environ[WORKSPACE_VARIABLE])
    connect(workspace)  # creates the database; an error if the database has the schema of another version
    # `mlflow server` hands its options to the application in these variables.
    os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = tracking_uri(workspace)
    os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = "mlflow-artifacts:/"
    os.environ[constants.ARTIFACTS_DESTINATION_ENV_VAR] = os.environ["MLFLOW_ARTIFACTS_DESTINATION"]
    os.environ[constants.SERVE_ARTIFACTS_ENV_VAR] = "true"
    from mlflow.server.fastapi_app import app

    protected_app = BasicAuthentication(app, password=os.environ[PASSWORD_VARIABLE])
    server_config = uvicorn.Config(protected_app, log_level="error", timeout_graceful_shutdown=REQUEST_GRACE_S)
    uvicorn.Server(server_config).run(sockets=[inherited_socket()])


if __name__ == "__main__":
    main()
