"""What the user says about one embedding table: width, first values, and how pretrained vectors are carried over."""

import math
from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import Settings
from recsys_core.errors import InputError
from recsys_core.models.optimizer_config import TableOptimizer

Transfer = Literal["full", "frozen", "gradual", "residual"]
OFFSET = "item_offset"
"""Table of the learned offsets beside frozen item vectors (transfer: residual)."""
TEACHER = "item_teacher"
"""Frozen table of the vectors whose similarities are distilled."""


def random_norm(std: float, dim: int) -> float:
    """Length that a row of `dim` normal numbers is expected to have."""
    return std * math.sqrt(dim)


class Unfreeze(Settings):
    """From the start of `epoch` (1 is the first) on, the `share` of rows with the most training events is trained."""

    epoch: int = Field(ge=1, le=10_000, description="1 is the first epoch")
    share: float = Field(ge=0, le=1, description="of the table's rows, those with the most training events first")


class TableConfig(Settings):
    """One embedding table."""

    dim: int | None = Field(None, ge=4, le=16_384, multiple_of=4, description="width; empty: model.embedding_dim")
    init_std: float = Field(0.02, gt=0, le=1_000, description="random rows are normal with this standard deviation")
    transfer: Transfer = Field(
        "full",
        description="pretrained rows: full: train them all; frozen: never; gradual: by the schedule of `unfreeze`; "
        "residual (item): frozen, beside a learned offset per item that starts at zero",
    )
    unfreeze: tuple[Unfreeze, ...] = Field(
        (), max_length=10_000, description="gradual: a list of {epoch, share}, both rising; before it none is trained"
    )
    id_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="residual: share of items whose offset a training step leaves out, so that the towers do without",
    )
    rescale: bool = Field(
        True,
        description="scale pretrained vectors to the norm of a random row; another scale changes the effective learning rate",
    )
    missing: Literal["random", "zero", "mean"] = Field(
        "random", description="first values of a row without a vector; mean: the mean of the rows that have one"
    )
    optimizer: TableOptimizer | None = Field(None, description="empty: training.table_optimizer")
    lookup: Literal["row", "bag"] | None = Field(
        None,
        description="user: row (the default): its rows travel between ranks in one exchange with the items'; bag: pooled with "
        "the queries' features, which can be table_row_wise, table_column_wise and grid_shard",
    )
    pooling: Literal["mean", "sum"] = Field("mean", description="lists: how the embeddings of their values become one")

    @model_validator(mode="after")
    def _schedule_rises(self) -> Self:
        if self.transfer == "gradual" and not self.unfreeze:
            raise ValueError("transfer is gradual, but unfreeze is empty; give it steps such as {epoch: 2, share: 0.25}")
        if self.transfer != "gradual" and self.unfreeze:
            raise ValueError(
                f"unfreeze is given, but transfer is {self.transfer}; set transfer to gradual, or leave unfreeze out"
            )
        if self.transfer != "residual" and self.id_dropout:
            raise ValueError(f"id_dropout drops the offsets of transfer residual, but transfer is {self.transfer}")
        for one, other in pairwise(self.unfreeze):
            if other.epoch <= one.epoch or other.share <= one.share:
                raise ValueError(
                    f"unfreeze goes back: epoch {one.epoch} share {one.share:g} is followed by epoch {other.epoch} share "
                    f"{other.share:g}; both have to rise, for a row that was trained cannot be frozen as it was"
                )
        return self

    def trained_share(self, epoch: int) -> float:
        """Share of the rows that `epoch` (1-based) trains.

        >>> table = TableConfig(transfer="gradual", unfreeze=({"epoch": 3, "share": 0.25}, {"epoch": 5, "share": 1}))
        >>> [table.trained_share(epoch) for epoch in range(1, 6)]
        [0.0, 0.0, 0.25, 0.25, 1.0]
        """
        if self.transfer != "gradual":
            return 0.0 if self.transfer in ("frozen", "residual") else 1.0
        return max((step.share for step in self.unfreeze if step.epoch <= epoch), default=0.0)


def require_width(vectors: int, dim: int, *, table: str) -> None:
    """InputError unless pretrained vectors of `vectors` numbers fit a table of width `dim`."""
    if vectors != dim:
        shorter = f", or embeddings.pca_dim to {dim}" if vectors > dim else ""
        raise InputError(
            f"embeddings: the vectors of table {table!r} have {vectors} numbers, but the table has {dim}; set "
            f"tables.{table}.dim to {vectors} (a learned layer then projects it to model.embedding_dim){shorter}"
        )
