"""Retrieval losses (softmax, BCE, BPR, cosine contrastive) and the distillation loss.

A retrieval loss takes the score of each query with its positive, and the scores of each query with N negatives that all queries
share. It returns the loss of each query, [B]. `weighted_mean` multiplies the losses by the weights of the queries. If all ranks
have equally many queries, the mean of the ranks' losses is the mean over all queries.

`is_masked_BN` marks columns that must not count as negatives of a query: the query's own positive, another occurrence of the
same item, or an item of the query's history; None: all columns count. `known_negatives` has the scores of each query with its
own known negatives (`loss.explicit_negatives`); None: there are no known negatives. A query without a
negative has a finite loss and a finite gradient. Logits are scores / temperature, which may be a learned parameter. Losses are
computed in float32 even if autocast made the scores bf16.

Shapes: B queries, N negatives that all queries share, K known negatives of a query, C candidates, D width of a vector.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, softplus

from recsys_core.models.towers import unit_vectors

# Used in place of -inf. A row with only -inf has the gradient NaN. A row with only this value has the gradient 0.
_MASKED_LOGIT = torch.finfo(torch.float32).min


class KnownNegativeScores(NamedTuple):
    """Scores of each query with its known negatives, [B, K].

    Attributes:
        is_padding_BK: columns that hold no known negative.
        weight: number of sampled negatives for which a known negative counts, see `loss.explicit_negative_weight`.
    """

    score_BK: Tensor
    is_padding_BK: Tensor
    weight: float


def softmax_loss(
    positive_score_B: Tensor,
    negative_score_BN: Tensor,
    *,
    is_masked_BN: Tensor | None,
    temperature: Tensor | float,
    log_q_B: Tensor | None = None,
    log_q_N: Tensor | None = None,
    known_negatives: KnownNegativeScores | None = None,
) -> Tensor:
    """Return the sampled softmax loss: cross-entropy of the positive among the positive and the negatives.

    The sum over the sampled negatives estimates the sum over the catalogue. Each known negative adds one more term,
    multiplied by `weight`. It needs no correction, because it is not sampled.

    Args:
        log_q_B: correction of the positive's logit, see `log_expected_count`. None: no correction, because all other columns
            with the positive's item are masked.
        log_q_N: correction of each negative's logit, see `log_expected_count`; None: no correction.

    >>> scores = torch.zeros(1), torch.zeros(1, 1)
    >>> loss_B = softmax_loss(*scores, is_masked_BN=None, temperature=1.0)
    >>> round(loss_B.item(), 4)  # two equal logits: log 2
    0.6931
    >>> loss_B = softmax_loss(*scores, is_masked_BN=None, temperature=1.0, log_q_N=torch.tensor([3.0]).log())
    >>> round(loss_B.item(), 4)  # a negative expected three times counts a third: log(1 + 1/3)
    0.2877
    >>> known_negatives = KnownNegativeScores(torch.zeros(1, 2), torch.tensor([[False, True]]), weight=2.0)
    >>> loss_B = softmax_loss(*scores, is_masked_BN=None, temperature=1.0, known_negatives=known_negatives)
    >>> round(loss_B.item(), 4)  # log(1 + 1 + 2)
    1.3863
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
    log_sum_B = negative_logit_BN.logsumexp(dim=1)
    if known_negatives is not None:
        known_logit_BK = (known_negatives.score_BK.float() / temperature).masked_fill(
            known_negatives.is_padding_BK, _MASKED_LOGIT
        )
        log_sum_B = log_sum_B.logaddexp(known_logit_BK.logsumexp(dim=1) + math.log(known_negatives.weight))
    # -log(e^p / (e^p + sum e^n)) = log(1 + e^(log sum e^n - p))
    return softplus(log_sum_B - positive_logit_B)


