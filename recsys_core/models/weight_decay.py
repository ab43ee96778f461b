"""The L2 penalty on the rows of a table that a step looks up, the same for any number of ranks.

Shapes: n rows that a rank looks up, D their width, M the most that a rank may look up, W ranks.
"""

import torch
from torch import Tensor, distributed


def row_penalty(value_nD: Tensor, row_n: Tensor, *, most: int) -> Tensor:
    """Half the squares of the rows, scaled so that its mean over the ranks counts each distinct row of the step once.

    A row that several ranks look up would otherwise count several times, and all rows would count less with each rank, since
    gradients are averaged over the ranks. Collective where there are several ranks: they exchange the numbers of the rows.

    Args:
        value_nD: the rows' values, in the order of `row_n`.
        row_n: which rows of the table; the same one may occur several times.
        most: M, equal on every rank and at least n: what `row_n` is padded to, so that no rank waits for the others' n.

    >>> row_penalty(torch.tensor([[2.0], [3.0], [3.0]]), torch.tensor([7, 5, 5]), most=3).item()
    6.5
    """
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    all_rows = row_n
    if ranks > 1:
        padded_M = row_n.new_full((most,), -1)
        padded_M[: len(row_n)] = row_n
        all_rows = row_n.new_empty(ranks * most)
        distributed.all_gather_single(all_rows, padded_M)
    sorted_rows = all_rows.sort().values
    count_n = torch.searchsorted(sorted_rows, row_n, right=True) - torch.searchsorted(sorted_rows, row_n)
    return (value_nD.square().sum(dim=1) * (ranks / 2 / count_n)).sum()
