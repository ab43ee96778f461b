"""Process that reports the end of a killed flow run: `python -m flows.scheduled.crash_report PID FLOW_RUN_ID`.

When Prefect's process worker is stopped, it kills its runs and reports nothing. Without this process, the run would stay
Running in Prefect and hold its slot for five minutes, and Prefect would cancel a new run of the deployment. A Prefect
automation that reacts to missing heartbeats would be slower, because heartbeats are at least 30 s apart. It could also end a
live run after an outage of the server.

If a person cancels the flow run, the worker sends SIGTERM to the flow run, and SIGKILL after 30 s. This process sends SIGKILL
after CANCEL_GRACE_S.

Until the flow run has ended, this process imports only the standard library, because it waits for hours.
"""

import os
import signal
import subprocess
import sys
import threading
from importlib import import_module
from uuid import UUID

from recsys_core.termination import PARENT_VARIABLE, die_with_stdout_reader

FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Environment variable in which Prefect's worker passes the id of the flow run to the process that it starts."""
CRASH_MESSAGE = "the process of this run was killed: its worker was stopped, or the memory of the host was full"
CANCEL_GRACE_S = 5.0
"""Time for a cancelled flow run to end by itself."""


def end_with_worker() -> None:
    """Make this process end when its Prefect worker ends, and start the process that reports the end.

    Do nothing under `nightjar up`, or in a process that no worker has started.
    """
    flow_run_id = os.environ.get(FLOW_RUN_VARIABLE)
    if flow_run_id is None or PARENT_VARIABLE in os.environ:
        return
    _, write_fd = start_reporter(flow_run_id)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)  # the reporter reads a byte for each signal
    die_with_stdout_reader()


def start_reporter(flow_run_id: str) -> "tuple[subprocess.Popen[bytes], int]":
    """Start the process that reports the end of this process.

    Returns:
        The reporter, and the file descriptor of a pipe to the reporter. When this process ends, the kernel closes the pipe, and
        the reporter starts its report.
    """
    read_fd, write_fd = os.pipe()
    reporter = subprocess.Popen(
        [sys.executable, "-m", "flows.scheduled.crash_report", str(os.getpid()), flow_run_id],
        stdin=read_fd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to the process group of the flow run ends only the flow run
    )
    os.close(read_fd)
    return reporter, write_fd


def main() -> None:
    """Wait until the process of the flow run has ended; set the flow run to Crashed if it is still Running in Prefect.

    If the flow run does not end within CANCEL_GRACE_S of its first SIGTERM, send it SIGKILL.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends SIGTERM to all processes of the worker
    pid_text, flow_run_id = sys.argv[1:]
    with open(0, "rb", buffering=0) as pipe:
        while (signal_byte := pipe.read(1)) and signal_byte[0] != signal.SIGTERM:
            pass
        if signal_byte:
            kill_timer = threading.Timer(CANCEL_GRACE_S, os.kill, (int(pid_text), signal.SIGKILL))
            kill_timer.start()
            pipe.readall()
            kill_timer.cancel()
    # The import takes seconds. In this time, a worker that is still alive reports the end itself, with the exit status.
    import_module("flows.prefect_runs").end_as_crashed(UUID(flow_run_id), message=CRASH_MESSAGE, only_running=True)


if __name__ == "__main__":
    main()
