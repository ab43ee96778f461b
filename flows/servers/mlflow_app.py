"""Application of the MLflow server of `nightjar ui` and `nightjar up`.

The commands do not start `mlflow server`, because `mlflow server` starts the application in a subprocess, which would survive a
SIGKILL of its parent.
"""

import base64
import os
import secrets
from importlib import import_module
from pathlib import Path

from mlflow.server import constants
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.servers.server_process import CREDENTIALS_VARIABLE, WORKSPACE_VARIABLE
from tasks.registry.mlflow_client import connect, tracking_uri


class BasicAuthentication:
    """ASGI middleware that asks for a password (HTTP basic authentication) before every request except the health check."""

    def __init__(self, app: ASGIApp, *, credentials: str) -> None:
        self._app = app
        self._expected_header = b"Basic " + base64.b64encode(credentials.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on health checks, requests with the credentials, and the start and stop events of the application."""
        sent_header = dict(scope.get("headers", ())).get(b"authorization", b"")
        is_health_check = scope["type"] == "http" and scope["path"] == "/health"
        if scope["type"] == "lifespan" or is_health_check or secrets.compare_digest(sent_header, self._expected_header):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            response_headers = {"WWW-Authenticate": 'Basic realm="nightjar", charset="UTF-8"'}
            await PlainTextResponse("a password is required", status_code=401, headers=response_headers)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})


def create_app() -> BasicAuthentication:
    """Return MLflow's pages and API behind the password of the server."""
    workspace = Path(os.environ[WORKSPACE_VARIABLE])
    connect(workspace)  # creates the database; raises an error if its schema is from another version of MLflow
    # `mlflow server` hands its options to the application in these variables.
    os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = tracking_uri(workspace)
    os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = "mlflow-artifacts:/"
    os.environ[constants.ARTIFACTS_DESTINATION_ENV_VAR] = os.environ["MLFLOW_ARTIFACTS_DESTINATION"]
    os.environ[constants.SERVE_ARTIFACTS_ENV_VAR] = "true"
    app = import_module("mlflow.server.fastapi_app").app  # reads the variables at import
    return BasicAuthentication(app, credentials=os.environ[CREDENTIALS_VARIABLE])
