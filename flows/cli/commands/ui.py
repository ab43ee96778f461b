"""`nightjar ui` and `nightjar up`: the Prefect and MLflow servers on this machine, and the process that starts planned runs."""

import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from flows.cli import output
from flows.servers.prefect_server import PrefectServer
from flows.servers.server_process import CREDENTIALS_VARIABLE, LOG, WORKSPACE_VARIABLE, ServerProcess
from flows.settings.config_file import LoadedConfig
from flows.settings.environment import set_flow_run_retention
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError, StageError
from recsys_core.termination import parent_environment
from tasks.runs.run import exclusive_lock
from tasks.runs.workspace import UP_LOCK_NAME

RUNS_STOP_TIMEOUT_S = 5.5
"""Time for the runs to end. The command must end within 10 s, so the servers have the remaining time."""
WATCH_INTERVAL_S = 0.5
READY_MESSAGE = "ready"
PASSWORD_FILE_NAME = "server-password"  # noqa: S105 a name


def serve(config: PipelineConfig, *, prefect_port: int, mlflow_port: int) -> None:
    """Serve the Prefect and MLflow pages of the workspace until Ctrl-C or SIGTERM.

    If PREFECT_API_URL or MLFLOW_TRACKING_URI names a server, its address is printed instead. Raises InputError if a port is in
    use.
    """
    log_file = config.workspace / "ui.log"
    with _until_signal() as cleanup_stack:
        text_by_label, prefect_server = _start_servers(
            config, prefect_port=prefect_port, mlflow_port=mlflow_port, log_file=log_file, cleanup_stack=cleanup_stack
        )
        if "log" not in text_by_label:  # this command has started no server
            output.print_labelled(text_by_label)
            return
        output.print_labelled(text_by_label | {"stop": "Ctrl-C"})
        _watch(prefect_server, None, log_file=log_file)


def up(loaded_config: LoadedConfig, *, prefect_port: int, mlflow_port: int) -> None:
    """Serve the same pages as `serve`, and run the pipeline on its schedule, until Ctrl-C or SIGTERM.

    A run that is in progress at the signal ends as interrupted and can be resumed.
    """
    config = loaded_config.config
    log_file = config.workspace / "up.log"
    with _until_signal() as cleanup_stack:
        text_by_label, prefect_server = _start_servers(
            config, prefect_port=prefect_port, mlflow_port=mlflow_port, log_file=log_file, cleanup_stack=cleanup_stack
        )
        cleanup_stack.enter_context(_up_lock(config.workspace))
        # The runs write into MLflow's database and do not have the server's address, but their links to MLflow need it.
        os.environ.setdefault("NIGHTJAR_MLFLOW_UI_URL", text_by_label["MLflow"])
        runs_process = cleanup_stack.enter_context(_planned_runs(loaded_config, log_file=log_file))
        next_start = config.schedule.next_start(datetime.now(UTC))
        text_by_label["deployments"] = f"nightly-retrain/{config.name}, and promote, rollback, recommend and refresh"
        text_by_label["next start"] = (
            f"{next_start:%Y-%m-%d %H:%M %Z}" if next_start else "none is planned; start a run in Prefect, or set schedule.cron"
        )
        if next_refresh := config.schedule.next_start(datetime.now(UTC), flow_name="refresh"):
            text_by_label["next refresh"] = f"{next_refresh:%Y-%m-%d %H:%M %Z}"
        output.print_labelled(text_by_label | {"log": str(log_file), "stop": "Ctrl-C"})
        _watch(prefect_server, runs_process, log_file=log_file)


