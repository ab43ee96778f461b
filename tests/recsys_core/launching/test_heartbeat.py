"""Heartbeats of a training, and the timeout of each activity."""

from pathlib import Path

from recsys_core.launching.heartbeat import MIN_TIMEOUT_S, UNMEASURED_TIMEOUT_S, HeartbeatFile, HeartbeatWriter


def test_the_timeout_of_an_activity_is_ten_times_its_longest_duration_and_at_least_a_minute(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "heartbeat", is_main=True)
    heartbeat_file = HeartbeatFile(writer.path, start_timeout_s=1, timeout_s=None)
    assert heartbeat_file.current_timeout_s() == UNMEASURED_TIMEOUT_S
    writer.begin("steps")
    assert heartbeat_file.current_timeout_s() == UNMEASURED_TIMEOUT_S
    for seconds in (30.0, 1.0):
        writer.record("validation", seconds)
    writer.record("steps", 1.0)
    writer.begin("steps")
    assert heartbeat_file.current_timeout_s() == MIN_TIMEOUT_S
    writer.begin("validation")
    assert heartbeat_file.current_timeout_s() == 10 * 30
    writer.begin("checkpoint")
    assert heartbeat_file.current_timeout_s() == UNMEASURED_TIMEOUT_S


def test_a_setting_overrides_the_measured_timeout_and_a_touched_file_has_the_timeout_of_unmeasured_work(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    path.touch()
    assert HeartbeatFile(path, start_timeout_s=1, timeout_s=None).current_timeout_s() == UNMEASURED_TIMEOUT_S
    HeartbeatWriter(path, is_main=True).begin("steps")
    assert HeartbeatFile(path, start_timeout_s=1, timeout_s=5).current_timeout_s() == 5


def test_only_rank_0_writes_the_heartbeat_file(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path / "heartbeat", is_main=False).begin("steps")
    assert list(tmp_path.iterdir()) == []
