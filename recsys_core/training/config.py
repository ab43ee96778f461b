"""Settings of the training: loop, optimizers, validation, checkpoints, restarts."""

import math
from typing import Annotated, Literal

from pydantic import Field

from recsys_core.config import MAX_COUNT, OPERATIONAL, WEEK_S, Settings
from recsys_core.models.tables.table_config import DenseOptimizer, TableOptimizer

ValidationMetric = Literal["recall", "ndcg", "hit_rate"]
MAX_EPOCHS = 10_000
MAX_BATCH_SIZE = 1_048_576
DenseParallel = Literal["auto", "replicated", "sharded"]


class ValidationConfig(Settings):
    """Validation during training: metrics on the validation split select the best epoch and stop training early."""

    metric: ValidationMetric = Field("ndcg", description="Metric that selects the best epoch and ends the training early")
    k: int = Field(
        10, ge=1, le=1_000_000, description="Cut-off of the metric: the number of top-ranked items that it takes into account"
    )
    candidates: Literal["all", "cold"] = Field(
        "all", description="Items that are ranked. `all` means all items; `cold` means only the items without a training event"
    )
    every_epochs: int = Field(
        1, ge=1, le=MAX_EPOCHS, description="Number of epochs between two validations. The last epoch is always validated"
    )
    patience: int | None = Field(
        3,
        ge=1,
        le=MAX_EPOCHS,
        description="Number of validations without an improvement after which the training stops. With `null`, all epochs are "
        "trained",
    )
    max_users: int = Field(
        10_000,
        ge=1,
        le=MAX_COUNT,
        description="Maximum number of validation users. If there are more, a fixed random sample is used",
    )


class WarmStartConfig(Settings):
    """Warm start from the champion: embedding rows are matched by id, layers are copied, new rows are initialised."""

    full_retrain_every: int = Field(
        7,
        ge=1,
        le=10_000,
        description="Every n-th training is from scratch: a run trains from scratch if the champion is the result of n - 1 "
        "warm starts in a row. With `1`, every run trains from scratch",
    )


class ProfileConfig(Settings):
    """Trace of some steps by torch.profiler: train/profile/rank-<r>.json.gz, for chrome://tracing or Perfetto."""

    after_steps: int = Field(20, ge=0, le=MAX_COUNT, description="Number of steps before the recording starts")
    steps: int = Field(5, ge=1, le=10_000, description="Number of recorded steps")


class TrainingConfig(Settings):
    """Loop, optimizers, checkpoints and restarts."""

    epochs: int = Field(10, ge=1, le=MAX_EPOCHS, description="Maximum number of passes over the training events")
    batch_size: int = Field(1024, ge=1, le=MAX_BATCH_SIZE, description="Number of training examples per rank and step")
    table_optimizer: TableOptimizer = Field(
        default_factory=TableOptimizer, description="Optimizer of the embedding tables, fused into the backward pass"
    )
    dense_optimizer: DenseOptimizer = Field(default_factory=DenseOptimizer, description="Optimizer of the towers' layers")
    dense_parallel: DenseParallel = Field(
        "auto",
        description="Whether every rank has a copy of the towers' layers (`replicated`, DDP) or the layers are sharded over "
        "the ranks (`sharded`, FSDP2). With `auto`, they are sharded if there are several ranks and the weights, gradients "
        "and Adam state would take more than 1 GiB on each rank",
    )
    averaged_epochs: int = Field(
        1,
        ge=1,
        le=MAX_EPOCHS,
        description="Number of epochs over which the weights are averaged. The average is exponential: after each epoch, it "
        "moves towards the weights by 2/(`averaged_epochs` + 1) of the difference. In the first epochs, it is the mean over "
        "all epochs so far. The average is validated and exported, while the training continues with the weights. The average "
        "takes as much memory as the weights. With `1`, the weights are not averaged",
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="Precision of the matrix products of the towers. Tables and optimizer states stay in `fp32`"
    )
    validation: ValidationConfig | None = Field(
        default_factory=ValidationConfig,
        description="Validation during training. With `null`, there is no validation, and the model of the last epoch is the "
        "result",
    )
    # OPERATIONAL excludes the setting from the fingerprint, which already contains the champion that the training starts from.
    warm_start: Annotated[WarmStartConfig | None, OPERATIONAL] = Field(
        default_factory=WarmStartConfig,
        description="Start from the champion if there is one. With `null`, every run trains from scratch",
    )
    refit: Annotated[bool, OPERATIONAL] = Field(
        False,
        description="After a promotion, train the same model again, with the validation and test events as training events, "
        "and stop after the epoch that was the best epoch of the first training. The result is served as another version. Its "
        "metrics are unknown, because no events are left to measure them",
    )
    seed: int = Field(7, ge=0, le=2**32 - 1, description="Seed of initialisation, shuffling, dropout and negative sampling")
    log_every_steps: int = Field(20, ge=1, le=MAX_COUNT, description="Number of steps between two lines of `metrics.jsonl`")
    checkpoint_every_steps: int = Field(
        1000,
        ge=1,
        le=MAX_COUNT,
        description="Number of steps between two checkpoints. The best epoch and the last step are also saved",
    )
    keep_checkpoints: Annotated[int, OPERATIONAL] = Field(
        2,
        ge=1,
        le=10_000,
        description="Number of newest checkpoints that are kept. Older checkpoints are removed, except the best one, because "
        "it may be the result of the training",
    )
    profile: Annotated[ProfileConfig | None, OPERATIONAL] = Field(
        None, description="Record some steps with `torch.profiler`. Default: no recording"
    )
    max_attempts: Annotated[int, OPERATIONAL] = Field(
        2,
        ge=1,
        le=1_000,
        description="Maximum number of attempts to train. An attempt after a failure continues from the last checkpoint",
    )
    min_processes: Annotated[int | None, OPERATIONAL] = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Smallest number of ranks with which the training may continue. After two failures in a row, the training "
        "continues with fewer ranks, so `max_attempts` must be at least 3. If the host has fewer GPUs than ranks, one "
        "failure is enough. Default: never fewer ranks",
    )
    start_timeout_s: Annotated[float, OPERATIONAL] = Field(
        180.0,
        gt=0,
        le=WEEK_S,
        description="Longest time in seconds from the start of all ranks to the first heartbeat. A heartbeat shows that the "
        "training makes progress",
    )
    heartbeat_timeout_s: Annotated[float | None, OPERATIONAL] = Field(
        None,
        gt=0,
        le=WEEK_S,
        description="Longest time in seconds between two heartbeats of the training. Default: ten times the longest measured "
        "duration of `log_every_steps` steps, a validation or a checkpoint, but at least 60 (600 with `profile`); 600 in the "
        "export and before the first measurement",
    )

    def num_saved_checkpoints(self, *, num_steps: int) -> int:
        """Return the largest number of checkpoints that a training of `num_steps` steps writes.

        The last step is always saved. Each validation before the last epoch may find the best checkpoint so far.
        """
        num_best_saves = 0 if self.validation is None else (self.epochs - 1) // self.validation.every_epochs
        return math.ceil(num_steps / self.checkpoint_every_steps) + num_best_saves

    def max_num_checkpoints(self, *, num_steps: int) -> int:
        """Return the largest number of checkpoints that exist at the same time.

        A new checkpoint is complete before an old one is removed, and the best checkpoint is kept in addition.
        """
        return min(self.keep_checkpoints + 1 + (self.validation is not None), self.num_saved_checkpoints(num_steps=num_steps))
