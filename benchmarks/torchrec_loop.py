"""The training loop of TorchRec's retrieval example, rewritten for a comparison: random batches, TorchRec's defaults.

The model has two tables in one EmbeddingBagCollection and an MLP per tower. The loss is the binary cross-entropy of the dot
products. Row-wise Adagrad updates the tables in the backward pass, and Adam updates the MLPs. The loop uses
DistributedModelParallel with its default plan, and TrainPipelineSparseDist.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

FEATURE_NAMES = ("userId", "movieId")


class TwoTowerTask(nn.Module):
    """The two-tower model. The forward pass returns (loss, (loss, logits, labels)) for a batch of pairs and labels."""

    def __init__(self, *, num_rows: int, dim: int, layers: list[int], device: torch.device) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t_{name}", embedding_dim=dim, num_embeddings=num_rows, feature_names=[name])
                for name in FEATURE_NAMES
            ],
            device=torch.device("meta"),
        )
        self.query_proj = MLP(in_size=dim, layer_sizes=layers, device=device)
        self.candidate_proj = MLP(in_size=dim, layer_sizes=layers, device=device)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        pooled_by_feature = self.ebc(batch.sparse_features)
        query_BD = self.query_proj(pooled_by_feature[FEATURE_NAMES[0]])
        candidate_BD = self.candidate_proj(pooled_by_feature[FEATURE_NAMES[1]])
        logit_B = (query_BD * candidate_BD).sum(dim=1)
        loss = binary_cross_entropy_with_logits(logit_B, batch.labels.float())
        return loss, (loss.detach(), logit_B.detach(), batch.labels.detach())


def train(
    *, num_rows: int, dim: int, layers: list[int], batch_size: int, pace: Callable[[Iterable[Batch]], Iterator[Batch]]
) -> None:
    """Train on random batches. pace: function that yields the batches, but waits during the turns of other contestants."""
    device = torch.device("cpu")
    task = TwoTowerTask(num_rows=num_rows, dim=dim, layers=layers, device=device)
    apply_optimizer_in_backward(RowWiseAdagrad, task.ebc.parameters(), {"lr": 0.01})
    model = DistributedModelParallel(module=task, device=device)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.Adam(params, lr=0.01)
    )
    loader: Any = DataLoader(
        RandomRecDataset(keys=list(FEATURE_NAMES), batch_size=batch_size, hash_size=num_rows, ids_per_feature=1, num_dense=0),
        batch_size=None,
        batch_sampler=None,
        num_workers=0,
    )
    batches = pace(loader)
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    with suppress(StopIteration):
        while True:
            pipeline.progress(batches)
