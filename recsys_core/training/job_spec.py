"""What a launched process group is asked to do: one JSON file, read by every rank."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from recsys_core.config import Frozen
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.training.config import TrainingConfig


class WarmStart(Frozen):
    """Where the champion's tables lie, and how they go on: `prepared` holds rows_<table>.npy for each table that does, int64
    [rows], the row in the champion's table or -1, and dense.safetensors with its layers under tonight's names.
    """

    run_id: str
    export: Path
    prepared: Path

    @property
    def tables(self) -> dict[str, Path]:
        """File of the rows of each table that goes on."""
        return {path.stem.removeprefix("rows_"): path for path in sorted(self.prepared.glob("rows_*.npy"))}


class TrainJob(Frozen):
    """Train `spec` from the stages in the named folders; checkpoints and metrics.jsonl go to `work`.

    attempt: which launch this is, from 1. resume: the verified checkpoint that it goes on from; none: the first model.
    planned_ranks: world size that batches and epochs are counted by, if this attempt has fewer ranks than were planned.
    """

    kind: Literal["train"] = "train"
    attempt: int = 1
    resume: Path | None = None
    planned_ranks: int | None = None
    work: Path
    fingerprint: str
    spec: ModelSpec
    loss: LossConfig
    training: TrainingConfig
    interactions: Path
    embeddings: Path | None
    features: Path | None
    plan: Path
    warm: WarmStart | None = None


class ExportJob(Frozen):
    """Write vectors and tables of the model in `checkpoint` to `out`."""

    kind: Literal["export"] = "export"
    work: Path
    out: Path
    spec: ModelSpec
    loss: LossConfig
    training: TrainingConfig
    interactions: Path
    features: Path | None
    plan: Path
    checkpoint: Path


Job = Annotated[TrainJob | ExportJob, Field(discriminator="kind")]
JOB: TypeAdapter[TrainJob | ExportJob] = TypeAdapter(Job)


class Progress(Frozen):
    """One line of metrics.jsonl. loss is the mean over all ranks since the line before."""

    step: int
    total_steps: int
    epoch: int
    loss: float
    learning_rate: float = Field(description="of the tables without an optimizer of their own")
    samples_per_s: float
    ms_per_step: dict[str, float] = Field({}, description="step, and data: its part spent waiting for the loader")
    embedding_bytes_per_s: float = Field(0.0, description="rows looked up, all ranks")
    memory_bytes: dict[str, int] = Field({}, description="of the rank with the most: rss, and hbm at its highest")
    unfrozen: dict[str, float] = Field({}, description="share of the rows that the epoch trains, by gradually unfrozen table")
    validation: dict[str, float] = Field({}, description="at the end of an epoch, by metric")


class TrainResult(Frozen):
    """What rank 0 says when training is over."""

    steps: int
    epochs: int
    examples: int
    final_loss: float
    samples_per_s: float
    world_size: int
    checkpoint: str
    best_epoch: int | None
    validation: dict[str, float]
