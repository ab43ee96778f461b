"""Trying again what an object store failed to answer."""

import re
from collections.abc import Callable
from typing import TypeVar

import tenacity

_ATTEMPTS = 3
"""Each of which the SDKs of the stores repeat some times themselves."""
# pyarrow tells a lost connection, a damaged page and a refused key by the text of one and the same OSError.
_PASSING = re.compile(
    r"NETWORK_CONNECTION|curlCode|REQUEST_TIMEOUT|SLOW_DOWN|THROTTLING|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|HTTP status 5\d\d"
    r"|HTTP response code 5\d\d|UNAVAILABLE|DEADLINE_EXCEEDED|Connection reset|timed out"
)

T = TypeVar("T")


def is_passing(error: BaseException) -> bool:
    """Whether `error` may be gone in a moment: the network, or a store with too much to do."""
    return isinstance(error, ConnectionError | TimeoutError) or (
        isinstance(error, OSError) and bool(_PASSING.search(str(error)))
    )


def retrying(call: Callable[[], T]) -> T:
    """The result of `call`, tried up to three times where the network fails; its last error otherwise."""
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_passing),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
        reraise=True,
    )
    return attempts(call)
