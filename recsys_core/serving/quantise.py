"""The query tower as it is served: its embedding tables in INT8 with a scale and offset per row, or in fp32.

Shapes: B queries, H width of an item in a history, O output width, T items of all histories.
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
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.quant import EmbeddingBagCollection as QuantizedBagCollection

from recsys_core.data.batch import QUERY_WEIGHTED, ROWS, Batch
from recsys_core.models.lookups import bag_config, table_outputs
from recsys_core.models.spec import ModelSpec
from recsys_core.models.two_tower import QuerySide

Quantization = Literal["int8", "none"]
CPU = torch.device("cpu")
HISTORY = "history"
"""Collection of the one table with what stands for each item in a history, whatever tables and layers that came from."""


class QueryTower(nn.Module):
    """Embedding tables and dense layers of the query side; the names of its state are those of tower.safetensors."""

    def __init__(self, spec: ModelSpec, *, tables: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.spec = spec.pooled()
        self.tables = nn.ModuleDict(tables)
        self.dense = QuerySide(spec)
        self.eval()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Query vectors [B, O] of a batch whose `sparse` has the query features, and under ROWS the items of the histories."""
        looked_up = {
            name: bags(batch.sparse[name.removesuffix("_frozen")]) for name, bags in self.tables.items() if name != HISTORY
        }
        item_TH = torch.zeros(0, self.spec.config.history_dim)
        if HISTORY in self.tables and len(batch.history_T):
            item_TH = self.tables[HISTORY](batch.sparse[ROWS]).values()
        features = table_outputs(self.spec, looked_up, batch, side="query")
        query_BO: Tensor = self.dense(item_TH, batch.history_T, batch.history_offset, features=features)
        return query_BO


def build_tower(
    spec: ModelSpec,
    *,
    history_items: NDArray[np.float32],
    tables: Mapping[str, NDArray[np.float32]],
    dense: Mapping[str, Tensor],
    quantization: Quantization,
) -> QueryTower:
    """The tower from float tables (arrays may be memory maps opened with mode "c") and the dense state of the trained head.

    history_items: [items, H], what stands for an item in a history. tables: name -> [rows, width], the query side's at least.
    """
    weights = {"item": history_items, **tables}
    collections: dict[str, nn.Module] = {}
    for collection, configs in _configs(spec, quantization="none").items():
        bags = torchrec.EmbeddingBagCollection(
            tables=list(configs.values()), is_weighted=collection.startswith(QUERY_WEIGHTED), device=torch.device("meta")
        )
        for table, config in configs.items():
            bags.embedding_bags[config.name].weight = nn.Parameter(torch.from_numpy(weights[table]), requires_grad=False)
        collections[collection] = bags
    tower = QueryTower(spec, tables=collections)
    own = {name.removeprefix("query."): value for name, value in dense.items() if name.startswith("query.")}
    tower.dense.load_state_dict(own, strict=True)
    if quantization == "int8":
        quantize_embeddings(tower, dtype=torch.qint8, inplace=True)
    return tower


def save_tower(tower: QueryTower, path: Path) -> None:
    """Writes tower.safetensors. INT8 tables are uint8 [rows, D + 4 rounded up to 16]: codes, scale and offset in float16."""
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tower.state_dict().items()}, path)


def load_tower(path: Path, *, spec: ModelSpec, quantization: Quantization) -> QueryTower:
    """What save_tower wrote, without float tables in between for INT8; a missing or surplus tensor is an error."""
    kind = QuantizedBagCollection if quantization == "int8" else torchrec.EmbeddingBagCollection
    tower = QueryTower(
        spec,
        tables={
            collection: kind(tables=list(configs.values()), is_weighted=collection.startswith(QUERY_WEIGHTED), device=CPU)
            for collection, configs in _configs(spec, quantization=quantization).items()
        },
    )
    tower.load_state_dict(load_file(path), strict=True)
    return tower


def _configs(spec: ModelSpec, *, quantization: Quantization) -> dict[str, dict[str, EmbeddingBagConfig]]:
    """collection -> table -> config, of what the query side reads."""
    found: dict[str, dict[str, EmbeddingBagConfig]] = {}
    if spec.config.history.length:
        item = EmbeddingBagConfig(
            name="item",
            num_embeddings=spec.items,
            embedding_dim=spec.config.history_dim,
            feature_names=["item"],
            pooling=PoolingType.SUM,
        )
        found[HISTORY] = {"item": item}
    for name, table in spec.pooled().on_side("query").items():
        found.setdefault(table.collection, {})[name] = bag_config(name, table)
    for configs in found.values():
        for config in configs.values():
            config.data_type = DataType.INT8 if quantization == "int8" else DataType.FP32
    return found
