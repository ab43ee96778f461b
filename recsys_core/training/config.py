"""Settings of the training: loop, optimizers, validation, checkpoints, restarts."""

from typing import Annotated, Literal

from pydantic import Field

from recsys_core.config import MAX_COUNT, OPERATIONAL, WEEK_S, Settings
from recsys_core.models.optimizer_config import DenseOptimizer, TableOptimizer

ValidationMetric = Literal["recall", "ndcg", "hit_rate"]
MAX_EPOCHS = 10_000
DenseParallel = Literal["auto", "replicated", "sharded"]


class ValidationConfig(Settings):
    """Validation during training: metrics on the validation split select the best epoch and stop training early."""

    metric: ValidationMetric = Field("ndcg", description="Metric that selects the best epoch and decides when to stop")
    k: int = Field(10, ge=1, le=1_000_000, description="Cut-off of the metric")
    candidates: Literal["all", "cold"] = Field(
        "all", description="Items that are ranked: all items, or only the items without a training event"
    )
    every_epochs: int = Field(
        1, ge=1, le=MAX_EPOCHS, description="Epochs between two validations; the last epoch is always validated"
    )
    patience: int | None = Field(
        3, ge=1, le=MAX_EPOCHS, description="Stop after this many validations without an improvement; empty: train all epochs"
    )
    max_users: int = Field(
        10_000, ge=1, le=MAX_COUNT, description="Validate on a fixed random sample of at most this many users"
    )


class WarmStartConfig(Settings):
    """Warm start from the champion: embedding rows are matched by id, layers are copied, new rows are initialised."""

    full_retrain_every: int = Field(
        7, ge=1, le=10_000, description="Train from scratch in every n-th run; 1: every run trains from scratch"
    )


class ProfileConfig(Settings):
    """Trace of some steps by torch.profiler: train/profile/rank-<r>.json.gz, for chrome://tracing or Perfetto."""

    after_steps: int = Field(20, ge=0, le=MAX_COUNT, description="Steps before the recording starts")
    steps: int = Field(5, ge=1, le=10_000, description="Number of recorded steps")


class TrainingConfig(Settings):
    """Loop, optimizers, checkpoints and restarts."""

    epochs: int = Field(10, ge=1, le=MAX_EPOCHS, description="Maximum number of passes over the training events")
    batch_size: int = Field(1024, ge=1, le=1_048_576, description="Examples per rank and step")
    table_optimizer: TableOptimizer = Field(
        default_factory=TableOptimizer, description="Optimizer of the embedding tables, fused into the backward pass"
    )
    dense_optimizer: DenseOptimizer = Field(default_factory=DenseOptimizer, description="Optimizer of the towers' layers")
    dense_parallel: DenseParallel = Field(
        "auto",
        description="Parallelism of the towers' layers: replicated on every rank (DDP) or sharded over the ranks (FSDP2); "
        "auto: sharded if weights, gradients and Adam's state would take more than 1 GiB on each of several ranks",
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="Precision of the towers' matrix products; tables and accumulators stay in fp32"
    )
    validation: ValidationConfig | None = Field(
        default_factory=ValidationConfig,
        description="Validation during training; empty: no validation, and the model of the last epoch is the result",
    )
    # OPERATIONAL excludes the setting from the fingerprint, which already contains the champion that the training starts from.
    warm_start: Annotated[WarmStartConfig | None, OPERATIONAL] = Field(
        default_factory=WarmStartConfig, description="Start from the champion if there is one; empty: always train from scratch"
    )
    seed: int = Field(7, ge=0, le=2**32 - 1, description="Seed of initialisation, shuffling, dropout and negative sampling")
    log_every_steps: int = Field(20, ge=1, le=MAX_COUNT, description="Steps between two lines of metrics.jsonl")
    checkpoint_every_steps: int = Field(
        1000, ge=1, le=MAX_COUNT, description="Steps between two checkpoints; the best and the last step are saved too"
    )
    keep_checkpoints: Annotated[int, OPERATIONAL] = Field(
        2, ge=1, le=10_000, description="Number of newest checkpoints that are kept, in addition to the best one"
    )
    profile: Annotated[ProfileConfig | None, OPERATIONAL] = Field(
        None, description="Record some steps with torch.profiler; empty: no recording"
    )
    max_attempts: Annotated[int, OPERATIONAL] = Field(
        2, ge=1, le=1_000, description="Maximum number of launches; a failed launch restarts from the last checkpoint"
    )
    min_processes: Annotated[int | None, OPERATIONAL] = Field(
        None,
        ge=1,
        le=1_000_000,
        description="After two failures in a row, continue with fewer ranks, down to this many; empty: never use fewer ranks",
    )
    start_timeout_s: Annotated[float, OPERATIONAL] = Field(
        180.0, gt=0, le=WEEK_S, description="Longest time from the start of all ranks to their first heartbeat, in s"
    )
    heartbeat_timeout_s: Annotated[float, OPERATIONAL] = Field(
        600.0, gt=0, le=WEEK_S, description="Longest time between two heartbeats of the ranks, in s"
    )
