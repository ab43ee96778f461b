"""What the user says about training."""

from typing import Literal

from pydantic import Field

from recsys_core.config import MANY, WEEK_S, Settings
from recsys_core.models.optimizer_config import DenseOptimizer, TableOptimizer

ValidationMetric = Literal["recall", "ndcg", "hit_rate"]
MOST_EPOCHS = 10_000
DenseParallel = Literal["auto", "replicated", "sharded"]


class ValidationConfig(Settings):
    """Metrics of the validation split over the full catalogue while training; the best epoch's model is the result."""

    metric: ValidationMetric = Field("ndcg", description="decides which epoch is the best, and when to stop")
    k: int = Field(10, ge=1, le=1_000_000, description="cut-off of the metric")
    catalogue: Literal["all", "cold"] = Field(
        "all", description="what is ranked: all items, or those without a training event among themselves"
    )
    every_epochs: int = Field(1, ge=1, le=MOST_EPOCHS, description="measure after every so many epochs, and after the last")
    patience: int | None = Field(
        3, ge=1, le=MOST_EPOCHS, description="stop after this many measurements without a better one; empty: train all epochs"
    )
    max_users: int = Field(10_000, ge=1, le=MANY, description="a fixed random sample of this many users at most")


class WarmStartConfig(Settings):
    """A night starts from the champion: rows follow their ids, layers go on, only what is new starts from nothing."""

    full_retrain_every: int = Field(
        7,
        ge=1,
        le=10_000,
        description="nights: this many after the last full training there is one from scratch again; 1: every night",
    )


class ProfileConfig(Settings):
    """torch's profiler around some steps: train/profile/rank-<r>.json.gz, to be opened in chrome://tracing or Perfetto."""

    after_steps: int = Field(20, ge=0, le=MANY, description="steps that are left alone first")
    steps: int = Field(5, ge=1, le=10_000, description="steps that are recorded")


class TrainingConfig(Settings):
    """Loop, optimizers, checkpoints and restarts."""

    epochs: int = Field(10, ge=1, le=MOST_EPOCHS, description="passes over the training events at most")
    batch_size: int = Field(1024, ge=1, le=1_048_576, description="examples per rank and step")
    table_optimizer: TableOptimizer = Field(
        default_factory=TableOptimizer, description="of the embedding tables, fused into the backward pass"
    )
    dense_optimizer: DenseOptimizer = Field(default_factory=DenseOptimizer, description="of the towers' layers")
    dense_parallel: DenseParallel = Field(
        "auto",
        description="of the towers' layers: replicated on every rank (DDP), or sharded over the ranks (FSDP2); auto: sharded "
        "where weights, gradients and Adam's state would take more than 1 GiB on each of several ranks",
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of the towers' matrix products; tables and sums stay fp32")
    validation: ValidationConfig | None = Field(
        default_factory=ValidationConfig, description="empty: no measurement, the last epoch's model is the result"
    )
    warm_start: WarmStartConfig | None = Field(
        default_factory=WarmStartConfig, description="start from the champion, if there is one; empty: always from scratch"
    )
    seed: int = Field(7, ge=0, le=2**32 - 1, description="initialisation, shuffling, dropout and negatives")
    log_every_steps: int = Field(20, ge=1, le=MANY, description="a line in metrics.jsonl every so many steps")
    checkpoint_every_steps: int = Field(1000, ge=1, le=MANY, description="besides the best and the last one")
    keep_checkpoints: int = Field(2, ge=1, le=10_000, description="older ones are removed")
    profile: ProfileConfig | None = Field(None, description="record some steps with torch's profiler; empty: none")
    attempts: int = Field(
        2, ge=1, le=1_000, description="a failed torchrun is started anew from the last checkpoint, this many launches in all"
    )
    min_processes: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="the second failure in a row goes on with fewer ranks, down to this many; empty: never fewer",
    )
    start_timeout_s: float = Field(180.0, gt=0, le=WEEK_S, description="until the first sign of life of the trainer")
    silence_timeout_s: float = Field(600.0, gt=0, le=WEEK_S, description="longest time without a sign of life while training")
