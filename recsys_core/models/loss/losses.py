"""Retrieval losses (softmax, BCE, BPR, cosine contrastive), the distillation loss, and the L2 penalty on embeddings.

A retrieval loss takes the score of each query with its positive, and the scores of each query with N negatives that all queries
share. It returns the mean of the queries' losses, each multiplied by its weight in `weight_B`. If all ranks have equally many
queries, the mean of the ranks' losses is the mean over all queries.

`is_masked_BN` marks columns that must not count as negatives of a query: the query's own positive, another occurrence of the
same item, or an item of the query's history. A query without a negative has a finite loss and a finite gradient. Losses are
computed in float32 even if autocast made the scores bf16.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import kl_div, log_softmax, softplus

from recsys_core.models.loss.collectives import gather_rows
from recsys_core.models.normalisation import unit_vectors

# Used in place of -inf. If all logits of a row are -inf, the gradient is NaN. If all logits are this value, it is 0.
_MASKED_LOGIT = torch.finfo(torch.float32).min


def softmax_loss(
    positive_score_B: Tensor,
    negative_score_BN: Tensor,
    *,
    is_masked_BN: Tensor | None,
    temperature: Tensor | float,
    log_q_B: Tensor | None,
    log_q_N: Tensor | None,
    weight_B: Tensor | None,
) -> Tensor:
    """Return the sampled softmax loss: cross-entropy of the positive among itself and the negatives.

    Args:
        positive_score_B: score of each query with its positive.
        negative_score_BN: score of each query with each negative.
        is_masked_BN: True if the candidate must not count as a negative of the query; None: all count.
        temperature: logits are scores / temperature; may be a learned parameter.
        log_q_B: log of the expected number of columns with the positive's item. It is subtracted from the positive's logit.
            None: nothing is subtracted.
        log_q_N: log of the expected number of columns with each negative's item. It is subtracted from the negative's logit.
            This is the logQ correction, which lowers the logit of a popular item (Yi et al., "Sampling-bias-corrected neural
            modeling for large corpus item recommendations", RecSys 2019). None: no correction.
        weight_B: factor on the loss of each query. The mean over all training events is 1. None: every factor is 1.

    Pass `log_q_B` if the positive's item may be in several columns. Pass None if the other columns of the item are masked: the
    positive then occurs exactly once, and a correction of its logit would be a bias (Khrylchenko et al., "Correcting the LogQ
    correction", RecSys 2025).

    >>> arguments = {"positive_score_B": torch.zeros(1), "negative_score_BN": torch.zeros(1, 1)}
    >>> arguments |= {"is_masked_BN": None, "weight_B": None}
    >>> loss = softmax_loss(**arguments, temperature=1.0, log_q_B=None, log_q_N=None)
    >>> round(loss.item(), 4)  # two equal logits: log 2
    0.6931
    >>> loss = softmax_loss(**arguments, temperature=1.0, log_q_B=None, log_q_N=torch.tensor([3.0]).log())
    >>> round(loss.item(), 4)  # a negative expected three times counts a third: log(1 + 1/3)
    0.2877
    """
    # Work in place on one copy, because a [B, N] tensor is the largest tensor of a step.
    negative_logit_BN = negative_score_BN.float() / temperature
    if log_q_N is not None:
        negative_logit_BN -= log_q_N
    if is_masked_BN is not None:
        negative_logit_BN.masked_fill_(is_masked_BN, _MASKED_LOGIT)
    positive_logit_B = positive_score_B.float() / temperature
    if log_q_B is not None:
        positive_logit_B = positive_logit_B - log_q_B
    # -log(e^p / (e^p + sum e^n)) = log(1 + e^(log sum e^n - p))
    return weighted_mean(softplus(negative_logit_BN.logsumexp(dim=1) - positive_logit_B), weight_B)


def bce_loss(
    positive_score_B: Tensor,
    negative_score_BN: Tensor,
    *,
    is_masked_BN: Tensor | None,
    temperature: Tensor | float,
    weight_B: Tensor | None,
) -> Tensor:
    """Return the binary cross-entropy of the positive (label 1) plus the mean over the negatives (label 0).

    Arguments as in `softmax_loss`. A query without a negative has only the first term.

    >>> scores = torch.zeros(1), torch.tensor([[0.0, 9.0]])
    >>> loss = bce_loss(*scores, is_masked_BN=torch.tensor([[False, True]]), temperature=1.0, weight_B=None)
    >>> round(loss.item(), 4)  # 2 log 2
    1.3863
    """
    mean_negative_loss_B = _mean_over_negatives(softplus(negative_score_BN.float() / temperature), is_masked_BN)
    return weighted_mean(softplus(-positive_score_B.float() / temperature) + mean_negative_loss_B, weight_B)


def bpr_loss(
    positive_score_B: Tensor,
    negative_score_BN: Tensor,
    *,
    is_masked_BN: Tensor | None,
    temperature: Tensor | float,
    weight_B: Tensor | None,
) -> Tensor:
    """Return -log sigmoid(positive - negative), mean over the negatives (Rendle et al., "BPR", UAI 2009).

    Arguments as in `softmax_loss`. A query without a negative has the loss 0.

    >>> scores = torch.tensor([0.3]), torch.tensor([[0.3, 0.3 - 3.0**0.5, -9.0]])
    >>> loss = bpr_loss(*scores, is_masked_BN=torch.tensor([[False, True, True]]), temperature=0.1, weight_B=None)
    >>> round(loss.item(), 4)  # equal scores: log 2
    0.6931
    >>> scores = torch.tensor([0.0]), torch.tensor([[3.0]]).log()
    >>> round(bpr_loss(*scores, is_masked_BN=None, temperature=1.0, weight_B=None).item(), 4)  # sigmoid = 1/4: log 4
    1.3863
    """
    difference_BN = (positive_score_B.float()[:, None] - negative_score_BN.float()) / temperature
    return weighted_mean(_mean_over_negatives(softplus(-difference_BN), is_masked_BN), weight_B)


def cosine_contrastive_loss(
    positive_score_B: Tensor,
    negative_score_BN: Tensor,
    *,
    is_masked_BN: Tensor | None,
    margin: float,
    negative_weight: float,
    weight_B: Tensor | None,
) -> Tensor:
    """Return (1 - positive) + negative_weight * mean over the negatives of max(0, negative - margin).

    This is the loss of SimpleX (Mao et al., CIKM 2021); scores are cosines. Most negatives fall below the margin during
    training and have no gradient, so that the model learns from the few hard ones.

    Args:
        margin: cosine below which a negative adds nothing to the loss.
        negative_weight: weight of the mean over the negatives.

    Other arguments as in `softmax_loss`. A query without a negative has only the first term.

    >>> scores = torch.tensor([0.75]), torch.tensor([[1.0, 0.25, 1.0]])
    >>> masked = torch.tensor([[False, False, True]])
    >>> cosine_contrastive_loss(*scores, is_masked_BN=masked, margin=0.5, negative_weight=2.0, weight_B=None).item()
    0.75
    """
    excess_BN = (negative_score_BN.float() - margin).relu()
    return weighted_mean(
        1 - positive_score_B.float() + negative_weight * _mean_over_negatives(excess_BN, is_masked_BN), weight_B
    )


def distillation_loss(
    student_BD: Tensor,
    student_CD: Tensor,
    *,
    teacher_BD: Tensor,
    teacher_CD: Tensor,
    has_teacher_B: Tensor,
    has_teacher_C: Tensor,
    same_item_BC: Tensor | None,
    temperature: float,
    min_norm: float,
) -> Tensor:
    """Return the KL divergence between the teacher's and the student's softmax over the similarities of B items to C items.

    The loss compares similarities, not vectors, so that student and teacher may have different widths (Park et al., "Relational
    knowledge distillation", CVPR 2019). It compares softened probabilities (Hinton et al., "Distilling the knowledge in a
    neural network", 2015, without the factor temperature^2). It is 0 if both agree. The teacher gets no gradient.

    Args:
        student_BD, student_CD: trained vectors of the items; only their direction counts.
        teacher_BD, teacher_CD: pretrained vectors of the same items; any finite values for an item without a vector.
        has_teacher_B, has_teacher_C: False if the item has no pretrained vector; the loss ignores its row or column.
        same_item_BC: True if row and column are the same item; the loss ignores such a pair. None: no such pair.
        temperature: similarities are cosines / temperature, for student and teacher.
        min_norm: length below which a vector's gradient is limited, see `unit_vectors`.

    >>> student, teacher = torch.eye(2), torch.tensor([[5.0, 0.0, 0.0], [0.0, 7.0, 0.0]])
    >>> has_teacher = torch.tensor([True, True])
    >>> compare = {"teacher_CD": teacher, "has_teacher_B": has_teacher, "has_teacher_C": has_teacher}
    >>> compare |= {"same_item_BC": None, "temperature": 1.0, "min_norm": 0.1}
    >>> distillation_loss(student, student, teacher_BD=teacher, **compare).item()
    0.0
    >>> e = 2.718281828  # the teacher's rows are (e, 1) and (1, e) over (e + 1); swap them
    >>> loss = distillation_loss(student, student, teacher_BD=teacher.flip(0), **compare)
    >>> round(loss.item(), 4) == round((e - 1) / (e + 1), 4)
    True
    """
    is_ignored_BC = ~has_teacher_C[None, :].expand(len(student_BD), -1)
    if same_item_BC is not None:
        is_ignored_BC = is_ignored_BC | same_item_BC
    # Use float32: a cosine in bf16 has an error of up to 0.002. With a temperature of 0.05, that changes a probability by 4 %.
    with torch.autocast(student_BD.device.type, enabled=False):
        with torch.no_grad():
            teacher_log_probability_BC = _log_similarity(
                teacher_BD, teacher_CD, is_ignored_BC, temperature=temperature, min_norm=min_norm
            )
        student_log_probability_BC = _log_similarity(
            student_BD, student_CD, is_ignored_BC, temperature=temperature, min_norm=min_norm
        )
        divergence_B = kl_div(student_log_probability_BC, teacher_log_probability_BC, reduction="none", log_target=True).sum(
            dim=1
        )
    has_loss_B = has_teacher_B & ~is_ignored_BC.all(dim=1)
    return divergence_B.masked_fill(~has_loss_B, 0).mean()


def l2_penalty(value_VD: Tensor, row_V: Tensor, *, max_rows: int, group: ProcessGroup | None) -> Tensor:
    """Return half the squared norm of the rows that a step looks up, scaled for training on several ranks.

    The mean of the results of all ranks counts each row once, even if several ranks look it up. The function is a collective:
    the ranks of `group` exchange their row numbers.

    Args:
        value_VD: values of the rows.
        row_V: row numbers in the table; a row may occur several times.
        max_rows: length to which `row_V` is padded for the exchange; equal on every rank, at least len(row_V).
        group: process group of the ranks; None for a single process.

    >>> l2_penalty(torch.tensor([[2.0], [3.0], [3.0]]), torch.tensor([7, 5, 5]), max_rows=3, group=None).item()
    6.5
    """
    world_size = 1 if group is None else group.size()
    all_rows = row_V
    if world_size > 1:
        padded_rows = row_V.new_full((max_rows,), -1)
        padded_rows[: len(row_V)] = row_V
        all_rows = gather_rows(padded_rows, group=group)
    sorted_rows = all_rows.sort().values
    count_V = torch.searchsorted(sorted_rows, row_V, right=True) - torch.searchsorted(sorted_rows, row_V)
    return (value_VD.square().sum(dim=1) * (world_size / 2 / count_V)).sum()


def weighted_mean(value_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return the mean of value * weight. The divisor is B, not the sum of the weights. weight_B: None means weight 1.

    >>> weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0])).item()
    3.0
    """
    return value_B.mean() if weight_B is None else (value_B * weight_B).mean()


def _mean_over_negatives(value_BN: Tensor, is_masked_BN: Tensor | None) -> Tensor:
    """Return the mean of each row over the unmasked columns; 0 for a row without unmasked columns."""
    num_columns = value_BN.shape[1]
    if is_masked_BN is None:
        return value_BN.sum(dim=1) / max(num_columns, 1)
    return value_BN.masked_fill(is_masked_BN, 0).sum(dim=1) / (num_columns - is_masked_BN.sum(dim=1)).clamp(min=1)


def _log_similarity(
    vector_BD: Tensor, candidate_CD: Tensor, is_ignored_BC: Tensor, *, temperature: float, min_norm: float
) -> Tensor:
    """Return the log softmax over the columns of cosine / temperature, without the ignored pairs."""
    unit_BD, unit_CD = (unit_vectors(vectors.float(), min_norm=min_norm) for vectors in (vector_BD, candidate_CD))
    return log_softmax((unit_BD @ unit_CD.T / temperature).masked_fill(is_ignored_BC, _MASKED_LOGIT), dim=1)
