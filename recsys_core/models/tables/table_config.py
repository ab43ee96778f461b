"""Settings of the optimizers and of one embedding table, and the checks of all tables."""

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import MAX_COUNT, Settings
from recsys_core.errors import InputError

TableOptimizerKind = Literal["rowwise_adagrad", "adagrad", "sgd", "adam", "partial_rowwise_adam"]
GPU_ONLY_OPTIMIZERS = ("adam", "partial_rowwise_adam")
"""FBGEMM has these fused optimizers for CUDA only. On a CPU, adam works for a replicated (data_parallel) table."""

MAX_LEARNING_RATE = 1e6
Transfer = Literal["full", "frozen", "gradual", "residual"]
ID_TABLES = ("item", "user")
"""Tables in which each item or user has exactly one row, so that single rows can be frozen."""
OFFSET_TABLE = "item_offset"
"""Table of the learned offsets that are added to frozen item vectors (transfer: residual)."""
HISTORY_OFFSET_TABLE = "history_offset"
"""Table of the learned offsets that are added to the vectors of items in histories (history.learn_offsets)."""
ITEM_TABLES = ("item", OFFSET_TABLE, HISTORY_OFFSET_TABLE)
"""Tables with one row per item, in the order of the items."""
TEACHER_TABLE = "item_teacher"
"""Frozen table of the pretrained item vectors, for the distillation loss."""


class Schedule(Settings):
    """A learning rate with a linear warm-up and a decay to 0."""

    learning_rate: float = Field(gt=0, le=MAX_LEARNING_RATE, description="learning rate after the warm-up")
    warmup_steps: int = Field(
        100, ge=0, le=MAX_COUNT, description="number of steps in which the learning rate rises linearly from 0"
    )
    lr_decay: Literal["none", "linear", "cosine"] = Field(
        "none",
        description="how the learning rate falls to 0 between the end of the warm-up and the end of the last epoch. With "
        "`none`, it stays constant",
    )

    def scale(self, step: int, *, total_steps: int) -> float:
        """Return the factor on the learning rate at `step` (0-based). It depends on the step alone, so no state is saved.

        >>> [Schedule(learning_rate=1, warmup_steps=1, lr_decay="linear").scale(step, total_steps=5) for step in range(5)]
        [0.5, 1.0, 0.75, 0.5, 0.25]
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        if self.lr_decay == "linear":
            return 1 - progress
        return (1 + math.cos(math.pi * progress)) / 2 if self.lr_decay == "cosine" else 1.0


class TableOptimizer(Schedule):
    """Optimizer of an embedding table, fused into the backward pass."""

    kind: TableOptimizerKind = Field(
        "rowwise_adagrad",
        description="optimizer. `rowwise_adagrad` has one step size per row, and `adagrad` has one step size per value. "
        "`adam` and `partial_rowwise_adam` need a GPU; on a CPU, `adam` is possible for a table with the sharding type "
        "`data_parallel`",
    )
    learning_rate: float = Field(0.05, gt=0, le=MAX_LEARNING_RATE, description="learning rate after the warm-up")
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1_000,
        description="strength of the L2 penalty on the rows that a step looks up. The penalty counts a row once, even if "
        "several ranks look it up. Only the tables `item`, `user`, `item_offset` and `history_offset` support it",
    )
    gradient_clip_value: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="largest absolute value in the gradient of a looked-up row. A row that several queries or ranks look up "
        "can have larger values, because a sharded table adds up their gradients after the clipping. Default: no clipping",
    )


class DenseOptimizer(Schedule):
    """Optimizer of the towers' layers."""

    kind: Literal["adam", "adagrad", "sgd"] = Field(
        "adam", description="optimizer. `adam` is AdamW, which has decoupled weight decay"
    )
    learning_rate: float = Field(1e-3, gt=0, le=MAX_LEARNING_RATE, description="learning rate after the warm-up")
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1_000,
        description="weight decay of weight matrices. Biases, layer norms, the weights of the history pooling and the "
        "temperature do not decay. `adam` uses decoupled weight decay; `adagrad` and `sgd` use an L2 penalty",
    )
    gradient_clip_norm: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="largest norm of the gradient of all layers together. Default: no clipping",
    )


