"""SIGINT and SIGTERM during a run: the run ends, its processes end, and the last line shows the command that resumes the run.

The signal handler raises an exception in the main thread, and Prefect and the stages handle it like Ctrl-C. Native code (a
matrix product, a query, an index) delays the exception. If the main thread has not ended after UNWIND_S, a second thread
reports the end of the run to Prefect and ends the process. Processes that the run started end with it (`die_with_parent`).
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from recsys_core.errors import NightjarError
from recsys_core.termination import SIGNAL_RECEIVED

SIGNALS = (signal.SIGINT, signal.SIGTERM)
UNWIND_S = 4.0
"""Time for the main thread to end. UNWIND_S + REPORT_S is less than 10 s, the time within which the process must end."""
REPORT_S = 5.0
"""Time for the report to Prefect."""
SHOW_CURSOR = "\x1b[?25h"


class Interrupted(NightjarError):
    """A signal ended the run. As in a shell, the exit code is 128 plus the number of the signal."""

    def __init__(self, signal_number: int, *, how_to_resume: str) -> None:
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}; {how_to_resume}")
        self.exit_code = 128 + signal_number


class _Unwind(KeyboardInterrupt):
    """Raised in the main thread by the signal. Prefect and libraries handle it as Ctrl-C."""


class Interruption:
    """State that the signal handler and the watching thread share: the number of the signal, and the current flow run."""

    def __init__(self, how_to_resume: Callable[[], str]) -> None:
        self._how_to_resume = how_to_resume
        self._is_unwinding = False
        self._signal_number: int | None = None
        self._flow_run: Any = None
        self._has_body_ended = threading.Event()

    def set_flow_run(self, flow: Any, flow_run: Any, state: Any) -> None:
        """Store the flow run; Prefect calls this hook when the flow starts."""
        self._flow_run = flow_run

    @property
    def error(self) -> Interrupted | None:
        """The error with the message for the user; None before the first signal."""
        if self._signal_number is None:
            return None
        return Interrupted(self._signal_number, how_to_resume=self._how_to_resume())

    def unwind(self, signal_number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise _Unwind in the main thread at the first signal, and ignore later signals."""
        if not self._is_unwinding:
            self._signal_number, self._is_unwinding = signal_number, True
            raise _Unwind

    def watch(self, signal_socket: socket.socket) -> None:
        """End the process UNWIND_S after the first signal, or at the second signal, if the main thread has not ended.

        Args:
            signal_socket: receives one byte per signal, and is closed after the run.
        """
        while (signal_byte := signal_socket.recv(1)) and signal_byte[0] not in SIGNALS:
            pass
        if not signal_byte:
            return
        self._signal_number = signal_byte[0]
        SIGNAL_RECEIVED.set()
        signal_socket.settimeout(UNWIND_S)
        with suppress(TimeoutError):
            if not signal_socket.recv(1):
                return
        report_thread = threading.Thread(target=self.end_flow_run, daemon=True)
        report_thread.start()
        report_thread.join(REPORT_S)
        if self.error is not None and not self._has_body_ended.is_set():
            end_process(self.error)

    def end_flow_run(self) -> None:
        """Set the flow run and its unfinished task runs to Crashed in Prefect, if there was a signal."""
        if self._signal_number is not None and self._flow_run is not None:
            from flows.prefect_runs import end_as_crashed  # a flow has started, so Prefect is imported

            end_as_crashed(self._flow_run.id, message=str(self.error))

    def end(self) -> None:
        """Record that the body has ended, so that `watch` does not end the process."""
        self._has_body_ended.set()


def _hide_signal(unraisable: Any) -> None:
    """Hide Python's message about an exception in a finalizer if a signal raised it: _Unwind or Prefect's TerminationSignal.

    A finalizer cannot raise. The main thread therefore continues until the next stage starts (`raise_interrupts`), or until
    the watching thread ends the process.
    """
    if issubclass(unraisable.exc_type, Exception):
        sys.__unraisablehook__(unraisable)


@contextmanager
def interruptible(how_to_resume: Callable[[], str]) -> Iterator[Interruption]:
    """Raise Interrupted if a signal ended the body. If the body does not end in time, the process is ended.

    Args:
        how_to_resume: returns the advice for the user; called after the signal.
    """
    interruption = Interruption(how_to_resume)
    signal_socket, wakeup_socket = socket.socketpair()
    wakeup_socket.setblocking(False)
    watcher = threading.Thread(target=interruption.watch, args=(signal_socket,), daemon=True)
    with ExitStack() as cleanup_stack:  # the callbacks run in reverse order
        cleanup_stack.callback(SIGNAL_RECEIVED.clear)
        cleanup_stack.callback(signal_socket.close)
        watcher.start()
        cleanup_stack.callback(watcher.join)
        cleanup_stack.callback(wakeup_socket.close)  # ends the watching thread
        for signal_number in SIGNALS:
            cleanup_stack.callback(signal.signal, signal_number, signal.signal(signal_number, interruption.unwind))
        cleanup_stack.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
        sys.unraisablehook = _hide_signal
        cleanup_stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(wakeup_socket.fileno(), warn_on_full_buffer=False))
        cleanup_stack.callback(interruption.end)
        try:
            yield interruption
        except BaseException:
            if interruption.error is None:
                raise
            raise interruption.error from None  # the signal may have caused any error


def end_process(error: Interrupted) -> None:
    """Print the error as the last line and end the process without the exit handlers of libraries, which wait and print."""
    cursor_reset = SHOW_CURSOR if sys.stderr.isatty() else ""
    os.write(2, f"{cursor_reset}{error}\n".encode())
    os._exit(error.exit_code)
