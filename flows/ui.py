"""Both UIs on one machine."""

import os
import signal
import subprocess
import sys
import time

from flows import terminal
from flows.config import PipelineConfig
from recsys_core.errors import StageError
from recsys_core.parent import as_parent, die_with_parent
from tasks.mlflow_client import connect, tracking_uri

HOST = "127.0.0.1"


def serve(config: PipelineConfig, *, prefect_port: int, mlflow_port: int) -> None:
    """Starts Prefect's and MLflow's servers on the workspace's own databases; both end with this process."""
    connect(config.workspace)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager stops it as Ctrl-C does
    prefect = f"http://{HOST}:{prefect_port}"
    os.environ.update(as_parent())  # die_with_parent reads it between fork and exec
    environment = os.environ | {
        "PREFECT_SERVER_UI_API_URL": f"{prefect}/api",  # the page asks port 4200 unless told otherwise
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # saves about a gigabyte of workers nobody uses here
    }
    commands = [
        [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(prefect_port)],
        [
            *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(mlflow_port)),
            *("--backend-store-uri", tracking_uri(config.workspace), "--workers", "1"),
        ],
    ]
    log = (config.workspace / "ui.log").open("ab")
    servers = [
        subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent)
        for command in commands
    ]
    terminal.print_facts(
        {"Prefect": prefect, "MLflow": f"http://{HOST}:{mlflow_port}", "log": log.name, "stop": "Ctrl-C"}, console=terminal.out
    )
    try:
        _wait(servers, log_name=log.name)
    except KeyboardInterrupt:
        terminal.log.print("stopping")
    finally:
        for server in servers:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
        for server in servers:
            server.wait(timeout=20)
        log.close()


def _wait(servers: list[subprocess.Popen[bytes]], *, log_name: str) -> None:
    while True:
        for server in servers:
            if server.poll() is not None:
                raise StageError(f"{server.args!r} ended with exit code {server.returncode}; see {log_name}")
        time.sleep(0.5)
