"""The process group of a job: this rank, its device, and how it joins the other ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist

from recsys_core.launching.messages import STORE_VARIABLE

COLLECTIVE_TIMEOUT_S = 3600.0
"""Longer than usual values of training.heartbeat_timeout_s, so that the launching process detects a hang first."""


@dataclass(frozen=True)
class Process:
    """This process: its rank, the number of ranks, and the device it trains on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0. It writes the files that the ranks do not write separately."""
        return self.rank == 0


@contextmanager
def join_process_group(*, device_type: str) -> Iterator[Process]:
    """Join the group that torchrun's environment variables describe: NCCL and gloo on GPUs, gloo on CPUs."""
    backend, timeout = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    if STORE_VARIABLE in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ[STORE_VARIABLE], world_size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    yield Process(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)
    # This call is not in a `finally` block. After an exception, the other ranks would fail on the closed connection before this
    # rank has reported its own error.
    dist.destroy_process_group()
