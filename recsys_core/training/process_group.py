"""One rank: who it is and how it meets the others. Read once, passed down."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist

STORE_VARIABLE = "NIGHTJAR_STORE"
"""Environment entry with the file over which the ranks of one host meet; absent where ranks of several hosts meet."""
GROUP_TIMEOUT_S = 3600.0
"""Of one collective. A hang is the launcher's to notice: it watches for silence."""


@dataclass(frozen=True)
class Process:
    """This rank of the group."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0


@contextmanager
def join_process_group(*, device: str) -> Iterator[Process]:
    """Joins the group that torchrun described in the environment: NCCL on GPUs, gloo on CPU."""
    backend, timeout = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timedelta(seconds=GROUP_TIMEOUT_S)
    local = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(local)
    if STORE_VARIABLE in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ[STORE_VARIABLE], world_size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    yield Process(rank=dist.get_rank(), world_size=dist.get_world_size(), device=local)
    # Not after an exception: the other ranks would fail on the closed connection before this one has said why.
    dist.destroy_process_group()
