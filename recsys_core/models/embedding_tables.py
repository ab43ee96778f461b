"""The embedding tables as TorchRec modules, and what comes out of them.

Features of queries are pooled inside an EmbeddingBagCollection. Items and users are looked up row by row in an
EmbeddingCollection: each distinct item of a batch once, so that it can be a candidate, a part of many histories, frozen or not,
by its own row (docs/adr/0005). Tables that never change sit in collections of their own, outside of autograd.

Shapes: B queries, U distinct items, T values of one list feature.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recsys_core.data.batch import Batch
from recsys_core.data.batch_keys import QUERY, QUERY_WEIGHTED
from recsys_core.models.spec import ModelSpec, Side, TableSpec, module_name

LookedUp = dict[str, Any]
"""Output of each collection: {feature: JaggedTensor} of rows as they are, or a KeyedTensor of pooled ones."""


class Lookups(nn.ModuleDict):
    """All tables of a model, by collection (see TableSpec.collection)."""

    def __init__(self, spec: ModelSpec, *, device: torch.device) -> None:
        super().__init__()
        for name in sorted({table.collection for table in spec.tables.values()}):
            tables = {n: table for n, table in spec.tables.items() if table.collection == name}
            if next(iter(tables.values())).row_by_row:
                self[name] = EmbeddingCollection(tables=[_rows(n, table) for n, table in tables.items()], device=device)
            else:
                self[name] = EmbeddingBagCollection(
                    tables=[bag_config(n, table) for n, table in tables.items()],
                    is_weighted=name.startswith(QUERY_WEIGHTED),
                    device=device,
                )


def parameter_name(spec: ModelSpec, table: str) -> str:
    """Where the weights of `table` are, below the Lookups module."""
    held = spec.tables[table]
    holder = "embeddings" if held.row_by_row else "embedding_bags"
    return f"{held.collection}.{holder}.{module_name(table)}.weight"


def _rows(name: str, table: TableSpec) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=module_name(name), num_embeddings=table.rows, embedding_dim=table.dim, feature_names=[table.feature]
    )


def bag_config(name: str, table: TableSpec) -> EmbeddingBagConfig:
    """Pooled by sum; `pooled` divides afterwards.

    Under grid_shard TorchRec 1.9 divides a mean by the part of the bag that a rank holds; of row_wise
    meta-pytorch/torchrec#2362 reports the same, and it is fixed.
    """
    return EmbeddingBagConfig(
        name=module_name(name),
        num_embeddings=table.rows,
        embedding_dim=table.dim,
        feature_names=[table.feature],
        pooling=PoolingType.SUM,
    )


def table_outputs(spec: ModelSpec, looked_up: LookedUp, batch: Batch, *, side: Side) -> dict[str, Tensor]:
    """Per table of `side` a row for each of the B queries or U items: [n, width of the table]."""
    bags: dict[str, dict[str, Tensor]] = {}
    found = {}
    for name, table in spec.on_side(side).items():
        output, form = spec.output_name(name), spec.forms.get(name, "single")
        if table.row_by_row:
            jagged = looked_up[table.collection][output]
            samples = len(batch.item_row_U) if side == "item" else batch.batch_size
            one_each = form in ("single", "number")
            rows: Tensor = jagged.values()
            weight_T = batch.item_weight.get(name)
            if one_each:
                if len(rows) > samples:  # nobody was asked for, and one row looked up all the same
                    rows = rows[:samples]
                found[name] = rows if weight_T is None else rows * weight_T[:, None]
            else:
                offset = jagged.offsets()[: samples + 1]
                found[name] = _pool(rows, offset, weight_T=weight_T, mean=table.settings.pooling == "mean")
            continue
        if table.collection not in bags:
            bags[table.collection] = looked_up[table.collection].to_dict()
        sum_BW = bags[table.collection][output]
        if form in ("list", "weighted_list") and table.settings.pooling == "mean":
            sum_BW = sum_BW / _bag_sizes(batch, name, weighted=table.weighted)[:, None]
        found[name] = sum_BW
    return found


def _pool(value_TW: Tensor, offset: Tensor, *, weight_T: Tensor | None, mean: bool) -> Tensor:
    """Lists of rows -> a row for each list, weighted; zeros for an empty one."""
    place_T = torch.arange(len(value_TW), device=value_TW.device)
    weight_T = torch.ones_like(value_TW[:, 0]) if weight_T is None else weight_T
    if mean:
        total = torch.segment_reduce(weight_T, "sum", offsets=offset.long(), initial=0.0)
        weight_T = weight_T / torch.repeat_interleave(total.clamp(min=_TINY), offset.diff(), output_size=len(weight_T))
    pooled: Tensor = embedding_bag(
        place_T, value_TW, offset.long(), mode="sum", per_sample_weights=weight_T, include_last_offset=True
    )
    return pooled


_TINY = torch.finfo(torch.float32).tiny


def _bag_sizes(batch: Batch, feature: str, *, weighted: bool) -> Tensor:
    """[B]: values of each bag, or the sum of their weights; 1 for an empty one."""
    jagged = batch.sparse[QUERY_WEIGHTED if weighted else QUERY][feature]
    if not weighted:
        length_B: Tensor = jagged.lengths().clamp(min=1)
        return length_B
    total = torch.segment_reduce(jagged.weights(), "sum", offsets=jagged.offsets().long(), initial=0.0)
    return torch.where(total > 0, total, 1.0)
