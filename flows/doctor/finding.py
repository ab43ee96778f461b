"""Findings of checks, and checks that run at the same time with a deadline."""

import threading
import time
from collections.abc import Callable, Mapping
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
    finding_by_subject: dict[str, Finding] = {}

    def run(subject: str, check: Callable[[], Finding]) -> None:
        try:
            finding_by_subject[subject] = check()
        except Exception as error:  # any error of a library
            finding_by_subject[subject] = problem(f"{type(error).__name__}: {first_line(error)}")

    # The threads are daemons, because the command may end before a check does.
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    late = problem(f"no result within {timeout_s:g} s; check the server or the disk that this line names")
    return {subject: finding_by_subject.get(subject, late) for subject in checks}