@contextmanager
def _until_signal() -> Iterator[ExitStack]:
    """Yield a stack of cleanup functions. They are called at Ctrl-C or SIGTERM, at the end of the body, or after an error."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # a service manager sends SIGTERM, which ends the command like Ctrl-C
        signal.signal(signal_number, signal.default_int_handler)
    log_handler = logging.StreamHandler()
    LOG.addHandler(log_handler)
    with ExitStack() as cleanup_stack:
        cleanup_stack.callback(LOG.removeHandler, log_handler)
        try:
            yield cleanup_stack
        except KeyboardInterrupt:
            for signal_number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signal_number, signal.SIG_IGN)
            output.stderr.print("stopping")


def _start_servers(
    config: PipelineConfig, *, prefect_port: int, mlflow_port: int, log_file: Path, cleanup_stack: ExitStack
) -> tuple[dict[str, str], PrefectServer | None]:
    """Start the Prefect and the MLflow server, except a server that an environment variable names.

    Returns:
        The texts to print, by label, and the Prefect server if it was started.
    """
    text_by_label: dict[str, str] = {}
    prefect_server: PrefectServer | None = None
    mlflow_server: ServerProcess | None = None
    if api_url := os.environ.get("PREFECT_API_URL"):
        text_by_label["Prefect"] = os.environ.get("PREFECT_UI_URL") or api_url.removesuffix("/api")
    else:
        prefect_server = PrefectServer(port=prefect_port, has_ui=True)
        cleanup_stack.callback(prefect_server.stop)
        text_by_label["Prefect"] = prefect_server.url
    if store_uri := os.environ.get("MLFLOW_BACKEND_STORE_URI"):  # MLflow's own variable for the database of its server
        os.environ.setdefault("MLFLOW_TRACKING_URI", store_uri)
    mlflow_uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if mlflow_uri.startswith(("http://", "https://")):
        text_by_label["MLflow"] = mlflow_uri
    else:
        mlflow_server = ServerProcess(
            "flows.servers.mlflow_app",
            name="MLflow server",
            health_path="/health",
            port=mlflow_port,
            port_option="--mlflow-port",
        )
        cleanup_stack.callback(mlflow_server.stop)
        text_by_label["MLflow"] = mlflow_server.url
    servers = [server for server in (prefect_server, mlflow_server) if server is not None]
    if not servers:
        return text_by_label, None
    credentials, credentials_text = _server_credentials(config.workspace)
    text_by_label |= {"password": credentials_text} if credentials_text else {}
    if prefect_server is not None:
        set_flow_run_retention(num_days=config.retention.flow_run_days)
        prefect_server.start_prefect(log_file=log_file, credentials=credentials)
    if mlflow_server is not None:
        mlflow_server.start_serving(
            log_file=log_file, environment=_mlflow_environment(config.workspace, credentials=credentials)
        )
    for server in servers:
        server.wait_until_ready()
    return text_by_label | {"log": str(log_file)}, prefect_server


def _server_credentials(workspace: Path) -> tuple[str, str | None]:
    """Return the credentials of both servers as `user:password`, and the text to print about them.

    If PREFECT_SERVER_API_AUTH_STRING is set, it contains the credentials, and the text is None. Otherwise the command creates a
    password and saves it in a file that only the user can read, so a browser stays signed in after a restart. The text contains
    the password only if stdout is a terminal, because a service manager logs the output of a service.
    """
    if user_credentials := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        return user_credentials, None
    password_path = workspace / PASSWORD_FILE_NAME
    credentials = password_path.read_text().strip() if password_path.is_file() else ""
    if not credentials:  # a full disk leaves an empty file, and every user of the host could guess an empty password
        credentials = f"nightjar:{secrets.token_urlsafe(12)}"
        with os.fdopen(os.open(password_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as password_file:
            password_file.write(f"{credentials}\n")
    return credentials, credentials if sys.stdout.isatty() else f"in {password_path}"


def _mlflow_environment(workspace: Path, *, credentials: str) -> dict[str, str]:
    return {
        "MLFLOW_ARTIFACTS_DESTINATION": str(workspace / "mlartifacts"),
        **os.environ,
        WORKSPACE_VARIABLE: str(workspace),
        CREDENTIALS_VARIABLE: credentials,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # its workers would take about 1 GB
    }


@contextmanager
def _up_lock(workspace: Path) -> Iterator[None]:
    """Hold the lock of `nightjar up` on the workspace; raise InputError if another process holds it."""
    problem = f"{workspace}: another `nightjar up` runs this workspace; stop it first, or set another workspace"
    with exclusive_lock(workspace / UP_LOCK_NAME, problem=problem):
        yield


@contextmanager
def _planned_runs(loaded_config: LoadedConfig, *, log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that creates the deployments and starts their runs; end the process and the runs after the body."""
    config_path = str(loaded_config.path.absolute())
    read_fd, write_fd = os.pipe()
    with log_file.open("ab") as log_stream:
        runs_process = subprocess.Popen(
            [sys.executable, "-m", "flows.scheduled.deployment_process", str(write_fd), config_path, *loaded_config.overrides],
            env=os.environ | parent_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log_stream,
            stderr=log_stream,
            pass_fds=[write_fd],
            start_new_session=True,
        )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as pipe:
            message = pipe.read()
        if message != READY_MESSAGE:
            exit_code = runs_process.wait()
            error_message = message or f"the process that starts planned runs ended with exit code {exit_code}; see {log_file}"
            raise InputError(error_message) if exit_code == InputError.exit_code else StageError(error_message)
        yield runs_process
    finally:
        runs_process.terminate()
        with suppress(subprocess.TimeoutExpired):
            runs_process.wait(RUNS_STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(runs_process.pid, signal.SIGKILL)  # ends the process, and the runs that did not end in time
        runs_process.wait()


def _watch(prefect_server: PrefectServer | None, runs_process: subprocess.Popen[bytes] | None, *, log_file: Path) -> None:
    """Wait for a signal; raise StageError if the process of the runs has ended or the Prefect server does not stay up."""
    while True:
        if runs_process is not None and runs_process.poll() is not None:
            raise StageError(
                f"the process that starts planned runs ended with exit code {runs_process.returncode}; see {log_file}"
            )
        if prefect_server is not None and prefect_server.has_failed:
            raise StageError(f"the Prefect server does not stay up; see {log_file}")
        time.sleep(WATCH_INTERVAL_S)
