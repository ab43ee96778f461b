"""Sampling of negatives: popularity-based probabilities, expected counts for the logQ correction, seen items."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.errors import InputError


def log_expected_count(positive_share_C: Tensor, negative_share_C: Tensor, *, num_positives: int, num_negatives: int) -> Tensor:
    """Return the log of the expected number of each candidate's occurrences among in-batch positives and drawn negatives.

    This is the log Q of the logQ correction (Yi et al., "Sampling-bias-corrected neural modeling for large corpus item
    recommendations", RecSys 2019). The mixture of both kinds of negatives is from Yang et al., "Mixed negative sampling" (WWW
    2020).

    Args:
        positive_share_C: probability of each candidate in one in-batch draw: its share of the training events.
        negative_share_C: probability of each candidate in one draw of negatives, see `negative_share`.
        num_positives, num_negatives: number of draws over all ranks whose candidates are gathered.

    Returns:
        Finite values [C]. A candidate that neither draw can produce counts as the smallest normal float32, about e^-87.

    >>> share, drawn_share = torch.tensor([0.5, 0.25]), torch.tensor([0.5, 0.5])
    >>> log_q = log_expected_count(share, drawn_share, num_positives=8, num_negatives=4)
    >>> [round(count, 4) for count in log_q.exp().tolist()]
    [6.0, 4.0]
    """
    expected_count_C = num_positives * positive_share_C.float() + num_negatives * negative_share_C.float()
    return expected_count_C.clamp(min=torch.finfo(torch.float32).tiny).log()


def negative_share(item_count_I: NDArray[np.integer[Any]], alpha: float) -> NDArray[np.float64]:
    """Return the probability of each item in one draw of negatives: proportional to its number of events^alpha.

    An item without a training event is never drawn: as a negative it would only be pushed away from all queries. With alpha 0,
    the other items are equally likely. With alpha 1, the probability is proportional to popularity. Mikolov et al. use 0.75
    ("Distributed representations", NeurIPS 2013).

    Args:
        item_count_I: number of training events of each item.

    Raises:
        InputError: no item has an event.

    >>> negative_share(np.array([16, 0, 1]), 0.75).round(3).tolist()  # 8 : 0 : 1
    [0.889, 0.0, 0.111]
    >>> negative_share(np.array([16, 0, 1]), 0).tolist()
    [0.5, 0.0, 0.5]
    """
    has_event_I = item_count_I > 0
    if not has_event_I.any():
        raise InputError(
            f"0 of {len(item_count_I)} items have a training event, but negatives are drawn from the items that have one; "
            "give the training part of the log at least one event"
        )
    share_I = np.zeros(len(item_count_I), dtype=np.float64)
    # Dividing by the largest count before the power prevents an overflow for a large alpha.
    share_I[has_event_I] = (item_count_I[has_event_I] / item_count_I.max()) ** alpha
    share_I /= share_I.sum()
    return share_I


def seen_pairs(history_row_H: Tensor, history_offset: Tensor, candidate_row_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (query, candidate) pairs where the candidate is in the query's history.

    Each history entry is looked up by binary search among the sorted candidates. A comparison of all pairs would need a tensor
    of C * H values. The function synchronises with the accelerator once, to read the number of pairs.

    Args:
        history_row_H: item row of each history entry.
        history_offset: int64 [B + 1], the bounds of each history.
        candidate_row_C: item row of each candidate, of the same integer type; an item may occur several times.

    Returns:
        Two int64 tensors with the query index and the candidate index of each pair, in the order of the histories. An item
        that is twice in a history yields each pair twice.

    >>> seen_pairs(torch.tensor([7, 5, 9]), torch.tensor([0, 2, 3]), torch.tensor([5, 9, 5]))
    (tensor([0, 0, 1]), tensor([0, 2, 1]))
    """
    device = history_row_H.device
    sorted_row_C, sorted_to_candidate_C = candidate_row_C.sort(stable=True)
    first_match_H = torch.searchsorted(sorted_row_C, history_row_H)
    num_matches_H = torch.searchsorted(sorted_row_C, history_row_H, right=True) - first_match_H
    num_queries = len(history_offset) - 1
    query_H = torch.arange(num_queries, device=device).repeat_interleave(history_offset.diff(), output_size=len(history_row_H))
    # One element per pair: the index of the history entry, and the candidate's position among the sorted candidates.
    entry_index = torch.arange(len(history_row_H), device=device).repeat_interleave(num_matches_H)
    num_pairs_before_H = num_matches_H.cumsum(dim=0) - num_matches_H
    sorted_position = (first_match_H - num_pairs_before_H)[entry_index] + torch.arange(len(entry_index), device=device)
    return query_H[entry_index], sorted_to_candidate_C[sorted_position]
