"""Resuming a run with the config of another pipeline, or a run that does not exist."""

import re
from pathlib import Path

import pytest

from flows import nightly
from flows.runs.before_run import check_resume
from flows.settings.config_file import dump_config
from flows.settings.pipeline import PipelineConfig
from flows.settings.template import starter_config
from recsys_core.errors import InputError
from tasks.runs.run import Run


def config_of(folder: Path, *, name: str = "nightly", model_name: str = "nightjar") -> PipelineConfig:
    config = starter_config().with_absolute_paths(folder)
    registry = config.registry.model_copy(update={"model_name": model_name})
    return config.model_copy(update={"name": name, "registry": registry})


def run_of(config: PipelineConfig) -> Run:
    return Run("20261121-070312-ab12", workspace=config.workspace)


def test_a_run_of_the_same_pipeline_may_be_resumed_with_other_settings(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    dump_config(config, run_of(config).config_file)
    check_resume(config.for_full_retrain(), run_of(config))


@pytest.mark.parametrize(
    ("changed_name", "message"),
    [
        (
            {"name": "movies"},
            "config.yaml has name 'movies', but this config has name 'nightly'; resume the run with",
        ),
        ({"model_name": "movies"}, "has registry.model_name 'movies', but this config has registry.model_name 'nightjar'; "),
    ],
)
def test_a_run_of_another_pipeline_is_not_resumed_and_not_changed(
    tmp_path: Path, changed_name: dict[str, str], message: str
) -> None:
    run = run_of(config_of(tmp_path))
    with run.lock():
        dump_config(config_of(tmp_path, **changed_name), run.config_file)
    config_bytes = run.config_file.read_bytes()
    with pytest.raises(InputError, match=f"^cannot resume {run.run_id}: .*{re.escape(message)}"):
        nightly.nightly_retrain.fn(config_of(tmp_path), run_id=run.run_id)
    assert run.config_file.read_bytes() == config_bytes
    assert {path.name for path in run.folder.iterdir()} == {".lock", ".nightjar", "config.yaml"}


@pytest.mark.parametrize(
    ("config_text", "message"), [(None, "no such run in .*; the runs are none"), ("a: [", "its config cannot be read: ")]
)
def test_a_run_without_a_readable_config_is_not_resumed(tmp_path: Path, config_text: str | None, message: str) -> None:
    config = config_of(tmp_path)
    if config_text is not None:
        run_of(config).folder.mkdir(parents=True)
        run_of(config).config_file.write_text(config_text)
    with pytest.raises(InputError, match=f"^cannot resume 20261121-070312-ab12: .*{message}"):
        check_resume(config, run_of(config))
