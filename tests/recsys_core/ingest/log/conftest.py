"""The engine of the tests of the log ingest.

Tests with the mark `both_engines` run with DuckDB and with Spark, other tests only with DuckDB.

NIGHTJAR_TEST_ENGINE=spark runs all tests of this folder with Spark, which takes about half an hour.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recsys_core.ingest import interaction_logs, spark_sessions

ENGINES = {"duckdb": {"kind": "duckdb"}, "spark": spark_sessions.SPARK_SETTINGS}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the fixture `engine` of the tests in this folder; the subfolders have their own fixture."""
    if "engine" in metafunc.fixturenames and metafunc.definition.path.parent == Path(__file__).parent:
        has_mark = metafunc.definition.get_closest_marker("both_engines") is not None
        engine_names = list(ENGINES) if has_mark else [os.environ.get("NIGHTJAR_TEST_ENGINE", "duckdb")]
        metafunc.parametrize("engine", engine_names, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let interaction_logs.ingest use the engine, and return its name."""
    if request.param == "spark":
        request.getfixturevalue("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interaction_logs, "engine_settings", ENGINES[request.param])
        yield request.param


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start the Spark session of this process. Skip the test if Spark or Java is not installed."""
    if reason := spark_sessions.reason_to_skip():
        pytest.skip(reason)
    from recsys_core.ingest.log.spark_engine.cluster import stop_session

    session = spark_sessions.start_session(tmp_path_factory.mktemp("spark"))
    yield
    stop_session(session)
