"""What the user says about who moves the parameters, and how fast."""

import math
from typing import Literal

from pydantic import Field

from recsys_core.config import MANY, Settings

TableOptimizerKind = Literal["rowwise_adagrad", "adagrad", "sgd", "adam", "partial_rowwise_adam"]
GPU_ONLY = ("adam", "partial_rowwise_adam")
"""FBGEMM has these fused optimizers in CUDA alone; on a CPU adam runs where a table is replicated (data_parallel)."""

MOST_RATE = 1e6


class Schedule(Settings):
    """A learning rate over the steps of a training."""

    learning_rate: float = Field(gt=0, le=MOST_RATE, description="full learning rate")
    warmup_steps: int = Field(100, ge=0, le=MANY, description="steps over which it rises linearly from 0")
    decay: Literal["none", "linear", "cosine"] = Field(
        "none", description="how it falls to 0 from the end of the warm-up to the end of the last epoch"
    )

    def scale(self, step: int, *, total_steps: int) -> float:
        """Share of the full learning rate at `step` (0-based): a function of the step alone, so there is no state to save.

        >>> [Schedule(learning_rate=1, warmup_steps=1, decay="linear").scale(s, total_steps=5) for s in range(5)]
        [0.5, 1.0, 0.75, 0.5, 0.25]
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        if self.decay == "linear":
            return 1 - done
        return (1 + math.cos(math.pi * done)) / 2 if self.decay == "cosine" else 1.0


class TableOptimizer(Schedule):
    """Updates an embedding table in the backward pass."""

    kind: TableOptimizerKind = Field(
        "rowwise_adagrad",
        description="one step size per row (rowwise_adagrad) or per number (adagrad); adam and partial_rowwise_adam on GPUs",
    )
    learning_rate: float = Field(0.05, gt=0, le=MOST_RATE, description="full learning rate")
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1_000,
        description="L2 penalty on the rows that a step looks up, each counted once over all ranks (item, user and item_offset "
        "tables)",
    )
    clip: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="largest absolute value of a number in the gradient of one looked-up row; empty: no limit",
    )


class DenseOptimizer(Schedule):
    """Updates the towers' layers."""

    kind: Literal["adam", "adagrad", "sgd"] = Field("adam", description="adam: with decoupled weight decay (AdamW)")
    learning_rate: float = Field(1e-3, gt=0, le=MOST_RATE, description="full learning rate")
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1_000,
        description="of weight matrices, not of biases, norms, the pooling or the temperature; decoupled for adam, an L2 "
        "penalty for the others",
    )
    clip: float | None = Field(
        None, gt=0, le=1e9, description="largest norm of the gradient of all layers together; empty: no limit"
    )
