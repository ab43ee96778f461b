"""The context of a run in a workspace with MLflow."""

from pathlib import Path

import pytest

from tasks.runs.context import StageContext
from tasks.runs.run import Run


@pytest.fixture
def context(workspace: Path) -> StageContext:
    """The context of a run whose config has `training.epochs` 3."""
    run = Run("20261121-070312-ab12", workspace=workspace)
    run.folder.mkdir(parents=True)
    run.config_file.write_text("training: {epochs: 3}\nname: nightly\n")
    return StageContext(run, experiment="tests")
