"""Tests of the log ingest. A test with the mark `both_engines` runs with DuckDB and with Spark, any other test with DuckDB.

NIGHTJAR_TEST_ENGINE=spark runs all tests with Spark, which takes about half an hour.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recsys_core.ingest import interaction_logs, spark_sessions

ENGINES = {"duckdb": {"kind": "duckdb"}, "spark": spark_sessions.SPARK}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames and metafunc.definition.path.parent == Path(__file__).parent:
        has_both = metafunc.definition.get_closest_marker("both_engines") is not None
        default = os.environ.get("NIGHTJAR_TEST_ENGINE", "duckdb")
        metafunc.parametrize("engine", list(ENGINES) if has_both else [default], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let interaction_logs.ingest use the engine."""
    if request.param == "spark":
        request.getfixturevalue("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interaction_logs, "engine", ENGINES[request.param])
        yield request.param


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Spark session for all tests of this process."""
    if reason := spark_sessions.reason_to_skip():
        pytest.skip(reason)
    from recsys_core.ingest.log.spark_engine.cluster import stop_session

    session = spark_sessions.start(tmp_path_factory.mktemp("spark"))
    yield
    stop_session(session)
