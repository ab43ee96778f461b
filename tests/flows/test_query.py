"""Commands that read the registry: one line without the password if MLflow does not work, and an error for equal versions."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import query
from flows.cli import main as cli
from flows.settings import environment
from flows.settings.config_file import load_config
from recsys_core.errors import InputError
from tasks.registry import mlflow_client
from tests.tasks.unhealthy_servers import answering_server, closed_address, silent_server

COMMANDS = (["query", "--user", "1"], ["recommend", "--out", "recs"], ["releases"])
SERVER_BY_TROUBLE: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "a closed port": lambda: nullcontext(closed_address()),
    "not MLflow": partial(answering_server, (200, "<html></html>")),
    "error 500": partial(answering_server, (500, "")),
    "silence": silent_server,
}


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text("interactions: {paths: log.parquet, timestamp_column: timestamp}\n")
    return path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("trouble", SERVER_BY_TROUBLE)
def test_if_mlflow_does_not_work_a_command_prints_one_line_and_returns_exit_code_1(
    config_path: Path, command: list[str], trouble: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mlflow_client, "ANSWER_TIMEOUT_S", 0.5)
    # The real functions would change the environment and the logging of this process.
    monkeypatch.setattr(environment, "prepare_environment", lambda *_, **__: None)
    monkeypatch.setattr(cli, "silence_libraries", lambda: None)
    monkeypatch.setattr(sys, "argv", ["nightjar", command[0], str(config_path), *command[1:]])
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with SERVER_BY_TROUBLE[trouble]() as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address.replace("//", "//ada:s3cret@"))
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert (exit_info.value.code, printed.out) == (1, "")
    assert line.startswith(f"error: MLflow at {address.replace('//', '//ada:***@')} does not work: ")
    assert "s3cret" not in line


def test_a_version_is_not_compared_with_itself(config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "newest_version_number", lambda *_: "3")
    monkeypatch.setattr(query, "load_version", lambda *_, **__: SimpleNamespace(version="3"))  # version 3 is the champion
    with pytest.raises(InputError, match=r"^version 3 would be compared with itself; name two versions with --version and"):
        query.compare_versions(load_config(config_path), version=None, reference="champion", num_users=10, k=5)