def random_norm(std: float, dim: int) -> float:
    """Return the expected norm of a random row: `dim` values from a normal distribution with standard deviation `std`."""
    return std * math.sqrt(dim)


class UnfreezeStep(Settings):
    """One step of the schedule for transfer `gradual`: from `epoch` on, `share` of the rows is trained."""

    epoch: int = Field(
        ge=1, le=10_000, description="epoch from which `share` of the rows is trained; `1` is the first epoch of the run"
    )
    share: float = Field(
        ge=0,
        le=1,
        description="share of the table's rows that are trained. The rows with the most training events are trained first",
    )


class TableConfig(Settings):
    """One embedding table."""

    dim: int | None = Field(
        None,
        ge=4,
        le=16_384,
        multiple_of=4,
        description="width of a row. Default: the width of the table's pretrained vectors, otherwise `model.embedding_dim`",
    )
    init_std: float = Field(0.02, gt=0, le=1_000, description="standard deviation of the initial values of random rows")
    transfer: Transfer = Field(
        "full",
        description="how rows with a pretrained vector are trained. With `full`, they are trained from the first step. With "
        "`frozen`, they are never trained. With `gradual`, the schedule in `unfreeze` sets when they are trained. With "
        "`residual` (only for the table `item`), they are never trained, but a learned offset that starts at zero is added to "
        "each item",
    )
    unfreeze: tuple[UnfreezeStep, ...] = Field(
        (),
        max_length=10_000,
        description="schedule for `transfer: gradual`, as a list of `{epoch, share}` with rising values. No row is trained "
        "before the first epoch of the list",
    )
    id_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the items whose offset is removed at random in each training step, so that the towers also work "
        "without offsets. Only for `transfer: residual`",
    )
    rescale: bool = Field(
        True,
        description="scale pretrained vectors to the norm of a random row. Another norm would change the effective learning "
        "rate",
    )
    missing_vector_init: Literal["random", "zero", "mean"] = Field(
        "random",
        description="initial value of a row without a pretrained vector: random numbers (`random`), zeros (`zero`), or the "
        "mean of the pretrained vectors (`mean`)",
    )
    optimizer: TableOptimizer | None = Field(None, description="optimizer of this table. Default: `training.table_optimizer`")
    lookup: Literal["unpooled", "pooled"] | None = Field(
        None,
        description="how the ranks exchange rows of the table `user`. With `unpooled`, the rows are sent together with the "
        "rows of items. With `pooled`, the rows are sent together with the query features. Only `pooled` allows the sharding "
        "types `table_row_wise`, `table_column_wise` and `grid_shard`. Default: `unpooled`",
    )
    pooling: Literal["mean", "sum"] = Field(
        "mean", description="how the embeddings of the values of a list feature are combined into one vector"
    )

    @model_validator(mode="after")
    def _check_transfer(self) -> Self:
        if self.transfer == "gradual" and not self.unfreeze:
            raise ValueError("transfer is gradual, but unfreeze is empty; give it steps such as {epoch: 2, share: 0.25}")
        if self.transfer != "gradual" and self.unfreeze:
            raise ValueError(
                f"unfreeze is not empty, but transfer is {self.transfer}; set transfer to gradual, or leave unfreeze out"
            )
        if self.transfer != "residual" and self.id_dropout:
            raise ValueError(
                f"id_dropout drops the offsets of transfer residual, but transfer is {self.transfer}; leave id_dropout out"
            )
        for step, next_step in pairwise(self.unfreeze):
            if next_step.epoch <= step.epoch or next_step.share <= step.share:
                raise ValueError(
                    f"unfreeze does not rise: epoch {step.epoch} share {step.share:g} is followed by epoch {next_step.epoch} "
                    f"share {next_step.share:g}; make both rise, because a trained row cannot be frozen again"
                )
        return self

    def trained_share(self, epoch: int) -> float:
        """Return the share of rows that `epoch` (1-based) trains.

        >>> table = TableConfig(transfer="gradual", unfreeze=({"epoch": 3, "share": 0.25}, {"epoch": 5, "share": 1}))
        >>> [table.trained_share(epoch) for epoch in range(1, 6)]
        [0.0, 0.0, 0.25, 0.25, 1.0]
        """
        if self.transfer != "gradual":
            return 0.0 if self.transfer in ("frozen", "residual") else 1.0
        return max((step.share for step in self.unfreeze if step.epoch <= epoch), default=0.0)


