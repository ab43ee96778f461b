"""Losses of retrieval: each query's own positive against columns that the batch shares, and distillation into the items.

Shapes: B queries, N columns shared by the batch, K candidates, O output width, T width of the teacher's vectors.

Every loss takes scores, not vectors, and gives the mean over the queries, each times its weight where `weight_B` is given. No
sum over a batch divides it, so that the mean over the ranks is the loss of all their queries. `masked_BN` tells the columns
that are no negatives of a query: its own positive, the same item drawn again, an item it has seen. A query without a negative
has a finite loss and a finite gradient. The sums are in float32 also where autocast made the scores bf16.
"""

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, softplus

from recsys_core.models.normalisation import direction

# Stands for -inf: a row of nothing but -inf has no gradient (NaN), a row of nothing but this one has a gradient of 0.
_NEVER = torch.finfo(torch.float32).min


def softmax_loss(
    positive_B: Tensor,
    negative_BN: Tensor,
    *,
    masked_BN: Tensor | None,
    temperature: Tensor | float,
    log_q_B: Tensor | None,
    log_q_N: Tensor | None,
    weight_B: Tensor | None,
) -> Tensor:
    """Sampled softmax: cross-entropy of the positive among itself and the unmasked columns.

    Args:
        positive_B: score of each query with its positive.
        negative_BN: score of each query with each column.
        masked_BN: True where the column is no negative of the query, its own positive's column above all; None: nowhere.
        temperature: logits are scores / temperature; may be learned.
        log_q_B: log of how often the positive is expected among the columns, subtracted from its logit; None: 0.
        log_q_N: the same of each column: the logQ correction (Yi et al., "Sampling-bias-corrected neural modeling for large
            corpus item recommendations", RecSys 2019). Subtracting it lowers the logit of a popular item.
        weight_B: what each query's loss is multiplied by, 1 on average over the log; None: 1.

    `log_q_B` belongs to the positive that may occur among the columns once more. Where such columns are masked it is there
    exactly once, and None is unbiased (Khrylchenko et al., "Correcting the LogQ correction", RecSys 2025).

    >>> score = {"positive_B": torch.zeros(1), "negative_BN": torch.zeros(1, 1), "masked_BN": None, "weight_B": None}
    >>> loss = softmax_loss(**score, temperature=1.0, log_q_B=None, log_q_N=None)
    >>> round(loss.item(), 4)  # one of two: log 2
    0.6931
    >>> loss = softmax_loss(**score, temperature=1.0, log_q_B=None, log_q_N=torch.tensor([3.0]).log())
    >>> round(loss.item(), 4)  # drawn three times as often, each one counts a third: log(1 + 1/3)
    0.2877
    """
    # In place on one fresh matrix: [B, N] is the largest tensor of a step, and its mean needs no column for the positive.
    logits_BN = negative_BN.float() / temperature
    if log_q_N is not None:
        logits_BN -= log_q_N
    if masked_BN is not None:
        logits_BN.masked_fill_(masked_BN, _NEVER)
    logit_B = positive_B.float() / temperature
    if log_q_B is not None:
        logit_B = logit_B - log_q_B
    # -log(e^p / (e^p + sum e^n)) = log(1 + e^(log sum e^n - p))
    return weighted_mean(softplus(logits_BN.logsumexp(dim=1) - logit_B), weight_B)


def bce_loss(
    positive_B: Tensor, negative_BN: Tensor, *, masked_BN: Tensor | None, temperature: Tensor | float, weight_B: Tensor | None
) -> Tensor:
    """Binary cross-entropy: of the positive (label 1) plus the mean over the unmasked columns (label 0), as if as many.

    Arguments as in `softmax_loss`. A query without a negative has the first half alone.

    >>> scores = torch.zeros(1), torch.tensor([[0.0, 9.0]])
    >>> loss = bce_loss(*scores, masked_BN=torch.tensor([[False, True]]), temperature=1.0, weight_B=None)
    >>> round(loss.item(), 4)  # log 2, twice
    1.3863
    """
    negative_B = _mean_over_negatives(softplus(negative_BN.float() / temperature), masked_BN)
    return weighted_mean(softplus(-positive_B.float() / temperature) + negative_B, weight_B)


def bpr_loss(
    positive_B: Tensor, negative_BN: Tensor, *, masked_BN: Tensor | None, temperature: Tensor | float, weight_B: Tensor | None
) -> Tensor:
    """-log sigmoid(positive - negative), mean over the unmasked columns (Rendle et al., "BPR", UAI 2009).

    Arguments as in `softmax_loss`. A query without a negative has the loss 0.

    >>> scores = torch.tensor([0.3]), torch.tensor([[0.3, 0.3 - 3.0**0.5, -9.0]])
    >>> loss = bpr_loss(*scores, masked_BN=torch.tensor([[False, True, True]]), temperature=0.1, weight_B=None)
    >>> round(loss.item(), 4)  # a tie: log 2
    0.6931
    >>> scores = torch.tensor([0.0]), torch.tensor([[3.0]]).log()
    >>> round(bpr_loss(*scores, masked_BN=None, temperature=1.0, weight_B=None).item(), 4)  # sigmoid = 1/4: log 4
    1.3863
    """
    lead_BN = (positive_B.float()[:, None] - negative_BN.float()) / temperature
    return weighted_mean(_mean_over_negatives(softplus(-lead_BN), masked_BN), weight_B)


