"""What the train pipeline steps: tables, towers and loss in one module.

Shapes: B queries, K candidates, U distinct items, D embedding width, H width of an item in a history, O output width.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recsys_core.data.batch import Batch
from recsys_core.models.embedding_tables import LookedUp, Lookups, table_outputs
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.objective import Objective
from recsys_core.models.spec import ModelSpec
from recsys_core.models.table_config import TEACHER
from recsys_core.models.towers import CandidateTower, QueryTower
from recsys_core.models.weight_decay import row_penalty

LOOKUPS_PATH = "lookups"
"""Where the tables sit in the task: what a sharding plan's module paths start with."""


class RetrievalHead(nn.Module):
    """Everything after the lookups. A module of its own because the train pipeline traces whatever encloses the lookups.

    Args:
        ranks: for each table that is unfrozen gradually, the place of each of its rows by training events, 0 for the most.
        weight_decay: strength of the L2 penalty, by table that has one; see `row_penalty`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        loss: LossConfig,
        item_count_I: NDArray[np.int64],
        ranks: Mapping[str, NDArray[np.int64]],
        weight_decay: Mapping[str, float],
    ) -> None:
        super().__init__()
        self.spec = spec
        self.query = QueryTower(spec)
        self.item = CandidateTower(spec)
        self.objective = Objective(spec, loss=loss, item_count_I=item_count_I)
        self.trained_rows = dict.fromkeys(ranks, 0)
        for table, rank in ranks.items():
            self.register_buffer(f"{table}_rank", torch.from_numpy(rank.astype(np.int32)), persistent=False)
        self.weight_decay = dict(weight_decay)
        self.bf16 = False

    def set_epoch(self, epoch: int) -> dict[str, float]:
        """Unfreezes what `epoch` (1-based) trains; returns the share of rows that are trained, by gradual table."""
        shares = {table: self.spec.tables[table].settings.trained_share(epoch) for table in self.trained_rows}
        self.trained_rows = {table: round(share * self.spec.tables[table].rows) for table, share in shares.items()}
        return shares

    def forward(self, looked_up: LookedUp, batch: Batch) -> Tensor:
        """What the collections gave for B queries and U items -> scalar loss."""
        with torch.autocast(batch.item_row_U.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            item_UD, features, tables = self.items(looked_up, batch)
            chosen_K = batch.candidate_K
            if self.spec.config.history.item_representation == "candidate_tower":
                item_UH = self.item(item_UD, features=features)
                candidate_KO = item_UH.index_select(0, chosen_K)
            else:
                item_UH = item_UD
                features_K = {name: value.index_select(0, chosen_K) for name, value in features.items()}
                candidate_KO = self.item(item_UD.index_select(0, chosen_K), features=features_K)
            query_BO, query_tables = self.queries(looked_up, batch, item_UH=item_UH)
            teacher_KT = tables[TEACHER][chosen_K] if TEACHER in tables else None
            loss: Tensor = self.objective(query_BO, candidate_KO, batch=batch, teacher_KT=teacher_KT)
            # FBGEMM's CPU kernels ignore weight decay without a word; as a part of the loss it works on every device.
            for table, strength in self.weight_decay.items():
                loss = loss + strength * self._penalty(table, (tables | query_tables)[table], batch=batch)
        return loss

    def _penalty(self, table: str, value: Tensor, *, batch: Batch) -> Tensor:
        if table == "user":
            return row_penalty(value, self._user_row(batch), most=batch.batch_size)
        histories = batch.batch_size * self.spec.config.history.length
        most = min(len(batch.candidate_K) + histories, self.spec.items)
        return row_penalty(value, batch.item_row_U, most=most)

    def _user_row(self, batch: Batch) -> Tensor:
        row_B: Tensor = batch.sparse[self.spec.tables["user"].sparse]["user"].values()
        return row_B

    def items(self, looked_up: LookedUp, batch: Batch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Item embeddings [U, D], the items' features by name, and the rows of all item tables."""
        tables = table_outputs(self.spec, looked_up, batch, side="item")
        tables["item"] = self._thawed("item", tables["item"], row=batch.item_row_U)
        return self.item.embed(tables), {name: tables[name] for name in self.item.features}, tables

    def queries(self, looked_up: LookedUp, batch: Batch, *, item_UH: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Query vectors [B, O], and the rows of all query tables. item_UH: what stands for each item in a history."""
        tables = table_outputs(self.spec, looked_up, batch, side="query")
        if "user" in self.trained_rows:
            tables["user"] = self._thawed("user", tables["user"], row=self._user_row(batch))
        return self.query(item_UH, batch.history_T, batch.history_offset, features=tables), tables

    def _thawed(self, table: str, value: Tensor, *, row: Tensor) -> Tensor:
        """`value` with a gradient only where its row is unfrozen.

        A row whose gradient is zero is left as it is, bit by bit, by every optimizer that a table may have.
        """
        limit = self.trained_rows.get(table)
        if limit is None or not self.training:
            return value
        trained = getattr(self, f"{table}_rank")[row] < limit
        return torch.where(trained[:, None], value, value.detach())


class RetrievalTask(nn.Module):
    """forward(batch) -> (loss, detached loss), as TrainPipelineSparseDist wants it."""

    def __init__(self, head: RetrievalHead, *, device: torch.device) -> None:
        super().__init__()
        # On the meta device: only the shards that the plan gives a rank are ever allocated.
        self.lookups = Lookups(head.spec, device=torch.device("meta"))
        self._sparse = {table.collection: table.sparse for table in head.spec.tables.values()}
        self._of_items = sorted({table.collection for table in head.spec.on_side("item").values()})
        self.head = head.to(device)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = self.head(self._look_up(batch, list(self.lookups)), batch)
        return loss, loss.detach()

    def _look_up(self, batch: Batch, names: list[str]) -> LookedUp:
        found: LookedUp = {}
        for name in names:
            features = batch.sparse[self._sparse[name]]
            if name.endswith("_frozen"):
                with torch.no_grad():
                    found[name] = self.lookups[name](features)
            else:
                found[name] = self.lookups[name](features)
        return found

    def encode_items(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(what stands for each of the U items in a history [U, H], candidate vectors [U, O])."""
        looked_up = self._look_up(batch, self._of_items)
        item_UD, features, _ = self.head.items(looked_up, batch)
        vector_UO = self.head.item(item_UD, features=features)
        return (vector_UO if self.head.spec.config.history.item_representation == "candidate_tower" else item_UD), vector_UO

    def encode_queries(self, batch: Batch) -> Tensor:
        """Query vectors [B, O] of a batch without candidates."""
        looked_up = self._look_up(batch, list(self.lookups))
        item_UD, features, _ = self.head.items(looked_up, batch)
        vector = self.head.spec.config.history.item_representation == "candidate_tower"
        item_UH = self.head.item(item_UD, features=features) if vector else item_UD
        query_BO: Tensor = self.head.queries(looked_up, batch, item_UH=item_UH)[0]
        return query_BO
