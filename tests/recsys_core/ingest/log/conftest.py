"""Every test in this folder states results of the log ingest, and runs with each engine that its module names in ENGINES."""

from collections.abc import Iterator

import pytest

from tests.recsys_core.ingest import interaction_logs

ENGINES = {"duckdb": {"kind": "duckdb"}}


@pytest.fixture(scope="module", params=ENGINES, autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let interaction_logs.ingest use the engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interaction_logs, "engine", ENGINES[request.param])
        yield
