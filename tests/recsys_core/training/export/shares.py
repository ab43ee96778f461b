"""A rank's share of given item vectors."""

import torch

from recsys_core.launching.rank import Process
from recsys_core.training.export.item_columns import EncodedRows


def share_of(item_vector_ID: torch.Tensor, process: Process) -> EncodedRows:
    share = EncodedRows(len(item_vector_ID), dim=item_vector_ID.shape[1], process=process)
    share.add(share.rows.start, 0, item_vector_ID[share.rows])
    return share
