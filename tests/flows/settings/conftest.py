"""A valid config file for the tests of settings."""

from pathlib import Path

import pytest

from tests.flows.settings.rejected_config import VALID_CONFIG


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text(VALID_CONFIG)
    return path
