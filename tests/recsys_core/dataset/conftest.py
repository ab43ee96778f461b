"""Fixture that runs tests with several numbers of shards: `pytestmark = usefixtures("num_shards")`.

A module uses it if its expected results are the same for every number of shards.
"""

from collections.abc import Iterator

import pytest

from tests.recsys_core.dataset import test_events


@pytest.fixture(scope="module", params=(1, 3, 8))
def num_shards(request: pytest.FixtureRequest) -> Iterator[int]:
    """Return the number of shards into which test_events.store_of divides the users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_events, "num_store_shards", request.param)
        yield request.param