def check_table_names(setting_name: str, table_names: Iterable[str], *, tables: Collection[str]) -> None:
    """Raise InputError if `setting_name` (such as "tables") names a table that the model does not have."""
    for table_name in table_names:
        if table_name not in tables:
            advice = (
                "set model.learn_user_embedding to true" if table_name == "user" else "name one of them, or declare the feature"
            )
            raise InputError(f"{setting_name}.{table_name}: the model has no such table; it has {sorted(tables)}; {advice}")


def check_tables(
    settings_by_table: Mapping[str, TableConfig],
    *,
    tables: Collection[str],
    tables_with_vectors: Collection[str],
    has_distillation: bool,
) -> None:
    """Raise InputError for settings of a missing table, and for settings that their table or the loss does not support.

    Args:
        tables: names of the model's tables.
        tables_with_vectors: names of the tables with pretrained vectors.
        has_distillation: whether the loss has a distillation term.
    """
    check_table_names("tables", settings_by_table, tables=tables)
    vectors_text = f"it has vectors of {sorted(tables_with_vectors) or 'no table'}"
    for table_name, settings in settings_by_table.items():
        if settings.transfer != "full" and table_name not in tables_with_vectors:
            raise InputError(
                f"tables.{table_name}.transfer is {settings.transfer}, but embeddings has no vectors of table {table_name!r} "
                f"({vectors_text}); add them, or set transfer to full"
            )
        if settings.missing_vector_init == "mean" and table_name not in tables_with_vectors:
            raise InputError(
                f"tables.{table_name}.missing_vector_init is mean, the mean of the pretrained vectors, but embeddings has no "
                f"vectors of table {table_name!r} ({vectors_text}); add them, or set missing_vector_init to random"
            )
        has_decay = settings.optimizer is not None and settings.optimizer.weight_decay > 0
        for is_set, setting, supporting_tables in (
            (has_decay, "optimizer.weight_decay", (*ITEM_TABLES, "user")),
            (settings.transfer == "gradual", "transfer gradual", ID_TABLES),
            (settings.transfer == "residual", "transfer residual", ("item",)),
            (settings.lookup is not None, "lookup", ("user",)),
        ):
            if is_set and table_name not in supporting_tables:
                raise InputError(
                    f"tables.{table_name}: {setting} is only for the tables {list(supporting_tables)}; leave it out"
                )
    if has_distillation and "item" not in tables_with_vectors:
        raise InputError(
            "loss.distillation keeps the similarities of the pretrained item vectors, but embeddings has no vectors of table "
            f"'item' ({vectors_text}); add them, or leave loss.distillation out"
        )


def check_width(vector_dim: int, table_dim: int | None, *, table: str) -> None:
    """Raise InputError if a table cannot have the width of its pretrained vectors.

    Args:
        table_dim: the setting `dim` of the table; None if the table takes the width of its vectors.
    """
    if table_dim is None and vector_dim % 4:
        pca_advice = f"set embeddings.pca_dim to {vector_dim // 4 * 4}" if vector_dim > 4 else "add zeros to them"
        raise InputError(
            f"embeddings: the vectors of table {table!r} have {vector_dim} numbers, but the width of a table is a multiple of "
            f"4; {pca_advice}"
        )
    if table_dim not in (None, vector_dim):
        raise InputError(
            f"embeddings: the vectors of table {table!r} have {vector_dim} numbers, but tables.{table}.dim is {table_dim}; "
            f"leave it out, and the table takes the width of its vectors"
            + (f", or set embeddings.pca_dim to {table_dim}" if table_dim is not None and vector_dim > table_dim else "")
        )
