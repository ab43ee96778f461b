"""The training objective: sampled negatives, candidates of all ranks, masks, logQ correction, and the configured loss.

Shapes: B queries, C candidates, N candidates that are columns of the score matrix, K known negatives of a query, L known
negatives of all queries, V distinct items, I items, D width of a vector, H entries of all histories (of one padded history in
arrays with B).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from recsys_core.dataset.batch import Batch
from recsys_core.errors import InputError
from recsys_core.models.ensemble import split_members
from recsys_core.models.loss.catalogue import weighted_log_partition
from recsys_core.models.loss.collectives import gather_candidates, gather_without_gradient
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.loss.losses import (
    KnownNegativeScores,
    bce_loss,
    bpr_loss,
    cosine_contrastive_loss,
    distillation_loss,
    softmax_loss,
    weighted_mean,
)
from recsys_core.models.spec import ModelSpec


@dataclass(frozen=True)
class ScoreColumns:
    """The N candidates whose scores are the columns of the score matrix.

    Attributes:
        vector_ND: candidate vectors.
        item_row_N: item rows.
        positive_column_B: column of each query's own positive; None if the positives are not columns.
        num_positives: number of columns that are positives of a query, on this rank or another rank.
        num_negatives: number of columns that are sampled negatives.
    """

    vector_ND: Tensor
    item_row_N: Tensor
    positive_column_B: Tensor | None
    num_positives: int
    num_negatives: int


class Objective(nn.Module):
    """The loss of a batch, with the temperature and the shares of the items for the logQ correction.

    Args:
        item_count_I: number of training events per item, for the logQ correction.
        group: process group of the ranks that train together; None for a single process.
    """

    def __init__(
        self, spec: ModelSpec, *, loss: LossConfig, item_count_I: NDArray[np.int64], group: ProcessGroup | None
    ) -> None:
        super().__init__()
        self.config = loss
        self.group = group
        self.min_norm, self.history_length, self.tower_dim = spec.row_norm, spec.history_length, spec.config.tower_dim
        self.num_members = spec.config.num_members
        log_temperature = torch.tensor(math.log(spec.config.start_temperature))
        self.log_temperature = nn.Parameter(log_temperature) if spec.config.learn_temperature else None
        self.fixed_temperature = spec.config.start_temperature
        self.largest_share_size = -(-int(np.count_nonzero(item_count_I)) // (1 if group is None else group.size()))
        self.positive_share_I: Tensor
        self.negative_share_I: Tensor
        if loss.kind != "softmax" or loss.logq_correction == "none" or loss.negatives == "all":
            return
        positive_share_I = item_count_I / max(item_count_I.sum(), 1)
        negative_share_I = np.zeros(len(item_count_I))
        if loss.num_negatives:
            negative_share_I = negative_share(item_count_I, loss.negative_sampling_alpha)
        self.register_buffer("positive_share_I", torch.from_numpy(positive_share_I).float(), persistent=False)
        self.register_buffer("negative_share_I", torch.from_numpy(negative_share_I).float(), persistent=False)

    @property
    def temperature(self) -> Tensor | float:
        """The temperature: logits are scores / temperature."""
        return self.fixed_temperature if self.log_temperature is None else self.log_temperature.exp()

    def forward(self, query_BD: Tensor, candidate_CD: Tensor, *, batch: Batch, teacher_CD: Tensor | None) -> Tensor:
        """Return the scalar loss: the sum of the losses of the members.

        Args:
            query_BD: query vectors.
            candidate_CD: vectors of the rank's candidates: the B positives, then the sampled negatives, then
                `explicit_negatives` known negatives of each query. With negatives `all`, the rank's share of the catalogue
                takes the place of the sampled negatives.
            teacher_CD: pretrained vectors of the candidates, zeros for a candidate without a vector; None without distillation.
        """
        members = zip(*(split_members(vector, self.num_members) for vector in (query_BD, candidate_CD)), strict=True)
        losses = [self._member_loss(query, candidate, batch=batch, teacher_CD=teacher_CD) for query, candidate in members]
        return torch.stack(losses).sum()

    def _member_loss(self, query_BD: Tensor, candidate_CD: Tensor, *, batch: Batch, teacher_CD: Tensor | None) -> Tensor:
        loss = self._retrieval_loss(query_BD, candidate_CD, batch=batch)
        distillation = self.config.distillation
        if distillation is None or teacher_CD is None:
            return loss
        num_shared_candidates = self._num_shared_candidates(batch)
        return (
            loss
            + distillation.weight
            * distillation_loss(
                candidate_CD[:num_shared_candidates, : self.tower_dim],  # without the popularity term
                teacher_CD=teacher_CD[:num_shared_candidates],
                item_C=batch.candidate_index_C[:num_shared_candidates],
                num_queries=batch.batch_size,
                temperature=distillation.temperature,
                min_norm=self.min_norm,
            )
        )

    def _catalogue_loss(self, query_BD: Tensor, candidate_CD: Tensor, *, batch: Batch) -> Tensor:
        """Return the cross-entropy of the positives among all items of the catalogue.

        With the logit p of the positive, the logits s_j of all items and the exponent e, the loss of a query is
        -log(exp(p) / (sum_j exp(s_j))^e) (Wu et al., "BSL", ICDE 2024).
        """
        num_queries = batch.batch_size
        weight_B = torch.ones_like(query_BD[:, 0]) if batch.loss_weight is None else batch.loss_weight
        weight_B = weight_B / num_queries
        query_BD = query_BD / self.temperature
        positive_BD, catalogue_ND = candidate_CD[:num_queries], candidate_CD[num_queries:]
        score_dtype = functional.linear(query_BD[:1], catalogue_ND[:1]).dtype
        positive_B = _positive_scores(query_BD, positive_BD, dtype=score_dtype).float()
        hidden_pairs = self._seen_share_pairs(batch) if self.config.mask_negatives == "seen" else None
        log_partition = weighted_log_partition(
            query_BD,
            catalogue_ND,
            weight_B=weight_B,
            hidden_pairs=hidden_pairs,
            largest_share_size=self.largest_share_size,
            group=self.group,
        )
        return self.config.negatives_exponent * log_partition - (weight_B * positive_B).sum()

    def _seen_share_pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the index pairs (query, item) for which the query's history contains the item. Every rank calls this function.

        The queries are those of all ranks, and the items are this rank's share of the catalogue. The positive of a query is not
        paired with the query, even if it is also in the history.
        """
        item_row_C = batch.item_row_V[batch.candidate_index_C]
        num_queries, length_B, device = batch.batch_size, batch.history_offset.diff(), item_row_C.device
        column = torch.arange(self.history_length, device=device)
        # The ranks exchange tensors of equal shapes. Row -1 is no item.
        is_entry_BH = column < length_B[:, None]
        entry_row_BH = item_row_C.new_full((num_queries, self.history_length), -1)
        entry_row_BH[is_entry_BH] = batch.item_row_V[batch.history_index_H]
        entry_row_BH.masked_fill_(entry_row_BH == item_row_C[:num_queries, None], -1)
        entry_row_H = gather_without_gradient(entry_row_BH, group=self.group).flatten()
        num_all_queries = len(entry_row_H) // max(1, self.history_length)
        offset = torch.arange(num_all_queries + 1, device=device) * self.history_length
        return seen_pairs(entry_row_H, offset, item_row_C[num_queries:])

    def _retrieval_loss(self, query_BD: Tensor, candidate_CD: Tensor, *, batch: Batch) -> Tensor:
        if self.config.negatives == "all":
            return self._catalogue_loss(query_BD, candidate_CD, batch=batch)
        item_row_C = batch.item_row_V[batch.candidate_index_C]
        item_row_B, num_shared_candidates = item_row_C[: batch.batch_size], self._num_shared_candidates(batch)
        known_negative_scores = self._known_negative_scores(
            query_BD, candidate_CD[num_shared_candidates:], item_row_C[num_shared_candidates:], item_row_B=item_row_B
        )
        columns = self._score_columns(
            candidate_CD[:num_shared_candidates], item_row_C[:num_shared_candidates], batch_size=batch.batch_size
        )
        negative_score_BN = functional.linear(query_BD, columns.vector_ND)
        positive_score_B = _positive_scores(query_BD, candidate_CD[: batch.batch_size], dtype=negative_score_BN.dtype)
        scores, is_masked_BN = (positive_score_B, negative_score_BN), self._negative_mask(columns, item_row_B, batch=batch)
        config, temperature = self.config, self.temperature
        if config.kind == "cosine_contrastive":
            loss_B = cosine_contrastive_loss(
                *scores,
                is_masked_BN=is_masked_BN,
                margin=config.margin,
                negative_weight=config.negative_weight,
                known_negatives=known_negative_scores,
            )
        elif config.kind == "softmax":
            log_q_B, log_q_N = self._log_q(columns, item_row_B)
            loss_B = softmax_loss(
                *scores,
                is_masked_BN=is_masked_BN,
                temperature=temperature,
                log_q_B=log_q_B,
                log_q_N=log_q_N,
                known_negatives=known_negative_scores,
            )
        else:
            loss_function = bce_loss if config.kind == "bce" else bpr_loss
            loss_B = loss_function(
                *scores, is_masked_BN=is_masked_BN, temperature=temperature, known_negatives=known_negative_scores
            )
        return weighted_mean(loss_B, batch.loss_weight)

    def _num_shared_candidates(self, batch: Batch) -> int:
        """Return the number of candidates that all queries share: all candidates except the known negatives."""
        return len(batch.candidate_index_C) - batch.batch_size * self.config.explicit_negatives

    def _known_negative_scores(
        self, query_BD: Tensor, known_LD: Tensor, item_row_L: Tensor, *, item_row_B: Tensor
    ) -> KnownNegativeScores | None:
        """Return the scores of each query with its known negatives; None without known negatives.

        An entry with the query's positive is padding and does not count.
        """
        if self.config.explicit_negatives == 0:
            return None
        num_queries, dim = query_BD.shape
        score_BK = torch.bmm(known_LD.reshape(num_queries, -1, dim), query_BD[:, :, None])[:, :, 0]
        is_padding_BK = item_row_L.view(num_queries, -1) == item_row_B[:, None]
        return KnownNegativeScores(score_BK, is_padding_BK, self.config.explicit_negative_weight)

    def _score_columns(self, candidate_CD: Tensor, item_row_C: Tensor, *, batch_size: int) -> ScoreColumns:
        num_candidates = len(item_row_C)
        if not self.config.uses_in_batch_negatives:
            num_negatives = num_candidates - batch_size
            return ScoreColumns(candidate_CD[batch_size:], item_row_C[batch_size:], None, 0, num_negatives)
        positive_column_B = torch.arange(batch_size, device=item_row_C.device)
        world_size = 1
        if self.config.cross_rank_negatives and self.group is not None and self.group.size() > 1:
            world_size = self.group.size()
            positive_column_B = positive_column_B + self.group.rank() * num_candidates
            candidate_CD, item_row_C = gather_candidates(candidate_CD, item_row_C, group=self.group)
        num_positives = world_size * batch_size
        return ScoreColumns(candidate_CD, item_row_C, positive_column_B, num_positives, len(item_row_C) - num_positives)

    def _negative_mask(self, columns: ScoreColumns, item_row_B: Tensor, *, batch: Batch) -> Tensor | None:
        """Return bool [B, N], True for each candidate that must not count as a negative of the query; None if all count."""
        if self.config.mask_negatives == "none":
            if columns.positive_column_B is None:
                return None
            device = columns.item_row_N.device
            is_masked_BN = torch.zeros(len(item_row_B), len(columns.item_row_N), dtype=torch.bool, device=device)
            is_masked_BN.scatter_(1, columns.positive_column_B[:, None], True)
            return is_masked_BN
        is_masked_BN = item_row_B[:, None] == columns.item_row_N[None, :]
        if self.config.mask_negatives == "seen":
            history_row_H = batch.item_row_V[batch.history_index_H]
            query_index, column_index = seen_pairs(history_row_H, batch.history_offset, columns.item_row_N)
            is_masked_BN[query_index, column_index] = True
        return is_masked_BN

    def _log_q(self, columns: ScoreColumns, item_row_B: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the log expected counts of the positives [B] and of the columns [N]; None where there is no correction."""
        if self.config.logq_correction == "none":
            return None, None
        # If all other columns with the positive's item are masked, the item occurs exactly once, and needs no correction.
        is_positive_corrected = self.config.mask_negatives == "none"
        log_q_B = self._log_expected_count(item_row_B, columns) if is_positive_corrected else None
        return log_q_B, self._log_expected_count(columns.item_row_N, columns)

    def _log_expected_count(self, item_row_N: Tensor, columns: ScoreColumns) -> Tensor:
        return log_expected_count(
            self.positive_share_I[item_row_N],
            self.negative_share_I[item_row_N],
            num_positives=columns.num_positives,
            num_negatives=columns.num_negatives,
        )


def _positive_scores(query_BD: Tensor, positive_BD: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the score of each query with its own positive, rounded like a matrix product in `dtype`.

    Without the rounding, the positive and the same item among the negatives would have different scores.
    """
    query_BD, positive_BD = query_BD.to(dtype).float(), positive_BD.to(dtype).float()
    return (query_BD * positive_BD).sum(dim=1).to(dtype)


def log_expected_count(positive_share_C: Tensor, negative_share_C: Tensor, *, num_positives: int, num_negatives: int) -> Tensor:
    """Return the log of the expected number of each candidate's occurrences among in-batch positives and sampled negatives.

    This is the log Q of the logQ correction (docs/models.md), which is subtracted from the logits of the candidates.

    Args:
        positive_share_C: probability of each candidate in one in-batch draw: its share of the training events.
        negative_share_C: probability of each candidate in one draw of negatives, see `negative_share`.
        num_positives, num_negatives: number of draws of each kind, on all ranks whose candidates are gathered.

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

    An item without a training event is never sampled: as a negative it would only be pushed away from all queries.

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
            f"0 of {len(item_count_I)} items have a training event, but negatives are sampled from the items that have one; "
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
