"""Process that reports the end of a killed flow run to Prefect: `python -m flows.scheduled.crash_report`.

When Prefect's process worker is stopped, it kills its runs and reports nothing. Without this process, the run would stay
Running in Prefect and hold its slot for five minutes, and Prefect would cancel a new run of the deployment.

If a person cancels the flow run, the worker sends SIGTERM to the flow run. If the flow run does not end then, this process
sends SIGKILL.

This process imports only the standard library, because it waits for hours and should use little memory.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

from recsys_core.parent_process import PARENT_VARIABLE, die_with_reader_of_output

FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Environment variable in which Prefect's worker passes the id of the flow run to the process that it starts."""
CRASH_MESSAGE = "the process of this run was killed: its worker was stopped, or the memory of the host was full"
WAIT_FOR_WORKER_S = 0.5
"""Time before the report. A worker that is still alive reports the end of its run in this time, with the exit status."""
CANCEL_GRACE_S = 5.0
"""Time for a cancelled flow run to end by itself."""
RETRY_INTERVAL_S, GIVE_UP_AFTER_S, REQUEST_TIMEOUT_S = 1.0, 6.0, 3.0


def tie_to_worker() -> None:
    """Make this process end when its Prefect worker ends, and start the process that reports the end.

    Do nothing under `nightjar up`, or in a process that no worker has started.
    """
    flow_run_id = os.environ.get(FLOW_RUN_VARIABLE)
    if flow_run_id is None or PARENT_VARIABLE in os.environ:
        return
    _, pipe_fd = start_reporter(flow_run_id)
    os.set_blocking(pipe_fd, False)
    signal.set_wakeup_fd(pipe_fd, warn_on_full_buffer=False)  # the reporter reads a byte for each signal
    die_with_reader_of_output()


def start_reporter(flow_run_id: str) -> "tuple[subprocess.Popen[bytes], int]":
    """Start the process that reports the end of this process.

    Returns: the reporter, and the file descriptor of a pipe to it. When this process ends, the kernel closes the pipe, and the
    reporter starts its report.
    """
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        api_url, headers = str(client.api_url), dict(client._client.headers) | {"accept-encoding": "identity"}
    read_fd, pipe_fd = os.pipe()
    reporter = subprocess.Popen(
        [sys.executable, "-m", "flows.scheduled.crash_report"],
        stdin=read_fd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to the process group of the flow run ends only the flow run
    )
    os.close(read_fd)
    # The settings are not arguments, because the headers contain a secret and every user can read a command line.
    settings = {"pid": os.getpid(), "api_url": api_url, "headers": headers, "flow_run_id": flow_run_id}
    os.write(pipe_fd, json.dumps(settings).encode() + b"\n")
    return reporter, pipe_fd


def main() -> None:
    """Wait until the process of the flow run has ended; set the flow run to Crashed if it is still Running in Prefect.

    If the flow run does not end within CANCEL_GRACE_S of its first SIGTERM, send it SIGKILL.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends SIGTERM to all processes of the worker
    with open(0, "rb", buffering=0) as pipe:
        settings = json.loads(pipe.readline())
        pid = settings.pop("pid")
        while (signal_byte := pipe.read(1)) and signal_byte[0] != signal.SIGTERM:
            pass
        if signal_byte:
            kill_timer = threading.Timer(CANCEL_GRACE_S, os.kill, (pid, signal.SIGKILL))
            kill_timer.start()
            pipe.readall()
            kill_timer.cancel()
    deadline = time.monotonic() + GIVE_UP_AFTER_S
    time.sleep(WAIT_FOR_WORKER_S)
    while time.monotonic() < deadline:
        try:
            report_crash(**settings)
            return
        except OSError:  # no response; the next run of the deployment sets this flow run to Crashed
            time.sleep(RETRY_INTERVAL_S)


def report_crash(*, api_url: str, headers: dict[str, str], flow_run_id: str) -> None:
    """Set the flow run and its unfinished task runs to Crashed, unless the flow run has ended."""

    def request(path: str, body: Any = None) -> Any:
        body_json = None if body is None else json.dumps(body).encode()
        url = f"{api_url.rstrip('/')}{path}"
        http_request = urllib.request.Request(url, data=body_json, headers=headers | {"Content-Type": "application/json"})  # noqa: S310
        # The URL is the address of the user's Prefect server.
        with urllib.request.urlopen(http_request, timeout=REQUEST_TIMEOUT_S) as response:  # noqa: S310
            return json.load(response)

    if request(f"/flow_runs/{flow_run_id}")["state_type"] != "RUNNING":
        return
    crashed_state = {"state": {"type": "CRASHED", "name": "Crashed", "message": CRASH_MESSAGE}}
    request(f"/flow_runs/{flow_run_id}/set_state", crashed_state)
    unfinished_state_filter = {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}
    task_runs = request(
        "/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}, "task_runs": unfinished_state_filter}
    )
    for task_run in task_runs:
        request(f"/task_runs/{task_run['id']}/set_state", crashed_state)


if __name__ == "__main__":
    main()
