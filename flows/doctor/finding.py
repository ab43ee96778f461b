"""Findings of checks, and checks that run at the same time with a deadline."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError
from typing import Literal, NamedTuple

from recsys_core.errors import first_line, redacted

CHECK_TIMEOUT_S = 5.0
Status = Literal["ok", "problem", "not used"]


class Finding(NamedTuple):
    """Result of one check. The text of a problem ends with the fix."""

    status: Status
    text: str


def ok(text: str) -> Finding:
    """Return the finding of a check without a problem."""
    return Finding("ok", text)


def problem(text: str) -> Finding:
    """Return a problem. `text` names the place, the values and the fix; passwords in it are hidden."""
    return Finding("problem", redacted(text))


def not_used(text: str) -> Finding:
    """Return the finding of a check that does not apply to this installation."""
    return Finding("not used", text)


def run_checks(checks: Mapping[str, Callable[[], Finding]], *, timeout_s: float = CHECK_TIMEOUT_S) -> dict[str, Finding]:
    """Run all checks at the same time and return their findings. A check that raises or takes too long is a problem."""
    futures = {subject: _start_check(check) for subject, check in checks.items()}
    return {subject: _finding_of(future, timeout_s=timeout_s) for subject, future in futures.items()}


def _start_check(check: Callable[[], Finding]) -> Future[Finding]:
    future: Future[Finding] = Future()

    def run() -> None:
        try:
            future.set_result(check())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="doctor", daemon=True).start()  # the command may end before a check does
    return future


def _finding_of(future: Future[Finding], *, timeout_s: float) -> Finding:
    try:
        return future.result(timeout_s)
    except TimeoutError:
        return problem(f"no result within {timeout_s:g} s; check the server or the disk that this line names")
    except Exception as error:  # any error of a library
        return problem(f"{type(error).__name__}: {first_line(error)}")
