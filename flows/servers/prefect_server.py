"""Prefect server of a command: embedded in `nightjar run`, with UI and scheduler in `nightjar ui` and `nightjar up`."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from flows.servers.server_process import MIN_FREE_BYTES, ServerProcess
from flows.settings.environment import require_home
from recsys_core.disk import require_free_space
from recsys_core.imports import fast_imports

SLOW_IMPORTS = ("docket", "fastapi")
"""Libraries of Prefect that take long to import and do not read Prefect's settings."""
INTERVAL_S_BY_VARIABLE = {
    "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_FOREMAN_LOOP_SECONDS": "60",
}
"""Seconds between the runs of Prefect's services in a server with a UI. Prefect's defaults are 5 to 15 s."""


class PrefectServer(ServerProcess):
    """A Prefect server with its database in PREFECT_HOME.

    Args:
        port: port of the server; 0: any free port.
        has_ui: whether to serve the UI and run all services, such as the scheduler.
    """

    def __init__(self, *, port: int = 0, has_ui: bool = False) -> None:
        self._has_ui = has_ui
        server_name = "Prefect server" if has_ui else "embedded Prefect server"
        super().__init__(
            "flows.servers.prefect_app",
            name=server_name,
            health_path="/api/health",
            libraries=SLOW_IMPORTS,
            port=port,
            port_option="--prefect-port",
        )

    @property
    def api_url(self) -> str:
        """Address of the API."""
        return f"{self.url}/api"

    def start_prefect(self, *, log_file: Path, credentials: str | None = None) -> None:
        """Start to serve the database in PREFECT_HOME; set PREFECT_API_URL and the server's credentials for this process.

        Call before Prefect is imported.

        Args:
            log_file: file for the output of the server.
            credentials: user:password of the server; None: a random password.
        """
        for folder in (log_file.parent, Path(os.environ.get("PREFECT_HOME", log_file.parent))):
            require_free_space(folder, MIN_FREE_BYTES, subject=f"the {self._name} with its database")
        if credentials is None:
            credentials = f"nightjar:{secrets.token_urlsafe(32)}"  # other users of this host can connect to the port
        os.environ.update(PREFECT_API_URL=self.api_url, PREFECT_API_AUTH_STRING=credentials)
        # Empty for a server without UI. If the variable were not set, Prefect would derive a URL from PREFECT_API_URL.
        os.environ.setdefault("PREFECT_UI_URL", self.url if self._has_ui else "")
        server_environment = {
            **(INTERVAL_S_BY_VARIABLE if self._has_ui else {}),
            **os.environ,
            "PREFECT_SERVER_API_AUTH_STRING": credentials,
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
            "PREFECT__SERVER_FINAL": "1",
        }
        if self._has_ui:
            server_environment["PREFECT_SERVER_UI_API_URL"] = self.api_url  # by default, the UI sends its requests to port 4200
            # By default, leases of concurrency slots are in memory. If the server died, the leases would be lost, and the slot
            # of a running flow run would never become free.
            server_environment["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"] = (
                "prefect.server.concurrency.lease_storage.filesystem"
            )
        else:
            server_environment |= {
                # Only the UI uses blocks, and a server with the UI registers them.
                "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
                "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
                "PREFECT_UI_ENABLED": "0",
                "PREFECT__SERVER_EPHEMERAL": "1",
            }
        self.start_serving(log_file=log_file, environment=server_environment)


@contextmanager
def embedded_server() -> Iterator[PrefectServer | None]:
    """Yield a server that is stopped after the body; None if PREFECT_API_URL names a server of the user."""
    if os.environ.get("PREFECT_API_URL"):
        yield None
        return
    require_home()
    user_credentials = os.environ.get("PREFECT_API_AUTH_STRING")
    server = PrefectServer()
    try:
        yield server
    finally:
        server.stop()
        os.environ.pop("PREFECT_API_URL", None)
        os.environ.pop("PREFECT_API_AUTH_STRING", None)
        if user_credentials is not None:
            os.environ["PREFECT_API_AUTH_STRING"] = user_credentials


@contextmanager
def prefect_session(server: PrefectServer | None, flow_path: str, *, log_file: Path) -> Iterator[Any]:
    """Yield the flow at `flow_path` (module:name), once the server answers. After the body, send the queued log to Prefect.

    The flow is imported while the server starts.

    Args:
        log_file: file for the output of the server.
    """
    if server is not None:
        server.start_prefect(log_file=log_file)
    module_name, flow_name = flow_path.split(":")
    with fast_imports():
        from prefect.logging.handlers import APILogWorker
        from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

        flow = getattr(import_module(module_name), flow_name)
    if server is not None:
        server.wait_until_ready()
    # Heartbeats are useless here, because the command itself reports how its run ends. Their thread would delay the end by 1 s.
    with temporary_settings(set_defaults={PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        try:
            yield flow
        finally:
            APILogWorker.drain_all()  # by default Prefect sends the records at exit, after the end of the server
