"""Work after each run: it is done for failed runs, left out for interrupted ones, and cannot fail a run."""

from pathlib import Path

import pytest

from flows.after_run import after_run
from flows.cli.config_template import starter_config
from tests.flows.run_folders import FIRST_START, past_run


@pytest.mark.parametrize("state", ["Failed", "Interrupted"])
def test_page_and_metrics_are_written_after_a_failed_run_but_not_after_an_interrupted_one(tmp_path: Path, state: str) -> None:
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, past_run(tmp_path, FIRST_START, state=state, stages=0))  # type: ignore[arg-type]
    written = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert written == ({"index.html", "metrics.prom"} if state == "Failed" else set())


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "index.html").mkdir()
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, past_run(tmp_path, FIRST_START, state="Failed", stages=0))
    assert "could not write the page of the last runs (IsADirectoryError" in caplog.text
    assert (tmp_path / "metrics.prom").is_file()
