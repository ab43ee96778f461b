"""Time of a run outside of its stages, with the embedded Prefect server and with servers that already run."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from flows.settings.template import write_demo

BIN_FOLDER = Path(sys.executable).parent
STAGE_LINE_PATTERN = re.compile(r"^(\w+) .* ([\d,]+\.\d) s$", re.MULTILINE)
START_TIMEOUT_S = 120.0


def measure_orchestration() -> dict[str, dict[str, float]]:
    """Return wall time, total time of the stages and their difference in seconds, for each kind of server.

    Both runs read the same generated data and use a new workspace. The time of a stage is the time that the command prints. It
    includes the imports, reports and artifacts of the stage.
    """
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        config_path = write_demo(folder / "demo")
        results = {"embedded server": _time_run(config_path, workspace=folder / "embedded", environment={})}
        with running_servers(folder) as environment:
            # A new server is busy for some seconds, and imports modules at its first requests.
            _time_run(config_path, workspace=folder / "warm-up", environment=environment)
            results["running servers"] = _time_run(config_path, workspace=folder / "servers", environment=environment)
    return results


def _time_run(config_path: Path, *, workspace: Path, environment: Mapping[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "flows.cli", "run", str(config_path), "--set", f"workspace={workspace}"]
    start_s = time.perf_counter()
    process = subprocess.run(command, env=os.environ | environment, check=True, stderr=subprocess.PIPE, text=True)
    wall_s = time.perf_counter() - start_s
    stages_s = sum(float(seconds.replace(",", "")) for _, seconds in STAGE_LINE_PATTERN.findall(process.stderr))
    return {"wall": round(wall_s, 1), "stages": round(stages_s, 1), "difference": round(wall_s - stages_s, 1)}


@contextmanager
def running_servers(folder: Path) -> Iterator[dict[str, str]]:
    """Start a Prefect server and an MLflow server on sqlite, and yield the environment variables of a run that uses them."""
    prefect_port, mlflow_port = _free_port(), _free_port()
    prefect_url, mlflow_url = f"http://127.0.0.1:{prefect_port}", f"http://127.0.0.1:{mlflow_port}"
    commands = {
        f"{prefect_url}/api/health": ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(prefect_port)],
        f"{mlflow_url}/health": [
            *("mlflow", "server", "--host", "127.0.0.1", "--port", str(mlflow_port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts")),
        ],
    }
    with ExitStack() as stack:
        for health_url, (program, *arguments) in commands.items():
            log_stream = stack.enter_context((folder / f"{program}.log").open("w"))
            server = subprocess.Popen(
                [BIN_FOLDER / program, *arguments],
                env=os.environ | {"PREFECT_HOME": str(folder / "prefect")},
                stdout=log_stream,
                stderr=subprocess.STDOUT,
            )
            stack.callback(server.wait)
            stack.callback(server.terminate)
            _wait_until_healthy(health_url)
        yield {"PREFECT_API_URL": f"{prefect_url}/api", "MLFLOW_TRACKING_URI": mlflow_url}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _wait_until_healthy(url: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):  # noqa: S310  http on loopback
            return
        time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {START_TIMEOUT_S:g} s")
