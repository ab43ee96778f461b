"""Registration with a real MLflow server, which checks requests more strictly than the embedded database."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.register import register
from tasks.registry.config import RegistryConfig
from tasks.registry.mlflow_client import connect
from tasks.registry.releases import champion_uri
from tasks.run import Run
from tests.tasks.conftest import Stages


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "artifacts")),
    ]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 90
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            time.sleep(0.2)
    yield address
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=20)


def test_a_version_is_registered_tested_and_promoted_on_a_server(
    tmp_path: Path, server: str, stages: Callable[..., Stages], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    run = Run("one", workspace=tmp_path / "workspace", experiment="tests")
    run.folder.mkdir(parents=True)
    run.config_file.write_text("name: tests\n")
    made = register.fn(RegistryConfig(model_name="m"), run=run, **stages()._asdict())[0]
    assert (made.version, made.alias) == ("1", "champion")
    assert champion_uri(connect(run.workspace), "m") == "models:/m/1"
    assert not (run.workspace / "mlflow.db").exists()
