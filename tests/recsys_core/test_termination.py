"""Processes that end with their parent or with the reader of their output, and stages that end after a signal."""

import os
import signal
import subprocess
import sys
import threading
import time

import duckdb
import psutil
import pytest

from recsys_core.termination import SIGNAL_RECEIVED, parent_environment, raise_interrupts

CHILD_CODE = (
    "from recsys_core.termination import die_with_parent; {delay}; die_with_parent(); "
    "print('alive', flush=True); import time; time.sleep(60)"
)


def start_parent_and_child(delay_statement: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start a parent that starts a child with CHILD_CODE and waits for the child. Return the parent and the child.

    delay_statement: statement that the child executes before `die_with_parent`.
    """
    parent_code = (
        "import os, subprocess, sys; from recsys_core.termination import parent_environment; "
        f"p = subprocess.Popen([sys.executable, '-c', {CHILD_CODE.format(delay=delay_statement)!r}], "
        "env=os.environ | parent_environment()); "
        "print(p.pid, flush=True); p.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


@pytest.mark.parametrize("delay_statement", ["pass", "import time; time.sleep(2)"])
def test_a_child_ends_with_its_parent_even_if_the_parent_is_killed_before_the_call(delay_statement: str) -> None:
    parent, child = start_parent_and_child(delay_statement)
    if delay_statement == "pass":
        assert parent.stdout is not None and parent.stdout.readline() == "alive\n"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, remaining_processes = psutil.wait_procs([child], timeout=10)
    assert not remaining_processes


def test_a_process_without_the_variable_of_its_parent_continues() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in parent_environment()}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD_CODE.format(delay="pass")], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "alive\n"
    time.sleep(0.2)
    assert child.poll() is None
    child.kill()
    child.wait()


@pytest.mark.parametrize("is_called_late", [False, True])
def test_a_child_ends_with_the_reader_of_its_output(is_called_late: bool) -> None:
    child_code = (
        "import sys, time; from recsys_core.termination import die_with_stdout_reader; "
        f"time.sleep({2 if is_called_late else 0}); die_with_stdout_reader(); print('alive', file=sys.stderr, flush=True); "
        "time.sleep(60)"
    )
    parent_code = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-c', {child_code!r}], stdout=subprocess.PIPE, stderr=subprocess.PIPE); "
        f"{'pass' if is_called_late else 'p.stderr.readline()'}; print(p.pid, flush=True); p.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, remaining_processes = psutil.wait_procs([child], timeout=10)
    assert not remaining_processes


def test_a_signal_during_a_query_raises_the_exception_of_its_handler() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGTERM, interrupt)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    endless_query = "SELECT count(*) FROM range(100000000) a, range(1000) b WHERE a.range * b.range % 7 = 3"
    try:
        with pytest.raises(KeyboardInterrupt), raise_interrupts(), duckdb.connect(config={"threads": 1}) as connection:
            timer.start()
            connection.sql(endless_query).fetchall()
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, previous_handler)


def test_an_ordinary_runtime_error_passes_through_raise_interrupts() -> None:
    with pytest.raises(RuntimeError, match=r"^ordinary$"), raise_interrupts():
        raise RuntimeError("ordinary")


def test_no_stage_starts_after_a_signal() -> None:
    SIGNAL_RECEIVED.set()
    try:
        with pytest.raises(KeyboardInterrupt, match="before this stage"), raise_interrupts():
            pytest.fail("the stage has started")
    finally:
        SIGNAL_RECEIVED.clear()
