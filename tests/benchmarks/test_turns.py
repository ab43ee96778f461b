"""Benchmark contestants take turns: one runs a window of steps while the others wait."""

import threading
import time
from multiprocessing import Pipe

import pytest

from benchmarks.turns import Turns, run_window, take_turns


def test_each_contestant_runs_alone_and_is_timed_by_its_slowest_rank() -> None:
    executed: list[tuple[str, int]] = []
    pipes, threads = {}, []
    for name, pauses in (("ours", [0.0, 0.05]), ("theirs", [0.0, 0.0])):
        ends = [Pipe() for _ in pauses]
        pipes[name] = [parent_end for parent_end, _ in ends]
        for (_, rank_end), pause in zip(ends, pauses, strict=True):

            def rank(turns: Turns, name: str, pause: float) -> None:
                for batch in turns.pace(range(100)):
                    executed.append((name, batch))
                    time.sleep(pause)

            threads.append(threading.Thread(target=rank, args=(Turns(rank_end, window_steps=2, num_windows=3), name, pause)))
            threads[-1].start()
    run_window(pipes["ours"])
    seconds = take_turns(pipes, rounds=2)
    run_window(pipes["theirs"])
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    blocks = [executed[start : start + 4] for start in range(0, len(executed), 4)]
    assert [{name for name, _ in block} for block in blocks] == [
        {"ours"},
        {"ours"},
        {"theirs"},
        {"ours"},
        {"theirs"},
        {"theirs"},
    ]
    assert sorted(batch for name, batch in executed if name == "ours") == sorted([*range(6), *range(6)])
    assert {name: len(windows) for name, windows in seconds.items()} == {"ours": 2, "theirs": 2}
    assert all(window >= 2 * 0.05 for window in seconds["ours"])


def test_a_rank_that_ends_early_raises_an_error() -> None:
    parent_end, rank_end = Pipe()
    rank_end.close()
    with pytest.raises((EOFError, BrokenPipeError)):
        run_window([parent_end])
