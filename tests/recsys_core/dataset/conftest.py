"""Every test in this folder states results of the event store, and runs with several numbers of shards."""

from collections.abc import Iterator

import pytest

from tests.recsys_core.dataset import test_events

SHARDS = (1, 3, 8)


@pytest.fixture(scope="module", params=SHARDS, autouse=True)
def shards(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let test_events.store_of divide the users into shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_events, "num_test_shards", request.param)
        yield request.param
