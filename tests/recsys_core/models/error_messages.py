"""A variant of pytest.raises that compares the message with an exact text, not with a pattern."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises_message(text: str) -> Iterator[None]:
    """Expect a ValueError whose message contains `text`. InputError and ValidationError are ValueErrors."""
    with pytest.raises(ValueError) as error_info:
        yield
    assert text in str(error_info.value)
