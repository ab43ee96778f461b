"""SIGINT and SIGTERM during a run: the run ends, its processes end, and the last line shows the command that resumes the run.

The signal handler raises an exception in the main thread, and Prefect and the stages handle it like Ctrl-C. Native code (a
matrix product, a query, an index) delays the exception. If the main thread has not ended after UNWIND_S, a second thread
reports the end of the run to Prefect and ends the process. Processes that the run started end with it
(recsys_core.parent_process).
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
"""Time for the main thread to end. The process must end within 10 s, so UNWIND_S and REPORT_S together are less."""
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


class InterruptionState:
    """State that the signal handler and the watching thread share: the number of the signal, and the current flow run."""

    def __init__(self, how_to_resume: Callable[[], str]) -> None:
        self._how_to_resume = how_to_resume
        self._is_unwinding = False
        self.signal_number: int | None = None
        self.flow_run: Any = None
        self.has_body_ended = threading.Event()

    def set_flow_run(self, flow: Any, flow_run: Any, state: Any) -> None:
        """Store the flow run; Prefect calls this hook when the flow starts."""
        self.flow_run = flow_run

    @property
    def error(self) -> Interrupted:
        """The error with the message for the user."""
        assert self.signal_number is not None
        return Interrupted(self.signal_number, how_to_resume=self._how_to_resume())

    def unwind(self, signal_number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise _Unwind in the main thread at the first signal, and ignore later signals."""
        if not self._is_unwinding:
            self.signal_number, self._is_unwinding = signal_number, True
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
        self.signal_number = signal_byte[0]
        signal_socket.settimeout(UNWIND_S)
        with suppress(TimeoutError):
            if not signal_socket.recv(1):
                return
        report_thread = threading.Thread(target=self._report, daemon=True)
        report_thread.start()
        report_thread.join(REPORT_S)
        if not self.has_body_ended.is_set():
            end_process(self.error)

    def _report(self) -> None:
        """Set the flow run and its unfinished task runs to Crashed in Prefect."""
        if self.flow_run is None:
            return
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
        from prefect.client.schemas.objects import State
        from prefect.states import Crashed

        crashed_state: State = Crashed(message=str(self.error))
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(self.flow_run.id, crashed_state, force=True)
            task_runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[self.flow_run.id])))
            for task_run in task_runs:
                if task_run.state is not None and not task_run.state.is_final():
                    client.set_task_run_state(task_run.id, crashed_state, force=True)


def _hide_unwind(unraisable: Any) -> None:
    """Hide the message that Python prints about an _Unwind in a finalizer.

    A finalizer cannot raise, so the main thread continues, and the watching thread ends the process.
    """
    if unraisable.exc_type is not _Unwind:
        sys.__unraisablehook__(unraisable)


@contextmanager
def interruptible(how_to_resume: Callable[[], str]) -> Iterator[InterruptionState]:
    """Raise Interrupted if a signal ended the body. If the body does not end in time, the process is ended.

    Args:
        how_to_resume: returns the advice for the user; called after the signal.
    """
    interruption = InterruptionState(how_to_resume)
    signal_socket, wakeup_socket = socket.socketpair()
    wakeup_socket.setblocking(False)
    previous_handlers = {signal_number: signal.signal(signal_number, interruption.unwind) for signal_number in SIGNALS}
    previous_wakeup_fd = signal.set_wakeup_fd(wakeup_socket.fileno(), warn_on_full_buffer=False)
    previous_unraisable_hook, sys.unraisablehook = sys.unraisablehook, _hide_unwind
    watcher = threading.Thread(target=interruption.watch, args=(signal_socket,), daemon=True)
    watcher.start()
    try:
        yield interruption
    except BaseException:
        if interruption.signal_number is None:
            raise
        raise interruption.error from None  # the signal may have caused any error
    finally:
        interruption.has_body_ended.set()
        signal.set_wakeup_fd(previous_wakeup_fd)
        sys.unraisablehook = previous_unraisable_hook
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)
        wakeup_socket.close()
        watcher.join()
        signal_socket.close()


def end_process(error: Interrupted) -> None:
    """Print the error as the last line and end the process without the exit handlers of libraries, which wait and print."""
    cursor_reset = SHOW_CURSOR if sys.stderr.isatty() else ""
    os.write(2, f"{cursor_reset}{error}\n".encode())
    os._exit(error.exit_code)
