import pytest


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    """Do nothing: the tests of this folder name the engine themselves."""
