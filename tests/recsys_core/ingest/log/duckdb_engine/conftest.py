"""The engine of the tests of this folder."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    """Do nothing, so that the tests of this folder run with DuckDB, the default engine."""
