"""`nightjar ui` and `nightjar up`: ports in use, other versions of a database, passwords, and the user's own servers."""

import re
import shutil
import socket
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from flows.cli.commands import ui
from flows.settings.template import starter_config
from recsys_core.errors import InputError, StageError


@pytest.mark.parametrize("option", ["--prefect-port", "--mlflow-port"])
def test_the_error_about_a_port_in_use_names_the_port_and_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening_server, socket.create_server(("127.0.0.1", 0)) as closed_server:
        used_port, free_port = listening_server.getsockname()[1], closed_server.getsockname()[1]
        closed_server.close()
        if option == "--prefect-port":
            ports = {"prefect_port": used_port, "mlflow_port": free_port}
        else:
            ports = {"prefect_port": free_port, "mlflow_port": used_port}
        message = f"port {used_port} on 127.0.0.1: Address already in use; set {option} to"
        with pytest.raises(InputError, match=re.escape(message)):
            ui.serve(starter_config().with_absolute_paths(tmp_path), **ports)
    assert list(tmp_path.iterdir()) == []


def test_servers_of_the_user_are_named_and_no_second_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example:4200/api")
    ui.serve(starter_config().with_absolute_paths(tmp_path), prefect_port=4200, mlflow_port=5000)
    assert capsys.readouterr().out == "Prefect  http://prefect.example:4200\nMLflow   http://mlflow.example:5000\n"
    assert list(tmp_path.iterdir()) == []


def test_the_error_about_another_mlflow_schema_has_both_schemas_and_the_migration(
    tmp_path: Path, new_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example:4200/api")
    config = starter_config().with_absolute_paths(tmp_path)
    config.workspace.mkdir()
    shutil.copy(new_database, config.workspace)
    with closing(sqlite3.connect(config.workspace / "mlflow.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = 'cfd24bdc0731'")
        database.commit()
    message = r"(?s)^the MLflow server .*found version cfd24bdc0731, but expected \w+\).* 'mlflow db upgrade <database_uri>'"
    with pytest.raises(StageError, match=message):
        ui.serve(config, prefect_port=0, mlflow_port=0)


def test_a_second_nightjar_up_in_a_workspace_is_an_input_error(tmp_path: Path) -> None:
    with (
        ui._up_lock(tmp_path),
        pytest.raises(InputError, match=f"^{tmp_path}: another `nightjar up` runs this workspace"),
        ui._up_lock(tmp_path),
    ):
        pass
    with ui._up_lock(tmp_path):  # the lock is free again
        pass


def test_the_password_of_the_pages_is_kept_in_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    credentials, credentials_text = ui._server_credentials(tmp_path)
    password_path = tmp_path / "server-password"
    assert stat.S_IMODE(password_path.stat().st_mode) == 0o600
    assert (credentials, credentials_text) == (password_path.read_text().strip(), f"in {password_path}")
    assert ui._server_credentials(tmp_path)[0] == credentials
    password_path.write_text("\n")  # the disk was full when the password was written
    new_credentials = ui._server_credentials(tmp_path)[0]
    assert new_credentials.startswith("nightjar:") and password_path.read_text().strip() == new_credentials
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "ada:s3cret")
    assert ui._server_credentials(tmp_path) == ("ada:s3cret", None)
