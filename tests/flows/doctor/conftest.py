"""A config in an environment that names no server."""

import os
from pathlib import Path

import pytest

from flows.settings.pipeline import PipelineConfig
from flows.settings.template import starter_config


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
    for name in list(os.environ):
        if name.startswith(("PREFECT_", "MLFLOW_TRACKING_")):
            monkeypatch.delenv(name)
    return starter_config().with_absolute_paths(tmp_path)
