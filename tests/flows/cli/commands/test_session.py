"""The session of a command: unexpected errors become one sentence, and the advice names the run to resume."""

from pathlib import Path

import pytest

from flows.cli.commands import session
from flows.cli.commands.run import run_nightly
from flows.cli.commands.session import FlowCommand, one_sentence_errors
from flows.settings.config_file import LoadedConfig, dump_config
from flows.settings.template import starter_config
from recsys_core.errors import StageError, TrackingServerError
from recsys_core.manifests.stage_folder import create_own_folder
from tasks.runs.context import RunOptions
from tasks.runs.run import Run


@pytest.mark.parametrize(
    ("resume_option", "has_begun", "advice"),
    [
        (" --resume r", False, "no stage had begun; start again with: nightjar run a.yaml"),
        (" --resume r", True, "resume with: nightjar run a.yaml --resume r"),
        ("", False, "resume with: nightjar run a.yaml"),
    ],
)
def test_the_advice_after_an_interruption_depends_on_the_config_of_the_run(
    tmp_path: Path, resume_option: str, has_begun: bool, advice: str
) -> None:
    run = Run("r", workspace=tmp_path)
    if has_begun:
        run.folder.mkdir(parents=True)
        run.config_file.touch()
    command = FlowCommand(starter_config(), None, run, "nightjar run a.yaml", resume_option=resume_option)
    assert command.how_to_resume() == advice


def test_the_traceback_of_an_unexpected_error_holds_no_password(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"postgresql://ada:\*\*\*@db/mlflow") as error_info, one_sentence_errors(tmp_path):
        raise ValueError("cannot parse postgresql://ada:s3cret@db/mlflow")
    assert "ValueError: cannot parse postgresql://ada:***@db/mlflow" in (tmp_path / "error.log").read_text()
    assert "s3cret" not in str(error_info.value) + (tmp_path / "error.log").read_text()


def test_a_run_that_fails_because_of_mlflow_names_the_run_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_config = LoadedConfig(starter_config().with_absolute_paths(tmp_path), tmp_path / "nightly.yaml")
    run_folder = loaded_config.config.workspace / "runs" / "r"
    create_own_folder(run_folder)
    dump_config(loaded_config.config, run_folder / "config.yaml")

    def raise_tracking_server_error(*_: object, **__: object) -> None:
        raise TrackingServerError("MLflow does not work")

    monkeypatch.setattr(session, "prefect_session", raise_tracking_server_error)
    with pytest.raises(StageError, match=r"^MLflow does not work; resume the run with --resume r$"):
        run_nightly(loaded_config, None, options=RunOptions(), resume="r", until=None)
    assert not (run_folder / "error.log").exists()
