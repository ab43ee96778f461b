"""The engine of the tests of this folder."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    """Do nothing, because the tests of this folder pass the engine as a setting."""
