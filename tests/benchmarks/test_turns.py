"""Benchmark contestants take turns: one contestant runs a window of steps while the other contestants wait."""

import threading
import time
from multiprocessing import Pipe

import pytest

from benchmarks.turns import Turns, run_window, take_turns


def test_each_contestant_runs_alone_and_is_timed_by_its_slowest_rank() -> None:
    executed: list[tuple[str, int]] = []
    pipes, threads = {}, []
    for name, pauses_s in (("ours", [0.0, 0.05]), ("theirs", [0.0, 0.0])):
        ends = [Pipe() for _ in pauses_s]
        pipes[name] = [parent_end for parent_end, _ in ends]
        for (_, rank_end), pause_s in zip(ends, pauses_s, strict=True):

            def run_rank(turns: Turns, name: str, pause_s: float) -> None:
                for batch in turns.pace(range(100)):
                    executed.append((name, batch))
                    time.sleep(pause_s)

            threads.append(
                threading.Thread(target=run_rank, args=(Turns(rank_end, window_steps=2, num_windows=3), name, pause_s))
            )
            threads[-1].start()
    run_window(pipes["ours"])
    durations_s = take_turns(pipes, rounds=2)
    run_window(pipes["theirs"])
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    windows = [executed[start : start + 4] for start in range(0, len(executed), 4)]  # two ranks execute two batches each
    assert [{name for name, _ in window} for window in windows] == [
        {"ours"},
        {"ours"},
        {"theirs"},
        {"ours"},
        {"theirs"},
        {"theirs"},
    ]
    assert sorted(batch for name, batch in executed if name == "ours") == sorted([*range(6), *range(6)])
    assert {name: len(window_durations_s) for name, window_durations_s in durations_s.items()} == {"ours": 2, "theirs": 2}
    assert all(duration_s >= 2 * 0.05 for duration_s in durations_s["ours"])


def test_a_window_of_a_rank_that_has_ended_is_an_error() -> None:
    parent_end, rank_end = Pipe()
    rank_end.close()
    with pytest.raises((EOFError, BrokenPipeError)):
        run_window([parent_end])
