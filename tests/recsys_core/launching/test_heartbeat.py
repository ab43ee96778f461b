"""Heartbeats of a training, and the timeout of each activity."""

import errno
import itertools
import threading
from pathlib import Path

import pytest

from recsys_core.launching.heartbeat import MIN_TIMEOUT_S, UNMEASURED_TIMEOUT_S, HeartbeatFile, HeartbeatWriter, heartbeat


def test_the_timeout_is_ten_times_the_longest_duration_and_at_least_a_minute(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "heartbeat", is_main=True)
    heartbeat_file = HeartbeatFile(writer.path, start_timeout_s=1, timeout_s=None)
    assert heartbeat_file.current_timeout_s() == UNMEASURED_TIMEOUT_S
    writer.begin("steps")
    assert heartbeat_file.current_timeout_s() == UNMEASURED_TIMEOUT_S
    for duration_s in (30.0, 1.0):
        writer.record("validation", duration_s)
    writer.record("steps", 1.0)
    writer.begin("steps")
    assert heartbeat_file.current_timeout_s() == MIN_TIMEOUT_S
    writer.begin("validation")
    assert heartbeat_file.current_timeout_s() == 10 * 30
    writer.begin("checkpoint")
    assert heartbeat_file.current_timeout_s() == UNMEASURED_TIMEOUT_S


def test_a_setting_overrides_the_measured_timeout(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    path.touch()
    assert HeartbeatFile(path, start_timeout_s=1, timeout_s=None).current_timeout_s() == UNMEASURED_TIMEOUT_S
    HeartbeatWriter(path, is_main=True).begin("steps")
    assert HeartbeatFile(path, start_timeout_s=1, timeout_s=5).current_timeout_s() == 5


def test_only_rank_0_writes_the_heartbeat_file(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path / "heartbeat", is_main=False).begin("steps")
    assert list(tmp_path.iterdir()) == []


def test_heartbeats_continue_after_a_heartbeat_that_could_not_be_written(caplog: pytest.LogCaptureFixture) -> None:
    attempt_counter, has_recovered = itertools.count(), threading.Event()

    def fail_at_first() -> None:
        if next(attempt_counter) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        has_recovered.set()

    with heartbeat(fail_at_first, interval_s=0.01):
        assert has_recovered.wait(60)
    message = "a heartbeat could not be sent and is repeated after 0.01 s: [Errno 28] No space left on device"
    assert caplog.messages == [message] * 2
