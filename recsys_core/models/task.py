"""What the train pipeline steps: embeddings, towers and loss in one module.

Shapes: B queries, K = B + N candidates, D embedding width, O output width, I items.
"""

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recsys_core.data.batch import Batch
from recsys_core.models.config import LossConfig, ModelSpec
from recsys_core.models.losses import log_expected_count, sampled_bce, sampled_softmax
from recsys_core.models.two_tower import TwoTower, embedding_configs, pooled_features

EMBEDDINGS_PATH = "embeddings"
"""Where the EmbeddingBagCollection sits in the task: the path a sharding plan names."""


class RetrievalHead(nn.Module):
    """Everything after the lookup. A module of its own because the train pipeline traces whatever encloses the lookup."""

    def __init__(self, spec: ModelSpec, *, loss: LossConfig, item_probability_I: Tensor) -> None:
        super().__init__()
        self.spec = spec
        self.loss = loss
        self.towers = TwoTower(spec)
        self.item_probability_I: Tensor
        self.register_buffer("item_probability_I", item_probability_I, persistent=False)

    def forward(self, pooled: KeyedTensor, batch: Batch) -> Tensor:
        """Pooled features of B + N samples -> scalar loss."""
        features = pooled_features(pooled, batch.sparse)
        query_BO = self.towers.query({name: features[name][: batch.batch_size] for name in self.towers.features})
        candidate_KO = self.towers.candidate(features["item"])
        temperature = self.spec.config.temperature
        if self.loss.kind == "bce":
            return sampled_bce(
                query_BO, candidate_KO, item_row_K=batch.item_rows, temperature=temperature, weight_B=batch.weight
            )
        return sampled_softmax(
            query_BO,
            candidate_KO,
            item_row_K=batch.item_rows,
            log_q_K=self._log_q(batch) if self.loss.logq else None,
            temperature=temperature,
            mask_accidental_hits=self.loss.mask_accidental_hits,
            weight_B=batch.weight,
        )

    def _log_q(self, batch: Batch) -> Tensor:
        return log_expected_count(
            self.item_probability_I[batch.item_rows],
            batch_size=batch.batch_size,
            uniform_negatives=len(batch.item_rows) - batch.batch_size,
            items=self.spec.items,
        )


class RetrievalTask(nn.Module):
    """forward(batch) -> (loss, detached loss), as TrainPipelineSparseDist wants it.

    Args:
        item_probability_I: float32 [items], share of each item in the training events; used by the logQ correction.
    """

    def __init__(self, spec: ModelSpec, *, loss: LossConfig, item_probability_I: Tensor, device: torch.device) -> None:
        super().__init__()
        # On the meta device: only the shards that the plan gives a rank are ever allocated.
        self.embeddings = EmbeddingBagCollection(tables=embedding_configs(spec), device=torch.device("meta"))
        self.head = RetrievalHead(spec, loss=loss, item_probability_I=item_probability_I).to(device)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = self.head(self.embeddings(batch.sparse), batch)
        return loss, loss.detach()

    def encode_queries(self, sparse: KeyedJaggedTensor) -> Tensor:
        """Query vectors [B, O] of a KeyedJaggedTensor that holds the query features of B samples."""
        towers = self.head.towers
        features = pooled_features(self.embeddings(sparse), sparse)
        return towers.query({name: features[name] for name in towers.features})

    def encode_items(self, sparse: KeyedJaggedTensor) -> Tensor:
        """Candidate vectors [K, O] of a KeyedJaggedTensor that holds the `item` feature of K samples."""
        return self.head.towers.candidate(self.embeddings(sparse).to_dict()["item"])
