"""A refusal is its message: compared as it stands, not as a pattern."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refuses(message: str) -> Iterator[None]:
    """Expects a ValueError (an InputError and a ValidationError are some) that says `message`."""
    with pytest.raises(ValueError) as caught:
        yield
    assert message in str(caught.value)
