"""Settings of the optimizers and their learning-rate schedules."""

import math
from typing import Literal

from pydantic import Field

from recsys_core.config import MAX_COUNT, Settings

TableOptimizerKind = Literal["rowwise_adagrad", "adagrad", "sgd", "adam", "partial_rowwise_adam"]
GPU_ONLY_OPTIMIZERS = ("adam", "partial_rowwise_adam")
"""FBGEMM has these fused optimizers for CUDA only. On a CPU, adam works for a replicated (data_parallel) table."""

MAX_LEARNING_RATE = 1e6


class Schedule(Settings):
    """A learning rate with a linear warm-up and a decay to 0."""

    learning_rate: float = Field(gt=0, le=MAX_LEARNING_RATE, description="learning rate after the warm-up")
    warmup_steps: int = Field(
        100, ge=0, le=MAX_COUNT, description="number of steps in which the learning rate rises linearly from 0"
    )
    lr_decay: Literal["none", "linear", "cosine"] = Field(
        "none", description="decay of the learning rate to 0, from the end of the warm-up to the end of the last epoch"
    )

    def scale(self, step: int, *, total_steps: int) -> float:
        """Return the factor on the learning rate at `step` (0-based). It depends on the step alone: no state is saved.

        >>> [Schedule(learning_rate=1, warmup_steps=1, lr_decay="linear").scale(s, total_steps=5) for s in range(5)]
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
        description="rowwise_adagrad: one step size per row; adagrad: one step size per value; sgd; adam and "
        "partial_rowwise_adam: GPUs only",
    )
    learning_rate: float = Field(0.05, gt=0, le=MAX_LEARNING_RATE, description="learning rate after the warm-up")
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1_000,
        description="strength of the L2 penalty on the rows that a step looks up. The penalty counts a row once, even if "
        "several ranks look it up. Only the tables item, user and item_offset support it",
    )
    gradient_clip_value: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="bound on the absolute value of each gradient value of a row; empty: no clipping",
    )


class DenseOptimizer(Schedule):
    """Optimizer of the towers' layers."""

    kind: Literal["adam", "adagrad", "sgd"] = Field("adam", description="adam: AdamW (decoupled weight decay); adagrad; sgd")
    learning_rate: float = Field(1e-3, gt=0, le=MAX_LEARNING_RATE, description="learning rate after the warm-up")
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1_000,
        description="weight decay of weight matrices; biases, norms, history pooling and temperature do not decay. adam "
        "uses decoupled weight decay; adagrad and sgd use an L2 penalty",
    )
    gradient_clip_norm: float | None = Field(
        None, gt=0, le=1e9, description="largest norm of the gradient of all layers together; empty: no clipping"
    )
