"""A variant of pytest.raises that looks for a plain text in the message, not for a pattern."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises_message(message_part: str) -> Iterator[None]:
    """Expect a ValueError whose message contains `message_part`. InputError and ValidationError are ValueErrors."""
    with pytest.raises(ValueError) as error_info:
        yield
    assert message_part in str(error_info.value)
