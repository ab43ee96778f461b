"""Exceptions of nightjar, and formatting of values in messages. The class of an exception sets the exit code of `nightjar`."""

import re
from collections.abc import Sequence
from datetime import date
from decimal import Decimal

MAX_SHOWN_CHARACTERS = 80
_MAX_LINE_CHARACTERS = 300
_USER_INFO_PATTERN = re.compile(r"(\b[a-z][a-z0-9+.-]*://)([^\s:@/]*)(:?)\S*@", re.IGNORECASE)
_QUERY_VALUE_PATTERN = re.compile(r"([?&][^\s=&]+=)[^\s&'\"]+")


class NightjarError(Exception):
    """Base of all errors of nightjar; the command line exits with `exit_code`."""

    exit_code = 1


class InputError(NightjarError, ValueError):
    """The config or the data is wrong, and the user can fix it.

    The message names the place, the actual value, the expected value and the fix.
    """

    exit_code = 2


class DataRejectedError(InputError):
    """The data violates a limit of `data_report`."""


class StageError(NightjarError, RuntimeError):
    """A stage failed for a reason outside its input: a process died, or a file changed."""


class TrackingServerError(StageError):
    """The tracking server or its registry did not answer, or returned an error; a retry may succeed."""


class LaunchError(StageError):
    """The ranks of a training ended early; another attempt may continue from the last checkpoint."""


def shown(value: object) -> str:
    """Format an input value for a message: on one line, with at most 80 characters, in quotes if it is text.

    Control characters and text-direction marks are escaped.

    >>> print(shown("a\\nb"), shown(None), shown(date(2026, 11, 19)), shown("a\\u202eb"))
    'a\\nb' null 2026-11-19 'a\\u202eb'
    >>> len(shown("x" * 10_000))
    80
    """
    text = "null" if value is None else str(value) if isinstance(value, date | Decimal) else repr(value)
    return _shortened(text if text.isprintable() else ascii(value), MAX_SHOWN_CHARACTERS)


def shown_names(names: Sequence[str], *, max_names: int = 50) -> str:
    """Format names, such as the columns of a file, for a message; only the first `max_names` are listed.

    >>> shown_names(["user_id", "item_id", "time"], max_names=2)
    "['user_id', 'item_id'] and 1 more"
    """
    omission_text = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return f"[{', '.join(shown(name) for name in names[:max_names])}]{omission_text}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the singular or the plural.

    >>> counted(1, "file"), counted(2_000, "file")
    ('1 file', '2,000 files')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def printable(text: str, *, max_characters: int | None = None) -> str:
    r"""Escape the control characters of a text for a message, and cut the result to `max_characters`; None: do not cut.

    >>> print(printable("a\nb\x1b[31m.parquet"))
    a\nb\x1b[31m.parquet
    """
    escaped_text = "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text
    )
    return escaped_text if max_characters is None else _shortened(escaped_text, max_characters)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, escaped and cut; without a message, the name of the error's class."""
    lines = str(error).splitlines()
    return printable(lines[0], max_characters=_MAX_LINE_CHARACTERS) if lines else type(error).__name__


def _shortened(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."


def redacted(text: str) -> str:
    """Replace the password or token and the query values of each URL in `text` with ***.

    >>> redacted("no answer from postgresql://ada:s3/cr@et@db:5432/mlflow?sslmode=require")
    'no answer from postgresql://ada:***@db:5432/mlflow?sslmode=***'
    >>> redacted("https://token@host/api, models:/nightjar@champion")
    'https://***@host/api, models:/nightjar@champion'
    """
    text_without_passwords = _USER_INFO_PATTERN.sub(
        lambda match: f"{match[1]}{match[2]}:***@" if match[3] else f"{match[1]}***@", text
    )
    return _QUERY_VALUE_PATTERN.sub(r"\1***", text_without_passwords)
