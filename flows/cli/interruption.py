"""SIGINT and SIGTERM during a run: it unwinds, what it started ends, and the last line says how to resume.

Prefect and the stages see an exception in the main thread. A main thread in native code (a matrix product, a query, an index)
does not see it in time; then a thread writes the run's end to Prefect and ends the process. Processes that the run started end
with it (recsys_core.parent_process).
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from recsys_core.errors import NightjarError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
UNWIND_S = 4.0
"""How long the main thread has. With what follows the process ends within 10 s of the signal."""
REPORT_S = 3.0
SHOW_CURSOR = "\x1b[?25h"


class Interrupted(NightjarError):
    """A signal ended the run; the exit code is the shell's, 128 and the signal's number."""

    def __init__(self, number: int, *, way_out: str) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}; {way_out}")
        self.exit_code = 128 + number


class _Unwind(KeyboardInterrupt):
    """In the main thread: what Prefect and everything else take for Ctrl-C."""


class Interruption:
    """What is known of the signal and of the run that it ends."""

    def __init__(self, way_out: Callable[[], str]) -> None:
        self._way_out = way_out
        self._unwinding = False
        self.number: int | None = None
        self.flow_run: Any = None
        self.ended = threading.Event()

    def note(self, flow: Any, flow_run: Any, state: Any) -> None:
        """A hook for Prefect: the flow run that has begun."""
        self.flow_run = flow_run

    @property
    def error(self) -> Interrupted:
        """What the person reads."""
        assert self.number is not None
        return Interrupted(self.number, way_out=self._way_out())

    def unwind(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if not self._unwinding:
            self.number, self._unwinding = number, True
            raise _Unwind

    def watch(self, signals: socket.socket) -> None:
        """Ends the process UNWIND_S after the first signal, or with the second. signals: a byte for each, none at the end."""
        while (first := signals.recv(1)) and first[0] not in SIGNALS:
            pass
        if not first:
            return
        self.number = first[0]
        signals.settimeout(UNWIND_S)
        with suppress(TimeoutError):
            if not signals.recv(1):
                return
        report = threading.Thread(target=self._report, daemon=True)
        report.start()
        report.join(REPORT_S)
        if not self.ended.is_set():
            end_process(self.error)

    def _report(self) -> None:
        """Tells Prefect that the flow run and its task runs are over."""
        if self.flow_run is None:
            return
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
        from prefect.client.schemas.objects import State
        from prefect.states import Crashed

        state: State = Crashed(message=str(self.error))
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(self.flow_run.id, state, force=True)
            runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[self.flow_run.id])))
            for run in runs:
                if run.state is not None and not run.state.is_final():
                    client.set_task_run_state(run.id, state, force=True)


def _hide_unwind(unraisable: Any) -> None:
    """Report nothing where the signal arrived in a finalizer, which cannot raise: the watching thread then ends the process."""
    if unraisable.exc_type is not _Unwind:
        sys.__unraisablehook__(unraisable)


@contextmanager
def interruptible(way_out: Callable[[], str]) -> Iterator[Interruption]:
    """Raises Interrupted where a signal ended the body; a body that does not end takes the process with it.

    way_out: how to resume, asked when the signal has come.
    """
    interruption = Interruption(way_out)
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    handlers = {number: signal.signal(number, interruption.unwind) for number in SIGNALS}
    before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    report, sys.unraisablehook = sys.unraisablehook, _hide_unwind
    watcher = threading.Thread(target=interruption.watch, args=(signals,), daemon=True)
    watcher.start()
    try:
        yield interruption
    except BaseException:
        if interruption.number is None:
            raise
        raise interruption.error from None  # whatever the signal led to
    finally:
        interruption.ended.set()
        signal.set_wakeup_fd(before)
        sys.unraisablehook = report
        for number, handler in handlers.items():
            signal.signal(number, handler)
        wakeup.close()
        watcher.join()
        signals.close()


def end_process(error: Interrupted) -> None:
    """Ends the process with the error's line as the last one: what libraries do at exit waits for servers and prints."""
    reset = SHOW_CURSOR if sys.stderr.isatty() else ""
    os.write(2, f"{reset}{error}\n".encode())
    os._exit(error.exit_code)
