"""From query and candidate vectors to the loss: which candidates are negatives of whom, and what their scores cost.

Shapes: B queries, K = B + N candidates, M columns that count as negatives, O output width, I items.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.nn import functional

from recsys_core.data.batch import Batch
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.losses import (
    bce_loss,
    bpr_loss,
    cosine_contrastive_loss,
    distillation_loss,
    softmax_loss,
)
from recsys_core.models.sampling import (
    StreamingFrequency,
    gather_candidates,
    gather_rows,
    log_expected_count,
    negative_share,
    seen_columns,
)
from recsys_core.models.spec import ModelSpec

FREQUENCY_RATE = 0.01
"""Weight of one occurrence in the streaming estimate of an item's share."""


@dataclass(frozen=True)
class Columns:
    """The candidates that stand as columns: vectors [M, O], catalogue rows [M], and which column is query b's own positive."""

    vector_MO: Tensor
    row_M: Tensor
    own_B: Tensor | None
    positives: int
    negatives: int


class Objective(nn.Module):
    """Loss and temperature.

    Args:
        item_count_I: training events per item; what the logQ correction and the drawing of negatives go by.
    """

    def __init__(self, spec: ModelSpec, *, loss: LossConfig, item_count_I: NDArray[np.int64]) -> None:
        super().__init__()
        self.loss = loss
        self.floor = spec.row_norm
        temperature = torch.tensor(math.log(spec.config.temperature))
        self.log_temperature = nn.Parameter(temperature) if spec.config.learn_temperature else None
        self.fixed_temperature = spec.config.temperature
        self.positive_share_I: Tensor
        self.negative_share_I: Tensor
        self.steps: Tensor
        if loss.kind == "softmax" and loss.logq_correction != "none":
            share = item_count_I / max(item_count_I.sum(), 1)
            drawn = (
                negative_share(item_count_I, loss.negative_sampling_alpha)
                if loss.num_negatives
                else np.zeros(len(item_count_I))
            )
            for name, value in (("positive_share_I", share), ("negative_share_I", drawn)):
                self.register_buffer(name, torch.from_numpy(value).float(), persistent=False)
        streams = loss.kind == "softmax" and loss.logq_correction == "streaming"
        self.frequency = StreamingFrequency(spec.items, rate=FREQUENCY_RATE) if streams else None
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64)) if streams else None

    @property
    def temperature(self) -> Tensor | float:
        """What scores are divided by."""
        return self.fixed_temperature if self.log_temperature is None else self.log_temperature.exp()

    def forward(self, query_BO: Tensor, candidate_KO: Tensor, *, batch: Batch, teacher_KT: Tensor | None) -> Tensor:
        """Scalar loss. teacher_KT: the pretrained vectors of the candidates, where they are distilled; zeros for none."""
        loss = self._retrieval(query_BO, candidate_KO, batch=batch)
        distillation = self.loss.distillation
        if distillation is None or teacher_KT is None:
            return loss
        known_K, row_K, size = teacher_KT.any(dim=1), batch.candidate_K, batch.batch_size
        kept = distillation_loss(
            candidate_KO[:size],
            candidate_KO,
            teacher_BT=teacher_KT[:size],
            teacher_KT=teacher_KT,
            known_B=known_K[:size],
            known_K=known_K,
            same_BK=row_K[:size, None] == row_K[None, :],
            temperature=distillation.temperature,
            floor=self.floor,
        )
        return loss + distillation.weight * kept

    def _retrieval(self, query_BO: Tensor, candidate_KO: Tensor, *, batch: Batch) -> Tensor:
        row_K = batch.item_row_U[batch.candidate_K]
        size = batch.batch_size
        columns = self._columns(candidate_KO, row_K, size=size)
        negative_BM = functional.linear(query_BO, columns.vector_MO)
        positive_B = _own_scores(query_BO, candidate_KO[:size], precision=negative_BM.dtype)
        masked_BM = self._masked(columns, row_K[:size], batch=batch)
        loss, weight_B, temperature = self.loss, batch.weight, self.temperature
        if loss.kind == "cosine_contrastive":
            return cosine_contrastive_loss(
                positive_B,
                negative_BM,
                masked_BN=masked_BM,
                margin=loss.margin,
                negative_weight=loss.negative_weight,
                weight_B=weight_B,
            )
        if loss.kind != "softmax":
            pairwise = bce_loss if loss.kind == "bce" else bpr_loss
            return pairwise(positive_B, negative_BM, masked_BN=masked_BM, temperature=temperature, weight_B=weight_B)
        log_q_B, log_q_M = self._log_q(columns, row_K[:size])
        return softmax_loss(
            positive_B,
            negative_BM,
            masked_BN=masked_BM,
            temperature=temperature,
            log_q_B=log_q_B,
            log_q_N=log_q_M,
            weight_B=weight_B,
        )

    def _columns(self, candidate_KO: Tensor, row_K: Tensor, *, size: int) -> Columns:
        ranks = distributed.get_world_size() if self.loss.cross_rank_negatives and distributed.is_initialized() else 1
        if not self.loss.uses_in_batch_negatives:
            return Columns(candidate_KO[size:], row_K[size:], None, 0, len(row_K) - size)
        own_B = torch.arange(size, device=row_K.device)
        if ranks > 1:
            own_B = own_B + distributed.get_rank() * len(row_K)
            candidate_KO, row_K = gather_candidates(candidate_KO, row_K)
        return Columns(candidate_KO, row_K, own_B, ranks * size, len(row_K) - ranks * size)

    def _masked(self, columns: Columns, positive_row_B: Tensor, *, batch: Batch) -> Tensor | None:
        if self.loss.mask_negatives == "none":
            if columns.own_B is None:
                return None
            masked_BM = torch.zeros(len(positive_row_B), len(columns.row_M), dtype=torch.bool, device=columns.row_M.device)
            masked_BM.scatter_(1, columns.own_B[:, None], True)
            return masked_BM
        masked_BM = positive_row_B[:, None] == columns.row_M[None, :]
        if self.loss.mask_negatives == "seen":
            query_P, column_P = seen_columns(batch.item_row_U[batch.history_T], batch.history_offset, columns.row_M)
            masked_BM[query_P, column_P] = True
        return masked_BM

    def _all_positives(self, columns: Columns, positive_row_B: Tensor) -> Tensor:
        """The positives of all ranks, in the same order on each: every rank keeps the same estimate."""
        if columns.positives > len(positive_row_B):  # the columns are of all ranks: nothing has to be sent
            ranks = columns.positives // len(positive_row_B)
            return columns.row_M.view(ranks, -1)[:, : len(positive_row_B)].flatten()
        return gather_rows(positive_row_B)

    def _log_q(self, columns: Columns, positive_row_B: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """log expected counts of the positives and of the columns."""
        if self.loss.logq_correction == "none":
            return None, None
        if self.frequency is not None and self.training:
            self.frequency.update(self._all_positives(columns, positive_row_B), self.steps)
            self.steps += 1

        def expected(row_n: Tensor) -> Tensor:
            share_n = self.positive_share_I[row_n] if self.frequency is None else self.frequency.log_share(row_n).exp()
            return log_expected_count(
                share_n, self.negative_share_I[row_n], positives=columns.positives, negatives=columns.negatives
            )

        # Where hits are masked the positive is there exactly once, whatever was drawn: it needs no correction, and one would
        # be wrong (Khrylchenko et al., "Correcting the LogQ correction", RecSys 2025).
        return (expected(positive_row_B) if self.loss.mask_negatives == "none" else None), expected(columns.row_M)


def _own_scores(query_BO: Tensor, positive_BO: Tensor, *, precision: torch.dtype) -> Tensor:
    """Score [B] of each query with its own positive, rounded as a matrix product in `precision` rounds it.

    Where negatives are scored in bf16, a positive in float32 would be above or below the same item among them by the rounding.
    """
    query_BO, positive_BO = query_BO.to(precision).float(), positive_BO.to(precision).float()
    return (query_BO * positive_BO).sum(dim=1).to(precision)
