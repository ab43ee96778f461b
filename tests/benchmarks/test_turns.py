"""Benchmark contestants take turns: one contestant runs a window of steps while the other contestants wait."""

import threading
import time
from multiprocessing import Pipe

import pytest

from benchmarks.turns import Turns, run_window, take_turns


def test_each_contestant_runs_alone_and_is_timed_by_its_slowest_rank() -> None:
    executed_batches: list[tuple[str, int]] = []
    parent_ends_by_name, threads = {}, []
    for contestant, pauses_s in (("ours", [0.0, 0.05]), ("theirs", [0.0, 0.0])):
        pipe_ends = [Pipe() for _ in pauses_s]
        parent_ends_by_name[contestant] = [parent_end for parent_end, _ in pipe_ends]
        for (_, rank_end), pause_s in zip(pipe_ends, pauses_s, strict=True):

            def run_rank(turns: Turns, contestant: str, pause_s: float) -> None:
                for batch in turns.pace(range(100)):
                    executed_batches.append((contestant, batch))
                    time.sleep(pause_s)

            threads.append(
                threading.Thread(target=run_rank, args=(Turns(rank_end, window_steps=2, num_windows=3), contestant, pause_s))
            )
            threads[-1].start()
    run_window(parent_ends_by_name["ours"])
    durations_s_by_name = take_turns(parent_ends_by_name, rounds=2)
    run_window(parent_ends_by_name["theirs"])
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    # In a window, two ranks execute two batches each.
    windows = [executed_batches[start : start + 4] for start in range(0, len(executed_batches), 4)]
    assert [{contestant for contestant, _ in window} for window in windows] == [
        {"ours"},
        {"ours"},
        {"theirs"},
        {"ours"},
        {"theirs"},
        {"theirs"},
    ]
    assert sorted(batch for contestant, batch in executed_batches if contestant == "ours") == sorted([*range(6), *range(6)])
    assert {contestant: len(durations_s) for contestant, durations_s in durations_s_by_name.items()} == {"ours": 2, "theirs": 2}
    assert all(duration_s >= 2 * 0.05 for duration_s in durations_s_by_name["ours"])


def test_a_window_of_a_rank_that_has_ended_is_an_error() -> None:
    parent_end, rank_end = Pipe()
    rank_end.close()
    with pytest.raises((EOFError, BrokenPipeError)):
        run_window([parent_end])
