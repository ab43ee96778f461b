"""Process of the MLflow server: `python -m flows.servers.mlflow_process FD`, where FD is a listening socket.

`nightjar ui` and `nightjar up` start it. They do not start `mlflow server`, because that command starts the application in a
subprocess, which would survive a SIGKILL of the command.
"""

import os
from pathlib import Path

from flows.servers.server_process import REQUEST_GRACE_S, WORKSPACE_VARIABLE, inherited_socket, receive_start_message
from recsys_core.parent_process import die_with_parent


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

    server_config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=REQUEST_GRACE_S)
    uvicorn.Server(server_config).run(sockets=[inherited_socket()])


if __name__ == "__main__":
    main()