def bce_loss(
    positive_score_B: Tensor,
    negative_score_BN: Tensor,
    *,
    is_masked_BN: Tensor | None,
    temperature: Tensor | float,
    known_negatives: KnownNegativeScores | None = None,
) -> Tensor:
    """Return the binary cross-entropy of the positive (label 1) plus the mean over the negatives (label 0).

    The known negatives have the label 0, too. A query without a negative has only the first term.

    >>> scores = torch.zeros(1), torch.tensor([[0.0, 9.0]])
    >>> loss_B = bce_loss(*scores, is_masked_BN=torch.tensor([[False, True]]), temperature=1.0)
    >>> round(loss_B.item(), 4)  # 2 log 2
    1.3863
    """
    negative_loss_B = _negative_loss(
        lambda score: softplus(score.float() / temperature),
        negative_score_BN,
        is_masked_BN=is_masked_BN,
        known_negatives=known_negatives,
    )
    return softplus(-positive_score_B.float() / temperature) + negative_loss_B


def bpr_loss(
    positive_score_B: Tensor,
    negative_score_BN: Tensor,
    *,
    is_masked_BN: Tensor | None,
    temperature: Tensor | float,
    known_negatives: KnownNegativeScores | None = None,
) -> Tensor:
    """Return -log sigmoid(positive - negative), mean over the negatives (Rendle et al., "BPR", UAI 2009).

    A query without a negative has the loss 0.

    >>> scores = torch.tensor([0.3]), torch.tensor([[0.3, 0.3 - 3.0**0.5, -9.0]])
    >>> loss_B = bpr_loss(*scores, is_masked_BN=torch.tensor([[False, True, True]]), temperature=0.1)
    >>> round(loss_B.item(), 4)  # equal scores: log 2
    0.6931
    >>> scores = torch.tensor([0.0]), torch.tensor([[3.0]]).log()
    >>> round(bpr_loss(*scores, is_masked_BN=None, temperature=1.0).item(), 4)  # sigmoid = 1/4: log 4
    1.3863
    """
    positive_score_B1 = positive_score_B.float()[:, None]
    return _negative_loss(
        lambda score: softplus((score.float() - positive_score_B1) / temperature),
        negative_score_BN,
        is_masked_BN=is_masked_BN,
        known_negatives=known_negatives,
    )


def cosine_contrastive_loss(
    positive_score_B: Tensor,
    negative_score_BN: Tensor,
    *,
    is_masked_BN: Tensor | None,
    margin: float,
    negative_weight: float,
    known_negatives: KnownNegativeScores | None = None,
) -> Tensor:
    """Return (1 - positive) + negative_weight * mean over the negatives of max(0, negative - margin).

    This is the loss of SimpleX (Mao et al., CIKM 2021); scores are cosines. Most negatives fall below the margin during
    training and have no gradient, so that the model learns from the few hard negatives. A query without a negative has only the
    first term.

    >>> scores = torch.tensor([0.75]), torch.tensor([[1.0, 0.25, 1.0]])
    >>> masked = torch.tensor([[False, False, True]])
    >>> cosine_contrastive_loss(*scores, is_masked_BN=masked, margin=0.5, negative_weight=2.0).item()
    0.75
    """
    mean_excess_B = _negative_loss(
        lambda score: (score.float() - margin).relu(),
        negative_score_BN,
        is_masked_BN=is_masked_BN,
        known_negatives=known_negatives,
    )
    return 1 - positive_score_B.float() + negative_weight * mean_excess_B