def cosine_contrastive_loss(
    positive_B: Tensor,
    negative_BN: Tensor,
    *,
    masked_BN: Tensor | None,
    margin: float,
    negative_weight: float,
    weight_B: Tensor | None,
) -> Tensor:
    """(1 - positive) + negative_weight * mean over the unmasked columns of max(0, negative - margin).

    The loss of SimpleX (Mao et al., CIKM 2021), for scores that are cosines. Most negatives end below the margin and have no
    gradient: the few hard ones are what it learns from.

    Args:
        margin: cosine that a negative may have for free.
        negative_weight: what the mean over the negatives counts against the one positive.

    The rest as in `softmax_loss`. A query without a negative has the first term alone.

    >>> scores = torch.tensor([0.75]), torch.tensor([[1.0, 0.25, 1.0]])
    >>> masked = torch.tensor([[False, False, True]])
    >>> cosine_contrastive_loss(*scores, masked_BN=masked, margin=0.5, negative_weight=2.0, weight_B=None).item()
    0.75
    """
    excess_BN = (negative_BN.float() - margin).relu()
    return weighted_mean(1 - positive_B.float() + negative_weight * _mean_over_negatives(excess_BN, masked_BN), weight_B)


def distillation_loss(
    student_BO: Tensor,
    student_KO: Tensor,
    *,
    teacher_BT: Tensor,
    teacher_KT: Tensor,
    known_B: Tensor,
    known_K: Tensor,
    same_BK: Tensor | None,
    temperature: float,
    floor: float,
) -> Tensor:
    """KL divergence between the teacher's and the student's softmax over the similarities of B items to K items.

    Relations are compared, not vectors, so that the two may have different widths (Park et al., "Relational knowledge
    distillation", CVPR 2019) and softened probabilities carry them (Hinton et al., "Distilling the knowledge in a neural
    network", 2015; without its factor temperature^2). 0 when both agree. The teacher gets no gradient.

    Args:
        student_BO, student_KO: vectors that learn; their cosines are compared, whatever their norms.
        teacher_BT, teacher_KT: vectors of the same items that are learned from; any finite values where not known.
        known_B, known_K: False where the teacher has no vector: the item is left out, as a row or as a column.
        same_BK: True where row and column are the same item, a pair that tells nothing; None: nowhere.
        temperature: similarities are cosines / temperature, for both.
        floor: length at which a student's vector counts as short, see `direction`.

    >>> student, teacher = torch.eye(2), torch.tensor([[5.0, 0.0, 0.0], [0.0, 7.0, 0.0]])
    >>> known = torch.tensor([True, True])
    >>> compare = {"teacher_KT": teacher, "known_B": known, "known_K": known, "same_BK": None, "temperature": 1.0, "floor": 0.1}
    >>> distillation_loss(student, student, teacher_BT=teacher, **compare).item()
    0.0
    >>> e = 2.718281828  # the teacher has the rows (e, 1) and (1, e) over (e + 1); the student is told them the wrong way round
    >>> loss = distillation_loss(student, student, teacher_BT=teacher.flip(0), **compare)
    >>> round(loss.item(), 4) == round((e - 1) / (e + 1), 4)
    True
    """
    left_out_BK = ~known_K[None, :].expand(len(student_BO), -1) if same_BK is None else ~known_K[None, :] | same_BK
    # float32 throughout: a cosine in bf16 is off by up to 0.002, which a temperature of 0.05 turns into 4 % of a probability.
    with torch.autocast(student_BO.device.type, enabled=False):
        with torch.no_grad():
            teacher_BK = _log_similarity(teacher_BT, teacher_KT, left_out_BK, temperature=temperature, floor=floor)
        student_BK = _log_similarity(student_BO, student_KO, left_out_BK, temperature=temperature, floor=floor)
        divergence_B = kl_div(student_BK, teacher_BK, reduction="none", log_target=True).sum(dim=1)
    compared_B = known_B & ~left_out_BK.all(dim=1)
    return divergence_B.masked_fill(~compared_B, 0).mean()


def weighted_mean(value_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Mean of `value_B`, each multiplied by its weight where weights are given.

    >>> weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0])).item()
    3.0
    """
    return value_B.mean() if weight_B is None else (value_B * weight_B).mean()


def _mean_over_negatives(value_BN: Tensor, masked_BN: Tensor | None) -> Tensor:
    """Mean of each row over the unmasked columns; 0 where there is none."""
    columns = value_BN.shape[1]
    if masked_BN is None:
        return value_BN.sum(dim=1) / max(columns, 1)
    return value_BN.masked_fill(masked_BN, 0).sum(dim=1) / (columns - masked_BN.sum(dim=1)).clamp(min=1)


def _log_similarity(row_BO: Tensor, column_KO: Tensor, left_out_BK: Tensor, *, temperature: float, floor: float) -> Tensor:
    """log softmax of the cosines / temperature over the columns that are not left out."""
    cosine_BK = direction(row_BO.float(), floor=floor) @ direction(column_KO.float(), floor=floor).T
    return log_softmax((cosine_BK / temperature).masked_fill(left_out_BK, _NEVER), dim=1)
