"""Contestants run one at a time, a window each."""

import threading
import time
from multiprocessing import Pipe

import pytest

from benchmarks.turns import Turns, run_window, take_turns


def test_each_runs_its_window_while_the_others_wait_and_the_slowest_rank_counts() -> None:
    ran: list[tuple[str, int]] = []
    pipes, threads = {}, []
    for name, pauses in (("ours", [0.0, 0.05]), ("theirs", [0.0, 0.0])):
        ends = [Pipe() for _ in pauses]
        pipes[name] = [here for here, _ in ends]
        for (_, there), pause in zip(ends, pauses, strict=True):

            def rank(turns: Turns, name: str, pause: float) -> None:
                for batch in turns.paced(range(100)):
                    ran.append((name, batch))
                    time.sleep(pause)

            threads.append(threading.Thread(target=rank, args=(Turns(there, window=2, windows=3), name, pause)))
            threads[-1].start()
    run_window(pipes["ours"])
    seconds = take_turns(pipes, rounds=2)
    run_window(pipes["theirs"])
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    blocks = [ran[start : start + 4] for start in range(0, len(ran), 4)]
    assert [{name for name, _ in block} for block in blocks] == [
        {"ours"},
        {"ours"},
        {"theirs"},
        {"ours"},
        {"theirs"},
        {"theirs"},
    ]
    assert sorted(batch for name, batch in ran if name == "ours") == sorted([*range(6), *range(6)])
    assert {name: len(of_one) for name, of_one in seconds.items()} == {"ours": 2, "theirs": 2}
    assert all(one >= 2 * 0.05 for one in seconds["ours"])


def test_a_rank_that_ends_early_is_told_as_such() -> None:
    here, there = Pipe()
    there.close()
    with pytest.raises((EOFError, BrokenPipeError)):
        run_window([here])
