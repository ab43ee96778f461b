"""`nightjar ui`: serve the Prefect and MLflow UIs on this machine."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from flows.cli import output
from flows.config import PipelineConfig
from recsys_core.errors import InputError, StageError, redacted
from recsys_core.parent_process import die_with_parent, parent_environment

HOST = "127.0.0.1"


def serve(config: PipelineConfig, *, prefect_port: int, mlflow_port: int) -> None:
    """Serve the databases of the workspace until Ctrl-C.

    If PREFECT_API_URL or MLFLOW_TRACKING_URI names a server, its address is printed instead. Raises InputError if a port is in
    use.
    """
    facts: dict[str, str] = {}
    commands: list[list[str]] = []
    environment = os.environ | parent_environment()
    prefect_api_url, mlflow_uri = os.environ.get("PREFECT_API_URL"), os.environ.get("MLFLOW_TRACKING_URI", "")
    if prefect_api_url:
        facts["Prefect"] = os.environ.get("PREFECT_UI_URL") or prefect_api_url.removesuffix("/api")
    else:
        facts["Prefect"] = _require_free(prefect_port, option="--prefect-port")
        facts |= _protect(environment)
        environment["PREFECT_SERVER_UI_API_URL"] = f"{facts['Prefect']}/api"  # the default of the page is port 4200
        commands.append([sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(prefect_port)])
    if mlflow_uri.startswith(("http://", "https://")):
        facts["MLflow"] = mlflow_uri
    else:
        facts["MLflow"] = _require_free(mlflow_port, option="--mlflow-port")
        environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # its workers would take about 1 GB
        commands.append(_mlflow_command(config.workspace, port=mlflow_port))
    if commands:
        _serve(commands, environment=environment, facts=facts, log_file=config.workspace / "ui.log")
    else:
        output.print_facts(facts, console=output.stdout)


def _require_free(port: int, *, option: str) -> str:
    """Return the address of a server on `port`; raise InputError if the port is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections of an ended server
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise InputError(f"port {port} on {HOST}: {error.strerror}; set {option} to a free port") from None
    return f"http://{HOST}:{port}"


def _protect(environment: dict[str, str]) -> dict[str, str]:
    """Set a password for Prefect's server, unless the user has set one; return it for the terminal."""
    if "PREFECT_SERVER_API_AUTH_STRING" in environment:
        return {}
    password = f"nightjar:{secrets.token_urlsafe(12)}"
    environment |= {"PREFECT_SERVER_API_AUTH_STRING": password, "PREFECT_API_AUTH_STRING": password}
    return {"Prefect password": password}


def _mlflow_command(workspace: Path, *, port: int) -> list[str]:
    from tasks.registry.mlflow_client import connect, tracking_uri  # the import takes seconds: the ports are checked first

    connect(workspace)
    return [
        *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)),
        *("--backend-store-uri", tracking_uri(workspace), "--workers", "1"),
    ]


def _serve(commands: list[list[str]], *, environment: dict[str, str], facts: dict[str, str], log_file: Path) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager stops the command like Ctrl-C
    os.environ.update(parent_environment())  # die_with_parent reads it between fork and exec
    with log_file.open("ab") as log:
        servers = [
            subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent
            )
            for command in commands
        ]
        output.print_facts(facts | {"log": str(log_file), "stop": "Ctrl-C"}, console=output.stdout)
        try:
            _wait(servers, log_name=str(log_file))
        except KeyboardInterrupt:
            output.stderr.print("stopping")
        finally:
            for server in servers:
                if server.poll() is None:
                    os.killpg(server.pid, signal.SIGTERM)
            for server in servers:
                server.wait(timeout=20)


def _wait(servers: list[subprocess.Popen[bytes]], *, log_name: str) -> None:
    while True:
        for server in servers:
            if server.poll() is not None:
                raise StageError(redacted(f"{server.args!r} ended with exit code {server.returncode}; see {log_name}"))
        time.sleep(0.5)
