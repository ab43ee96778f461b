"""Retrieval losses over a batch and its shared candidates.

Shapes: B queries, K = B + N candidates (row b's positive is candidate b; N extra items follow), O output width.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus


def log_expected_count(item_probability_K: Tensor, *, batch_size: int, uniform_negatives: int, items: int) -> Tensor:
    """log of how often each candidate is expected among the K: B draws by popularity and N uniform ones.

    This is the log Q of the logQ correction (Yi et al., "Sampling-bias-corrected neural modeling", RecSys 2019) for the
    mixture of Yang et al., "Mixed negative sampling" (WWW 2020). Subtracting it lowers the logit of a popular candidate.

    Args:
        item_probability_K: share of each candidate in the training events.

    >>> q = log_expected_count(torch.tensor([0.5, 0.25]), batch_size=8, uniform_negatives=0, items=10)
    >>> q.exp().tolist()
    [4.0, 2.0]
    """
    return torch.log(batch_size * item_probability_K + uniform_negatives / items)


def sampled_softmax(
    query_BO: Tensor,
    candidate_KO: Tensor,
    *,
    item_row_K: Tensor,
    log_q_K: Tensor | None,
    temperature: float,
    mask_accidental_hits: bool,
    weight_B: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of each query's own positive among the shared candidates (in-batch softmax).

    log_q_K: log expected counts of the candidates, or None for no correction. weight_B: how much each query counts in the
    mean; None: all the same. Returns a scalar.
    """
    logits_BK = query_BO @ candidate_KO.T / temperature
    if log_q_K is not None:
        logits_BK = logits_BK - log_q_K
    positive_B = torch.arange(len(query_BO), device=query_BO.device)
    if mask_accidental_hits:
        hit_BK = item_row_K[: len(query_BO), None] == item_row_K[None, :]
        hit_BK[positive_B, positive_B] = False
        logits_BK = logits_BK.masked_fill(hit_BK, float("-inf"))
    return weighted_mean(cross_entropy(logits_BK, positive_B, reduction="none"), weight_B)


def weighted_mean(value_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Mean of `value_B`, weighted where weights are given; 0 where all of them are 0.

    >>> weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0])).item()
    2.0
    """
    if weight_B is None:
        return value_B.mean()
    return (value_B * weight_B).sum() / weight_B.sum().clamp(min=torch.finfo(weight_B.dtype).tiny)


def sampled_bce(
    query_BO: Tensor, candidate_KO: Tensor, *, item_row_K: Tensor, temperature: float, weight_B: Tensor | None = None
) -> Tensor:
    """Binary cross-entropy of the positives (label 1) and of the N sampled items (label 0), each half of the loss.

    A sampled item equal to the row's positive is left out. weight_B: how much each query counts in both halves; None: all the
    same. Returns a scalar.

    >>> one = torch.ones(1, 1)
    >>> loss = sampled_bce(one, torch.tensor([[0.0], [0.0]]), item_row_K=torch.tensor([0, 1]), temperature=1.0)
    >>> round(loss.item(), 4)  # log 2, twice
    1.3863
    """
    batch_size = len(query_BO)
    positive_B = (query_BO * candidate_KO[:batch_size]).sum(dim=1) / temperature
    negative_BN = query_BO @ candidate_KO[batch_size:].T / temperature
    valid_BN = item_row_K[:batch_size, None] != item_row_K[None, batch_size:]
    counts_BN = valid_BN if weight_B is None else valid_BN * weight_B[:, None]
    least = 1 if weight_B is None else torch.finfo(weight_B.dtype).tiny
    negative = (softplus(negative_BN) * counts_BN).sum() / counts_BN.sum().clamp(min=least)
    return weighted_mean(softplus(-positive_B), weight_B) + negative
