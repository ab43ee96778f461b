"""A function run on real gloo ranks."""

import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from recsys_core.launching.rank import Process

# The fork server imports TorchRec once. Each rank is a fork of this server, so it is ready in milliseconds.
FORK_SERVER_CONTEXT = multiprocessing.get_context("forkserver")
FORK_SERVER_CONTEXT.set_forkserver_preload(["tests.rank_imports"])


def run_ranks(
    function: Callable[..., None],
    *,
    world_size: int,
    arguments: tuple[Any, ...] = (),
    timeout_s: float = 120.0,
    killed_rank: int | None = None,
) -> None:
    """Call function(rank, *arguments) on each of `world_size` gloo ranks; raise AssertionError if a rank fails.

    killed_rank: a rank that must end by SIGKILL; the other ranks must end too, with any exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        store_path = Path(folder) / "store"
        processes = [
            FORK_SERVER_CONTEXT.Process(target=_run_rank, args=(function, rank, world_size, store_path, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
        exit_code_by_rank = {rank: process.exitcode for rank, process in enumerate(processes)}
        for process in processes:
            process.kill()
        explanation = f"exit codes by rank: {exit_code_by_rank} (None: still running after {timeout_s:g} s)"
        if killed_rank is None:
            assert set(exit_code_by_rank.values()) == {0}, explanation
        else:
            assert exit_code_by_rank[killed_rank] == -signal.SIGKILL, explanation
            assert None not in exit_code_by_rank.values(), explanation


def cpu_process(rank: int) -> Process:
    """Return the description of a CPU rank in the default process group."""
    return Process(rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu"))


def _run_rank(function: Callable[..., None], rank: int, world_size: int, store_path: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=world_size)
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
