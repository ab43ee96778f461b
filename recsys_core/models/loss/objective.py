"""The training objective: candidates of all ranks, masked negatives, logQ correction, and the configured loss."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from recsys_core.dataset.batch import Batch
from recsys_core.models.loss.collectives import gather_candidates
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.loss.losses import (
    bce_loss,
    bpr_loss,
    cosine_contrastive_loss,
    distillation_loss,
    softmax_loss,
    weighted_mean,
)
from recsys_core.models.loss.sampling import log_expected_count, negative_share, seen_pairs
from recsys_core.models.spec import ModelSpec


@dataclass(frozen=True)
class ScoreColumns:
    """The N candidates whose scores are the columns of the score matrix.

    Attributes:
        vector_ND: candidate vectors.
        item_row_N: item rows.
        positive_column_B: column of each query's own positive; None if the positives are not columns.
        num_positives: number of columns that are positives of a query, on this rank or another rank.
        num_negatives: number of columns that are drawn negatives.
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
        self.min_norm = spec.row_norm
        log_temperature = torch.tensor(math.log(spec.config.temperature))
        self.log_temperature = nn.Parameter(log_temperature) if spec.config.learn_temperature else None
        self.fixed_temperature = spec.config.temperature
        self.positive_share_I: Tensor
        self.negative_share_I: Tensor
        if loss.kind != "softmax" or loss.logq_correction == "none":
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
        """Return the scalar loss.

        Args:
            query_BD: query vectors.
            candidate_CD: vectors of the rank's own candidates: the B positives, then the drawn negatives.
            teacher_CD: pretrained vectors of the candidates, zeros for a candidate without a vector; None without distillation.
        """
        loss = self._retrieval_loss(query_BD, candidate_CD, batch=batch)
        distillation = self.config.distillation
        if distillation is None or teacher_CD is None:
            return loss
        return loss + distillation.weight * distillation_loss(
            candidate_CD,
            teacher_CD=teacher_CD,
            item_C=batch.candidate_index_C,
            num_queries=batch.batch_size,
            temperature=distillation.temperature,
            min_norm=self.min_norm,
        )

    def _retrieval_loss(self, query_BD: Tensor, candidate_CD: Tensor, *, batch: Batch) -> Tensor:
        item_row_C = batch.item_row_V[batch.candidate_index_C]
        item_row_B = item_row_C[: batch.batch_size]
        columns = self._score_columns(candidate_CD, item_row_C, batch_size=batch.batch_size)
        negative_score_BN = functional.linear(query_BD, columns.vector_ND)
        positive_score_B = _positive_scores(query_BD, candidate_CD[: batch.batch_size], precision=negative_score_BN.dtype)
        scores, is_masked_BN = (positive_score_B, negative_score_BN), self._negative_mask(columns, item_row_B, batch=batch)
        config, temperature = self.config, self.temperature
        if config.kind == "cosine_contrastive":
            loss_B = cosine_contrastive_loss(
                *scores, is_masked_BN=is_masked_BN, margin=config.margin, negative_weight=config.negative_weight
            )
        elif config.kind == "softmax":
            log_q_B, log_q_N = self._log_q(columns, item_row_B)
            loss_B = softmax_loss(*scores, is_masked_BN=is_masked_BN, temperature=temperature, log_q_B=log_q_B, log_q_N=log_q_N)
        else:
            loss_function = bce_loss if config.kind == "bce" else bpr_loss
            loss_B = loss_function(*scores, is_masked_BN=is_masked_BN, temperature=temperature)
        return weighted_mean(loss_B, batch.loss_weight)

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
        """Return True for each candidate that must not count as a negative of the query."""
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
        """Return the log expected counts of the positives and of the columns."""
        if self.config.logq_correction == "none":
            return None, None
        log_q_N, log_q_B = self._log_expected_count(columns.item_row_N, columns), None
        # If other columns of the positive's item are masked, the positive occurs exactly once, see `softmax_loss`.
        if self.config.mask_negatives == "none":
            log_q_B = self._log_expected_count(item_row_B, columns)
        return log_q_B, log_q_N

    def _log_expected_count(self, item_row_N: Tensor, columns: ScoreColumns) -> Tensor:
        return log_expected_count(
            self.positive_share_I[item_row_N],
            self.negative_share_I[item_row_N],
            num_positives=columns.num_positives,
            num_negatives=columns.num_negatives,
        )


def _positive_scores(query_BD: Tensor, positive_BD: Tensor, *, precision: torch.dtype) -> Tensor:
    """Return the score of each query with its own positive, rounded like a matrix product in `precision`.

    Without the rounding, the positive and the same item among the negatives would have different scores.
    """
    query_BD, positive_BD = query_BD.to(precision).float(), positive_BD.to(precision).float()
    return (query_BD * positive_BD).sum(dim=1).to(precision)
