"""Embedding tables as TorchRec modules: EmbeddingCollection for items and users, EmbeddingBagCollection for query features.

Item and user embeddings are unpooled: a batch looks up each distinct item once, and uses the row for all candidates and history
entries with that item (docs/adr/0005). The EmbeddingBagCollection pools query features. Frozen tables are in separate
collections, which run without autograd.

Shapes: B queries, V distinct items, L values of all lists, D columns, R rows of a shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recsys_core.dataset.batch import Batch
from recsys_core.dataset.feature_store import POOLED, POOLED_WEIGHTED
from recsys_core.models.history import pool_lists
from recsys_core.models.spec import ModelSpec, Side, TableSpec, module_name

CollectionOutputs = dict[str, Any]
"""Output of each collection: {feature: JaggedTensor} for an EmbeddingCollection, KeyedTensor for an EmbeddingBagCollection."""


class EmbeddingTables(nn.ModuleDict):
    """All tables of a model, by collection (see TableSpec.collection)."""

    def __init__(self, spec: ModelSpec, *, device: torch.device) -> None:
        super().__init__()
        for collection in sorted({table.collection for table in spec.tables.values()}):
            table_by_name = {table_name: table for table_name, table in spec.tables.items() if table.collection == collection}
            if next(iter(table_by_name.values())).is_unpooled:
                table_configs = [EmbeddingConfig(**_table_arguments(name, table)) for name, table in table_by_name.items()]
                self[collection] = EmbeddingCollection(tables=table_configs, device=device)
            else:
                # For mean pooling, `table_outputs` divides the sum. TorchRec's own mean is wrong under grid_shard: TorchRec 1.9
                # divides by the number of values on each rank. row_wise no longer has this fault (meta-pytorch/torchrec#2362).
                table_configs = [
                    EmbeddingBagConfig(**_table_arguments(name, table), pooling=PoolingType.SUM)
                    for name, table in table_by_name.items()
                ]
                is_weighted = collection.startswith(POOLED_WEIGHTED)
                self[collection] = EmbeddingBagCollection(tables=table_configs, is_weighted=is_weighted, device=device)


def _table_arguments(table_name: str, table: TableSpec) -> dict[str, Any]:
    return {
        "name": module_name(table_name),
        "num_embeddings": table.num_rows,
        "embedding_dim": table.dim,
        "feature_names": [table.feature],
    }


def parameter_name(spec: ModelSpec, table_name: str) -> str:
    """Return the name of the weights of table `table_name` among the parameters of EmbeddingTables."""
    table = spec.tables[table_name]
    attribute_name = "embeddings" if table.is_unpooled else "embedding_bags"
    return f"{table.collection}.{attribute_name}.{module_name(table_name)}.weight"


def table_outputs(spec: ModelSpec, collection_outputs: CollectionOutputs, batch: Batch, *, side: Side) -> dict[str, Tensor]:
    """Return the outputs of the tables of `side`, by table: [B, D] for queries, [V, D] for the distinct items."""
    pooled_outputs_by_collection: dict[str, dict[str, Tensor]] = {}
    output_by_table = {}
    for table_name, table in spec.on_side(side).items():
        output_name = spec.output_name(table_name)
        if table.is_unpooled:
            num_vectors = len(batch.item_row_V) if side == "item" else batch.batch_size
            output_by_table[table_name] = _unpooled_output(
                spec, table_name, collection_outputs[table.collection][output_name], batch, num_vectors
            )
            continue
        if table.collection not in pooled_outputs_by_collection:
            pooled_outputs_by_collection[table.collection] = collection_outputs[table.collection].to_dict()
        output_BD = pooled_outputs_by_collection[table.collection][output_name]
        if spec.forms.get(table_name) in ("list", "weighted_list") and table.settings.pooling == "mean":
            output_BD = output_BD / _mean_divisor(batch, table_name, is_weighted=table.weighted)[:, None]
        output_by_table[table_name] = output_BD
    return output_by_table


def _unpooled_output(spec: ModelSpec, table_name: str, jagged_rows: Any, batch: Batch, num_vectors: int) -> Tensor:
    value_LD: Tensor = jagged_rows.values()
    weight_L = batch.item_feature_weight.get(table_name)
    if spec.forms.get(table_name, "single") in ("single", "number"):
        if len(value_LD) > num_vectors:  # a batch without values looks up an unused row: FBGEMM rejects empty lookups
            value_LD = value_LD[:num_vectors]
        return value_LD if weight_L is None else value_LD * weight_L[:, None]
    offset = jagged_rows.offsets()[: num_vectors + 1]
    return pool_lists(value_LD, offset, weight_L=weight_L, is_mean=spec.tables[table_name].settings.pooling == "mean")


def _mean_divisor(batch: Batch, feature: str, *, is_weighted: bool) -> Tensor:
    """Return the divisor of the mean of each list, [B]: its length or the sum of its weights; 1 for an empty list."""
    jagged = batch.sparse[POOLED_WEIGHTED if is_weighted else POOLED][feature]
    if not is_weighted:
        length_B: Tensor = jagged.lengths().clamp(min=1)
        return length_B
    total_weight_B = torch.segment_reduce(jagged.weights(), "sum", offsets=jagged.offsets().long(), initial=0.0)
    return torch.where(total_weight_B > 0, total_weight_B, 1.0)


@dataclass(frozen=True)
class LocalShard:
    """A rectangle of a table that is in this rank's memory.

    Attributes:
        first_row, first_column: first row and first column of the rectangle in the table.
        weight_RD: values of the rectangle, a view of the table's memory.
    """

    first_row: int
    first_column: int
    weight_RD: Tensor


def local_shards(parameter: Any) -> list[LocalShard]:
    """Return this rank's shards of a parameter. A data-parallel table is one shard.

    parameter: an entry of a sharded model's state dict.
    """
    if isinstance(parameter, ShardedTensor):
        shards = ((shard.metadata.shard_offsets, shard.tensor) for shard in parameter.local_shards())
        return [LocalShard(first_row, first_column, tensor) for (first_row, first_column), tensor in shards]
    return [LocalShard(0, 0, parameter)]


def table_shards(parameter_by_name: Mapping[str, Any], *, table: str) -> list[LocalShard]:
    """Return this rank's shards of `table`, from the state dict of a RetrievalTask; empty if the rank has no shard."""
    parameter = next(
        (
            parameter
            for parameter_path, parameter in parameter_by_name.items()
            if parameter_path.endswith(f".{module_name(table)}.weight")
        ),
        None,
    )
    return local_shards(parameter) if parameter is not None else []
