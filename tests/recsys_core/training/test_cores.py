import os
import subprocess
import sys

import pytest

from recsys_core.training.cores import keep_to_own_cores

HERE = sorted(os.sched_getaffinity(0))


def cores_of(rank: int, ranks: int) -> set[int]:
    """What a fresh process keeps."""
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; from recsys_core.training.cores import keep_to_own_cores; "
            f"keep_to_own_cores(rank={rank}, ranks={ranks}); print(*os.sched_getaffinity(0))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return {int(core) for core in told.stdout.split()}


@pytest.mark.skipif(len(HERE) < 2, reason="one core")
def test_ranks_share_the_cores_without_overlap():
    shares = [cores_of(rank, 2) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == len(HERE) // 2
    assert not shares[0] & shares[1] and shares[0] | shares[1] <= set(HERE)


def test_one_rank_and_more_ranks_than_cores_run_where_they_like():
    assert cores_of(0, 1) == cores_of(0, len(HERE) + 1) == set(HERE)


def test_on_many_cores_each_rank_has_neighbouring_ones(monkeypatch):
    kept = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(11)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(cores))
    for rank in range(3):
        keep_to_own_cores(rank=rank, ranks=3)
    assert kept == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
