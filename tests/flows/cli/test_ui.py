"""`nightjar ui`: ports in use, and servers of the user's own."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import ui
from flows.cli.config_template import starter_config
from recsys_core.errors import InputError, StageError


@pytest.mark.parametrize("option", ["--prefect-port", "--mlflow-port"])
def test_a_port_in_use_is_an_input_error_that_names_port_and_option_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        port, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        ports = (
            {"prefect_port": port, "mlflow_port": free}
            if option == "--prefect-port"
            else {"prefect_port": free, "mlflow_port": port}
        )
        with pytest.raises(InputError, match=re.escape(f"port {port} on 127.0.0.1: Address already in use; set {option} to")):
            ui.serve(starter_config().with_absolute_paths(tmp_path), **ports)
    assert list(tmp_path.iterdir()) == []


def test_servers_of_the_user_are_named_and_no_second_one_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example:4200/api")
    ui.serve(starter_config().with_absolute_paths(tmp_path), prefect_port=4200, mlflow_port=5000)
    assert capsys.readouterr().out == "Prefect  http://prefect.example:4200\nMLflow   http://mlflow.example:5000\n"
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_ends_is_named_without_the_password_in_its_arguments() -> None:
    server = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)", "postgresql://ada:s3cret@db/mlflow"])
    server.wait()
    with pytest.raises(StageError, match=r"postgresql://ada:\*\*\*@db/mlflow'\] ended with exit code 3; see ui.log"):
        ui._wait([server], log_name="ui.log")
