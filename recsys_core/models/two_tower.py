"""The two towers over pooled embeddings.

Shapes: B queries, K candidates, F features, D embedding width, O output width.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recsys_core.models.config import ModelSpec, TwoTowerConfig

QUERY_TABLES = {"user": "user", "history": "item", "last_item": "item"}
"""Query features, in the order in which the tower reads them, and the table each looks up."""


def query_features(config: TwoTowerConfig) -> tuple[str, ...]:
    """Names of the query tower's features, in order.

    >>> query_features(TwoTowerConfig(user_id=True, max_history=5, last_item=False))
    ('user', 'history')
    """
    present = {"user": config.user_id, "history": config.max_history > 0, "last_item": config.last_item}
    return tuple(name for name in QUERY_TABLES if present[name])


def embedding_configs(spec: ModelSpec) -> list[EmbeddingBagConfig]:
    """TorchRec's tables. History, last item and candidate share the table `item`.

    Pooled by sum: under grid_shard TorchRec 1.8 divides a mean by the part of the bag that a rank holds
    (meta-pytorch/torchrec#2362 tells the same of row_wise, where it is mended). `pooled_features` divides afterwards.
    """
    features = {table: [f for f in query_features(spec.config) if QUERY_TABLES[f] == table] for table in spec.tables}
    features["item"].append("item")
    return [
        EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features[name], pooling=PoolingType.SUM
        )
        for name, (rows, dim) in spec.tables.items()
    ]


def pooled_features(pooled: KeyedTensor, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
    """Sum-pooled embeddings by feature, the history's divided by its length: {feature: [B, D]}."""
    features: dict[str, Tensor] = pooled.to_dict()
    if "history" in features:
        length_FB = sparse.lengths().view(len(sparse.keys()), -1)
        length_B = length_FB[sparse.keys().index("history")].clamp(min=1)
        features["history"] = features["history"] / length_B[:, None]
    return features


class TwoTower(nn.Module):
    """The dense part of both towers; embeddings come in already pooled, so the same class trains and serves."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        config = spec.config
        self.features = query_features(config)
        self.cosine = config.similarity == "cosine"
        self.dropout = nn.Dropout(config.dropout)
        self.query_mlp = _mlp(len(self.features) * config.embedding_dim, config.query_sizes)
        self.candidate_mlp = _mlp(config.embedding_dim, config.candidate_layers)

    def query(self, pooled: dict[str, Tensor]) -> Tensor:
        """{feature: [B, D]} -> query vectors [B, O]; unit length under cosine similarity."""
        inputs = [self.dropout(pooled[name]) for name in self.features]
        query_BO = torch.stack(inputs).sum(dim=0) if self.query_mlp is None else self.query_mlp(torch.cat(inputs, dim=1))
        return normalize(query_BO, dim=1) if self.cosine else query_BO

    def candidate(self, item_KD: Tensor) -> Tensor:
        """Pooled item embeddings [K, D] -> candidate vectors [K, O]; unit length under cosine similarity."""
        candidate_KO = item_KD if self.candidate_mlp is None else self.candidate_mlp(item_KD)
        return normalize(candidate_KO, dim=1) if self.cosine else candidate_KO


def _mlp(width: int, layers: tuple[int, ...]) -> nn.Sequential | None:
    """Linear layers with ReLU between them and none after the last, so that a vector can point anywhere."""
    if not layers:
        return None
    modules: list[nn.Module] = []
    for size in layers:
        modules += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*modules[:-1])
