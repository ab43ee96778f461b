"""Work after each run: it is done for failed runs, mostly left out for interrupted ones, and cannot fail a run."""

import shutil
from pathlib import Path

import pytest

from flows.after_run import after_run
from flows.cli.config_template import starter_config
from tests.flows.run_folders import FIRST_START, past_run


@pytest.mark.parametrize("state", ["Failed", "Interrupted"])
def test_page_and_metrics_are_written_after_a_failed_run_and_only_metrics_after_an_interrupted_one(
    tmp_path: Path, new_database: Path, state: str
) -> None:
    shutil.copy(new_database, tmp_path)
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, past_run(tmp_path, FIRST_START, state=state, stages=0))  # type: ignore[arg-type]
    assert (tmp_path / "index.html").is_file() == (state == "Failed")
    assert f'state="{state}"}} 1.0' in (tmp_path / "metrics.prom").read_text()


def test_a_page_that_cannot_be_written_is_a_warning(
    tmp_path: Path, new_database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(new_database, tmp_path)
    (tmp_path / "index.html").mkdir()
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, past_run(tmp_path, FIRST_START, state="Failed", stages=0))
    assert "could not write the page of the last runs (IsADirectoryError" in caplog.text
    assert (tmp_path / "metrics.prom").is_file()
