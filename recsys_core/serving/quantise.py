"""The query tower as it is served: its embedding tables in INT8 with a scale and offset per row, or in fp32.

Shapes: B queries, D embedding width, O output width, T items in all histories.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torchrec
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.quant import EmbeddingBagCollection as QuantizedBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_core.data.lists import Lists
from recsys_core.models.config import ModelSpec
from recsys_core.models.two_tower import QUERY_TABLES, TwoTower, embedding_configs, pooled_features, query_features

Quantization = Literal["int8", "none"]
CPU = torch.device("cpu")


class QueryTower(nn.Module):
    """Embedding tables and dense layers of the query side; the names of its state are those of tower.safetensors."""

    def __init__(self, spec: ModelSpec, *, tables: nn.Module) -> None:
        super().__init__()
        self.features = query_features(spec.config)
        self.max_history = spec.config.max_history
        self.tables = tables
        self.dense = TwoTower(spec)
        self.eval()

    @torch.inference_mode()
    def forward(self, user_row_B: Tensor, history: Lists) -> Tensor:
        """Query vectors [B, O].

        user_row_B: int64, -1 for a user without a row. history: item rows per query, oldest first; the last `max_history`
        are used. What is missing counts as zeros.
        """
        recent = history.last(self.max_history)
        row_T, length_B = torch.from_numpy(recent.row_T), torch.from_numpy(recent.length_N)
        filled_B = length_B > 0
        bags = {
            "user": (user_row_B[user_row_B >= 0], user_row_B >= 0),
            "history": (row_T, length_B),
            "last_item": (row_T[torch.from_numpy(recent.offset[1:])[filled_B] - 1], filled_B),
        }
        sparse = KeyedJaggedTensor.from_lengths_sync(
            keys=list(self.features),
            values=torch.cat([bags[name][0] for name in self.features]),
            lengths=torch.cat([bags[name][1].to(torch.int64) for name in self.features]),
        )
        query_BO: Tensor = self.dense.query(pooled_features(self.tables(sparse), sparse))
        return query_BO


def build_tower(
    spec: ModelSpec, *, tables: Mapping[str, NDArray[np.float32]], dense: Mapping[str, Tensor], quantization: Quantization
) -> QueryTower:
    """The tower from float tables (name -> [rows, D], may be memory maps opened with mode "c") and the towers' dense state."""
    bags = torchrec.EmbeddingBagCollection(tables=_query_tables(spec, quantization="none"), device=torch.device("meta"))
    for name, bag in bags.embedding_bags.items():
        bag.weight = nn.Parameter(torch.from_numpy(tables[name]), requires_grad=False)
    tower = QueryTower(spec, tables=bags)
    tower.dense.load_state_dict(dict(dense), strict=True)
    if quantization == "int8":
        quantize_embeddings(tower, dtype=torch.qint8, inplace=True)
    return tower


def save_tower(tower: QueryTower, path: Path) -> None:
    """Writes tower.safetensors. INT8 tables are uint8 [rows, D + 4 rounded up to 16]: codes, scale and offset in float16."""
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tower.state_dict().items()}, path)


def load_tower(path: Path, *, spec: ModelSpec, quantization: Quantization) -> QueryTower:
    """What save_tower wrote, without float tables in between for INT8; a missing or surplus tensor is an error."""
    configs = _query_tables(spec, quantization=quantization)
    if quantization == "int8":
        tower = QueryTower(spec, tables=QuantizedBagCollection(tables=configs, is_weighted=False, device=CPU))
    else:
        tower = QueryTower(spec, tables=torchrec.EmbeddingBagCollection(tables=configs, device=CPU))
    tower.load_state_dict(load_file(path), strict=True)
    return tower


def _query_tables(spec: ModelSpec, *, quantization: Quantization) -> list[EmbeddingBagConfig]:
    """The tables that the query side reads, with its features alone."""
    features = query_features(spec.config)
    configs = []
    for config in embedding_configs(spec):
        config.feature_names = [name for name in features if QUERY_TABLES[name] == config.name]
        config.data_type = DataType.INT8 if quantization == "int8" else DataType.FP32
        if config.feature_names:
            configs.append(config)
    return configs
