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
        "none",
        description="how the learning rate falls to 0 between the end of the warm-up and the end of the last epoch. With "
        "none, it stays constant",
    )

    def scale(self, step: int, *, total_steps: int) -> float:
        """Return the factor on the learning rate at `step` (0-based). It depends on the step alone: no state is saved.

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
        description="optimizer. rowwise_adagrad has one step size per row, and adagrad has one step size per value. adam "
        "and partial_rowwise_adam run on GPUs only",
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
        description="largest absolute value in the gradient of a row. If empty, gradients are not clipped",
    )


class DenseOptimizer(Schedule):
    """Optimizer of the towers' layers."""

    kind: Literal["adam", "adagrad", "sgd"] = Field(
        "adam", description="optimizer. adam is AdamW, which has decoupled weight decay"
    )
    learning_rate: float = Field(1e-3, gt=0, le=MAX_LEARNING_RATE, description="learning rate after the warm-up")
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1_000,
        description="weight decay of weight matrices. Biases, layer norms, the weights of the history pooling and the "
        "temperature do not decay. adam uses decoupled weight decay; adagrad and sgd use an L2 penalty",
    )
    gradient_clip_norm: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="largest norm of the gradient of all layers together. If empty, gradients are not clipped",
    )
