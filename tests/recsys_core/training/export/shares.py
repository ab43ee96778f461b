"""Vectors of gloo ranks."""

import torch
from torch import distributed as dist

from recsys_core.launching.rank import Process
from recsys_core.training.export.item_columns import Share


def process_of(rank: int) -> Process:
    return Process(rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu"))


def share_of(vector_ID: torch.Tensor, process: Process) -> Share:
    share = Share(len(vector_ID), dim=vector_ID.shape[1], process=process)
    share.add(share.rows.start, 0, vector_ID[share.rows])
    return share
