"""Every test in this folder states results of the log ingest, and runs once with each engine."""

from collections.abc import Iterator

import pytest

from recsys_core.ingest.log.duckdb_engine.engine import DuckdbEngine
from tests.recsys_core.ingest import interaction_logs

ENGINES = {"duckdb": DuckdbEngine}


@pytest.fixture(scope="module", params=ENGINES, autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let interaction_logs.ingest use the engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interaction_logs, "engine_class", ENGINES[request.param])
        yield
