"""A contestant of the training benchmark at a small size: two real ranks train and report their speed."""

from pathlib import Path

import pytest

from benchmarks import contestants, train


def test_a_contestant_trains_a_small_log_and_reports_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "NUM_ROWS", 100)  # the ranks read the number of rows from the log
    monkeypatch.setattr(contestants, "NUM_EVENTS", 1_000)
    interactions = contestants.write_log(tmp_path)
    assert (interactions.num_users, interactions.num_items) == (100, 100)
    contestant = contestants.Contestant(contestants.OURS, batch_size=32, warm_up_steps=1, window_steps=2, num_windows=2)
    measurement = train.measure(contestant, folder=tmp_path)
    assert measurement["samples_per_s"] > 0
    assert set(measurement["ms_per_step"]) and all(duration_ms >= 0 for duration_ms in measurement["ms_per_step"].values())
    assert not (tmp_path / contestant.name).exists()
