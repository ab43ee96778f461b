import pytest


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    """Run the tests of this folder with DuckDB alone, the default engine."""
