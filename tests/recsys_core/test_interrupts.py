"""Interrupts of a stage: signals during a query, and signals whose exception a library hides."""

import os
import signal
import threading

import duckdb
import pytest

from recsys_core.interrupts import SIGNAL_RECEIVED, raise_interrupts


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
