"""A function run on real gloo ranks."""

import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

# One server imports TorchRec once; each rank is a fork of it, ready in milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.rank_imports"])


def run_ranks(
    function: Callable[..., None],
    *,
    world_size: int,
    arguments: tuple[Any, ...] = (),
    timeout_s: float = 120.0,
    dies: int | None = None,
) -> None:
    """Call function(rank, *arguments) on each of `world_size` gloo ranks; fail with the exit codes if a rank fails.

    dies: a rank that must end by SIGKILL; the other ranks must end too, with any exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        ranks = [
            _CONTEXT.Process(target=_rank, args=(function, rank, world_size, str(store), arguments))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout_s)
        codes = {rank: process.exitcode for rank, process in enumerate(ranks)}
        for process in ranks:
            process.kill()
        if dies is not None:
            assert codes[dies] == -signal.SIGKILL and None not in codes.values(), f"exit codes by rank: {codes}"
            return
        assert set(codes.values()) == {0}, f"exit codes by rank: {codes} (None: still running after {timeout_s:g} s)"


def _rank(function: Callable[..., None], rank: int, world_size: int, store: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
