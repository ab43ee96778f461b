"""Tests that state results of an event store run with several numbers of shards: `pytestmark = usefixtures("shards")`."""

from collections.abc import Iterator

import pytest

from tests.recsys_core.dataset import test_events

SHARDS = (1, 3, 8)


@pytest.fixture(scope="module", params=SHARDS)
def shards(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let test_events.store_of divide the users into shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_events, "num_test_shards", request.param)
        yield request.param