def distillation_loss(
    student_CD: Tensor, *, teacher_CD: Tensor, item_C: Tensor, num_queries: int, temperature: float, min_norm: float
) -> Tensor:
    """Return the KL divergence between the teacher's and the student's softmax over the similarities of items to C candidates.

    The loss compares similarities, not vectors, so that student and teacher may have different widths (Park et al., "Relational
    knowledge distillation", CVPR 2019). It compares softened probabilities (Hinton et al., "Distilling the knowledge in a
    neural network", 2015, without the factor temperature^2). The loss is 0 if student and teacher agree. The teacher gets no
    gradient.

    Args:
        student_CD: trained vectors of the candidates; only their direction counts.
        teacher_CD: pretrained vectors of the candidates; zeros for a candidate without a vector, which is ignored.
        item_C: item of each candidate. The similarity of an item to itself is ignored.
        num_queries: the first `num_queries` candidates are compared with all C candidates.
        temperature: similarities are cosines / temperature, for student and teacher.
        min_norm: norm below which a vector's gradient is limited, see `unit_vectors`.

    In the example, the similarities of the first item to the second and third are 0 and 1 for the student, but 1 and 0 for the
    teacher. The softmax has the probabilities 1 / (e + 1) and e / (e + 1).

    >>> e, student = 2.718281828, torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> settings = {"item_C": torch.arange(3), "num_queries": 1, "temperature": 1.0, "min_norm": 0.1}
    >>> loss = distillation_loss(student, teacher_CD=student[[0, 2, 1]], **settings)
    >>> round(loss.item(), 4) == round((e - 1) / (e + 1), 4)
    True
    """
    has_teacher_vector_C = teacher_CD.any(dim=1)
    is_ignored_BC = (item_C[:num_queries, None] == item_C[None, :]) | ~has_teacher_vector_C[None, :]

    def log_probabilities(vector_CD: Tensor) -> Tensor:
        """Return the log softmax over the columns of cosine / temperature, without the ignored pairs."""
        unit_BD, unit_CD = (
            unit_vectors(vectors.float(), min_norm=min_norm) for vectors in (vector_CD[:num_queries], vector_CD)
        )
        return log_softmax((unit_BD @ unit_CD.T / temperature).masked_fill(is_ignored_BC, _MASKED_LOGIT), dim=1)

    # Use float32: a cosine in bf16 has an error of up to 0.002. With a temperature of 0.05, that changes a probability by 4 %.
    with torch.autocast(student_CD.device.type, enabled=False):
        with torch.no_grad():
            teacher_BC = log_probabilities(teacher_CD)
        divergence_B = kl_div(log_probabilities(student_CD), teacher_BC, reduction="none", log_target=True).sum(dim=1)
    has_loss_B = has_teacher_vector_C[:num_queries] & ~is_ignored_BC.all(dim=1)
    return divergence_B.masked_fill(~has_loss_B, 0).mean()


def weighted_mean(value_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return the mean of value * weight, divided by B and not by the sum of the weights. weight_B: None for weights of 1.

    >>> weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0])).item()
    3.0
    """
    return value_B.mean() if weight_B is None else (value_B * weight_B).mean()


def _negative_loss(
    loss_of: Callable[[Tensor], Tensor],
    negative_score_BN: Tensor,
    *,
    is_masked_BN: Tensor | None,
    known_negatives: KnownNegativeScores | None,
) -> Tensor:
    """Return the mean of `loss_of` over the negatives of each query; 0 for a query without negatives.

    A known negative counts `known_negatives.weight` times.
    """
    mean_loss_B = _mean_over_negatives(loss_of(negative_score_BN), is_masked_BN)
    if known_negatives is None:
        return mean_loss_B
    known_mean_loss_B = _mean_over_negatives(loss_of(known_negatives.score_BK), known_negatives.is_padding_BK)
    num_negatives_B = negative_score_BN.shape[1] - (0 if is_masked_BN is None else is_masked_BN.sum(dim=1))
    known_weight_B = known_negatives.weight * (~known_negatives.is_padding_BK).sum(dim=1)
    total_weight_B = (num_negatives_B + known_weight_B).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.lerp(mean_loss_B, known_mean_loss_B, known_weight_B / total_weight_B)


def _mean_over_negatives(value_BN: Tensor, is_masked_BN: Tensor | None) -> Tensor:
    """Return the mean of each row over the unmasked columns; 0 for a row without unmasked columns."""
    num_columns = value_BN.shape[1]
    if is_masked_BN is None:
        return value_BN.sum(dim=1) / max(num_columns, 1)
    return value_BN.masked_fill(is_masked_BN, 0).sum(dim=1) / (num_columns - is_masked_BN.sum(dim=1)).clamp(min=1)
