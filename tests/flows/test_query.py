"""`query` and `releases` without a healthy MLflow: exit code 1 and one sentence, in time and without a password."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest

from flows.cli import main as cli
from flows.cli import session
from flows.cli.run import run_nightly
from flows.cli.session import one_sentence_errors
from flows.settings import environment
from flows.settings.config_file import LoadedConfig, dump_config
from flows.settings.template import starter_config
from recsys_core.errors import StageError, TrackingServerError
from recsys_core.manifests.stage_folder import create_own_folder
from tasks.registry import mlflow_client
from tasks.runs.context import RunOptions
from tests.tasks.unhealthy_servers import answering, closed, silent

COMMANDS = (["query", "--user", "1"], ["releases"])
TROUBLE: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "a closed port": lambda: nullcontext(closed()),
    "not MLflow": partial(answering, (200, "<html></html>")),
    "error 500": partial(answering, (500, "")),
    "silence": silent,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text("interactions: {paths: log.parquet, timestamp_column: timestamp}\n")
    return path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("trouble", TROUBLE)
def test_a_command_ends_with_one_sentence_and_exit_code_1(
    file: Path, command: list[str], trouble: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mlflow_client, "ANSWER_TIMEOUT_S", 5.0)
    monkeypatch.setattr(environment, "prepare_environment", lambda *_, **__: None)  # it changes this process
    monkeypatch.setattr(cli, "silence_libraries", lambda: None)
    monkeypatch.setattr(sys, "argv", ["nightjar", command[0], str(file), *command[1:]])
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with TROUBLE[trouble]() as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address.replace("//", "//ada:s3cret@"))
        with pytest.raises(SystemExit) as caught:
            cli.main()
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert (caught.value.code, printed.out) == (1, "")
    assert line.startswith(f"error: MLflow at {address.replace('//', '//ada:***@')} does not work: ")
    assert "s3cret" not in line


def test_the_traceback_of_an_unexpected_error_holds_no_password(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"postgresql://ada:\*\*\*@db/mlflow") as caught, one_sentence_errors(tmp_path):
        raise ValueError("cannot parse postgresql://ada:s3cret@db/mlflow")
    assert "ValueError: cannot parse postgresql://ada:***@db/mlflow" in (tmp_path / "error.log").read_text()
    assert "s3cret" not in str(caught.value) + (tmp_path / "error.log").read_text()


def test_a_run_that_fails_because_of_mlflow_names_the_run_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedConfig(starter_config().with_absolute_paths(tmp_path), tmp_path / "nightly.yaml")
    run_folder = loaded.config.workspace / "runs" / "r"
    create_own_folder(run_folder)
    dump_config(loaded.config, run_folder / "config.yaml")

    def end(*_: object, **__: object) -> None:
        raise TrackingServerError("MLflow does not work")

    monkeypatch.setattr(session, "prefect_session", end)
    with pytest.raises(StageError, match=r"^MLflow does not work; resume the run with --resume r$"):
        run_nightly(loaded, None, options=RunOptions(), resume="r", until=None)
    assert not (run_folder / "error.log").exists()
