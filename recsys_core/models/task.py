"""The module that the train pipeline runs: embedding tables, towers and loss.

Shapes: B queries, C candidates, V distinct items (queries for table user), I items, H entries of all histories, R rows of a
table, D width of a vector.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from recsys_core.dataset.batch import Batch
from recsys_core.dataset.layout import row_dtype
from recsys_core.models.ensemble import join_members, make_candidate_tower, make_query_tower
from recsys_core.models.loss.collectives import l2_penalty
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.loss.objective import Objective
from recsys_core.models.score_terms import append_popularity, item_popularity
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import CollectionOutputs, EmbeddingTables, table_outputs
from recsys_core.models.tables.table_config import HISTORY_OFFSET_TABLE, TEACHER_TABLE

TABLES_PATH = "embedding_tables"
"""Name of the EmbeddingTables in RetrievalTask; the module paths of a sharding plan start with it."""


class RetrievalHead(nn.Module):
    """The dense part of the model: everything after the embedding lookups.

    The head is separate from RetrievalTask, which holds the embedding tables, because the train pipeline traces the code of
    RetrievalTask, but not the code of the head.

    Args:
        item_count_I: number of training events per item.
        popularity_rank: for each table with transfer `gradual`, the popularity ranks of its rows. The row of rank 0 has the
            most training events.
        weight_decay: strength of the L2 penalty, by table; see `l2_penalty`.
        group: process group of the ranks that train together; None for a single process.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        loss: LossConfig,
        item_count_I: NDArray[np.int64],
        popularity_rank: Mapping[str, NDArray[np.int64]],
        weight_decay: Mapping[str, float],
        group: ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.group = group
        self.query = make_query_tower(spec)
        self.item = make_candidate_tower(spec)
        self.objective = Objective(spec, loss=loss, item_count_I=item_count_I, group=group)
        self.num_trained_rows = dict.fromkeys(popularity_rank, 0)
        for table, popularity_rank_R in popularity_rank.items():
            self.register_buffer(
                f"{table}_popularity_rank",
                torch.from_numpy(popularity_rank_R.astype(row_dtype(len(popularity_rank_R)))),
                persistent=False,
            )
        self.item_popularity_I: Tensor | None
        popularity_I = torch.from_numpy(item_popularity(item_count_I)) if spec.config.has_popularity else None
        self.register_buffer("item_popularity_I", popularity_I, persistent=False)
        self.weight_decay = dict(weight_decay)
        self.uses_bf16 = False
        self.histories_use_tower = spec.config.history.item_representation == "candidate_tower"

    def set_epoch(self, epoch: int) -> dict[str, float]:
        """Unfreeze rows of tables with transfer `gradual` for `epoch` (1-based); return the share of trained rows by table."""
        trained_share_by_table = {
            table_name: self.spec.tables[table_name].settings.trained_share(epoch) for table_name in self.num_trained_rows
        }
        self.num_trained_rows = {
            table_name: round(trained_share * self.spec.tables[table_name].num_rows)
            for table_name, trained_share in trained_share_by_table.items()
        }
        return trained_share_by_table

    def forward(self, embeddings: CollectionOutputs, batch: Batch) -> Tensor:
        """Return the scalar loss of a batch."""
        with torch.autocast(batch.item_row_V.device.type, dtype=torch.bfloat16, enabled=self.uses_bf16):
            item_VD, features, item_outputs = self.embed_items(embeddings, batch)
            candidate_C = batch.candidate_index_C
            history_item_VD = self.represent_in_histories(item_VD, features=features)
            if self.histories_use_tower:
                candidate_CD = history_item_VD.index_select(0, candidate_C)
            else:
                candidate_features = {
                    feature_name: feature_VD.index_select(0, candidate_C) for feature_name, feature_VD in features.items()
                }
                candidate_CD = self.item(item_VD.index_select(0, candidate_C), features=candidate_features)
            candidate_CD = self.with_popularity(candidate_CD, batch.item_row_V[candidate_C])
            history_item_VD = self.with_offsets(history_item_VD, item_outputs)
            query_BD, query_outputs = self.encode_queries(embeddings, batch, history_item_VD=history_item_VD)
            teacher_CD = item_outputs[TEACHER_TABLE][candidate_C] if TEACHER_TABLE in item_outputs else None
            loss: Tensor = self.objective(query_BD, candidate_CD, batch=batch, teacher_CD=teacher_CD)
            # FBGEMM's CPU kernels silently ignore weight decay. As a part of the loss, weight decay works on every device.
            output_by_table = item_outputs | query_outputs
            for table_name, strength in self.weight_decay.items():
                loss = loss + strength * self._l2_penalty(table_name, output_by_table[table_name], batch=batch)
        return loss

    def _l2_penalty(self, table_name: str, value_VD: Tensor, *, batch: Batch) -> Tensor:
        if table_name == "user":
            return l2_penalty(value_VD, self._user_rows(batch), max_rows=batch.batch_size, group=self.group)
        num_candidates, num_history_entries = len(batch.candidate_index_C), batch.batch_size * self.spec.history_length
        if self.objective.config.negatives == "all":  # the shares of two ranks may differ in size
            num_candidates = batch.batch_size + self.objective.largest_share_size
        max_rows = min(num_candidates + num_history_entries, self.spec.num_items)
        return l2_penalty(value_VD, batch.item_row_V, max_rows=max_rows, group=self.group)

    def _user_rows(self, batch: Batch) -> Tensor:
        row_B: Tensor = batch.sparse[self.spec.tables["user"].batch_key]["user"].values()
        return row_B

    def embed_items(self, embeddings: CollectionOutputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return item embeddings [V, D], the items' features by name, and the outputs of all item tables by name."""
        output_by_table = table_outputs(self.spec, embeddings, batch, side="item")
        output_by_table["item"] = self._mask_frozen_gradients("item", output_by_table["item"], row_V=batch.item_row_V)
        return (
            self.item.embed(output_by_table),
            {feature_name: output_by_table[feature_name] for feature_name in self.item.feature_names},
            output_by_table,
        )

    def represent_in_histories(self, item_VD: Tensor, *, features: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors [V, D] that represent items in histories, without offsets.

        item_VD, features: results of `embed_items`.
        """
        history_item_VD: Tensor = self.item(item_VD, features=features) if self.histories_use_tower else item_VD
        return history_item_VD

    def with_offsets(self, history_item_VD: Tensor, item_outputs: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors of items in histories [V, D], with the learned offsets added if the model has any.

        item_outputs: the third result of `embed_items`.
        """
        if HISTORY_OFFSET_TABLE not in item_outputs:
            return history_item_VD
        offset_VD = item_outputs[HISTORY_OFFSET_TABLE]
        if self.histories_use_tower:  # the vectors of the members are joined
            offset_VD = join_members(offset_VD.chunk(self.spec.config.num_members, dim=1))
        return history_item_VD + offset_VD

    def with_popularity(self, candidate_VD: Tensor, item_row_V: Tensor) -> Tensor:
        """Return candidate vectors, with the popularity of the items appended if the model has a popularity term."""
        if self.item_popularity_I is None:
            return candidate_VD
        return append_popularity(candidate_VD, self.item_popularity_I[item_row_V])

    def encode_queries(
        self, embeddings: CollectionOutputs, batch: Batch, *, history_item_VD: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return query vectors [B, D] and the outputs of all query tables by name.

        history_item_VD: vectors that represent the batch's distinct items in histories.
        """
        output_by_table = table_outputs(self.spec, embeddings, batch, side="query")
        if "user" in self.num_trained_rows:
            output_by_table["user"] = self._mask_frozen_gradients("user", output_by_table["user"], row_V=self._user_rows(batch))
        return self.query(
            history_item_VD, batch.history_index_H, batch.history_offset, features=output_by_table
        ), output_by_table

    def _mask_frozen_gradients(self, table_name: str, value_VD: Tensor, *, row_V: Tensor) -> Tensor:
        """Detach the rows of a gradual table that are still frozen. For table user, V is the number of queries.

        A row with a zero gradient does not change by a single bit, whatever the optimizer of its table.
        """
        num_trained_rows = self.num_trained_rows.get(table_name)
        if num_trained_rows is None or not self.training:
            return value_VD
        is_trained_V = getattr(self, f"{table_name}_popularity_rank")[row_V] < num_trained_rows
        return torch.where(is_trained_V[:, None], value_VD, value_VD.detach())


class RetrievalTask(nn.Module):
    """Embedding tables and head. forward(batch) -> (loss, mean loss of the members), for TrainPipelineSparseDist."""

    def __init__(self, head: RetrievalHead, *, device: torch.device) -> None:
        super().__init__()
        # The tables are created on the meta device, without memory. Sharding later allocates only each rank's shards.
        self.embedding_tables = EmbeddingTables(head.spec, device=torch.device("meta"))
        self._batch_key_by_collection = {table.collection: table.batch_key for table in head.spec.tables.values()}
        self._item_collections = sorted({table.collection for table in head.spec.on_side("item").values()})
        self.head = head.to(device)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = self.head(self._look_up(batch, list(self.embedding_tables)), batch)
        return loss, loss.detach() / self.head.spec.config.num_members

    def _look_up(self, batch: Batch, collection_names: list[str]) -> CollectionOutputs:
        embeddings: CollectionOutputs = {}
        for collection_name in collection_names:
            lookups = batch.sparse[self._batch_key_by_collection[collection_name]]
            if collection_name.endswith("_frozen"):
                with torch.no_grad():
                    embeddings[collection_name] = self.embedding_tables[collection_name](lookups)
            else:
                embeddings[collection_name] = self.embedding_tables[collection_name](lookups)
        return embeddings

    def encode_items(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the history vectors [V, D] and the candidate vectors [V, D] of the batch's distinct items.

        The history vector of an item represents it in the histories of queries.
        """
        item_VD, features, item_outputs = self.head.embed_items(self._look_up(batch, self._item_collections), batch)
        candidate_VD: Tensor = self.head.item(item_VD, features=features)
        history_VD = self.head.with_offsets(candidate_VD if self.head.histories_use_tower else item_VD, item_outputs)
        return history_VD, self.head.with_popularity(candidate_VD, batch.item_row_V)

    def encode_queries(self, batch: Batch) -> Tensor:
        """Return query vectors [B, D] of a batch without candidates."""
        embeddings = self._look_up(batch, list(self.embedding_tables))
        item_VD, features, item_outputs = self.head.embed_items(embeddings, batch)
        history_item_VD = self.head.represent_in_histories(item_VD, features=features)
        history_item_VD = self.head.with_offsets(history_item_VD, item_outputs)
        query_BD: Tensor = self.head.encode_queries(embeddings, batch, history_item_VD=history_item_VD)[0]
        return query_BD
