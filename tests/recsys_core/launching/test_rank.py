from pathlib import Path

from recsys_core.launching.messages import LaunchFolder, RankStarted
from recsys_core.launching.rank import format_stacks


def test_stacks_have_a_line_for_every_rank_even_if_it_did_not_start_or_respond(tmp_path: Path) -> None:
    folder = LaunchFolder(tmp_path)
    for number in range(2):
        folder.write(f"rank-{number}.json", RankStarted(rank=number, node=0, host="alpha", pid=40 + number))
    folder.stack_path(0).write_text(
        'Current thread 0x1 (most recent call first):\n  File "/x/torch/c10d.py", line 7 in all_reduce\n'
    )
    assert format_stacks(folder, world_size=3).splitlines() == [
        "rank 0 (host alpha, process 40): all_reduce (c10d.py:7)",
        "rank 1 (host alpha, process 41): did not respond",
        "rank 2: has not started",
    ]
