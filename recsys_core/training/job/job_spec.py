"""Files of a job: the JSON job description that every rank reads, and the results that rank 0 writes."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from recsys_core.config import Frozen
from recsys_core.manifests import Dataset
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.training.config import TrainingConfig

JOB_FILE = "job.json"
METRICS_FILE, RESULT_FILE = "metrics.jsonl", "result.json"
CHECKPOINTS_FOLDER, PROFILE_FOLDER = "checkpoints", "profile"


class WarmStart(Frozen):
    """The champion that a training starts from, prepared for the ranks.

    Attributes:
        run_id: run of the champion.
        export: stage folder with the champion's tables and Adagrad accumulators.
        prepared: folder with two kinds of files. dense.safetensors has the champion's layers, named as in this run's model.
            Each table that is carried over has a file rows_<table>.npy. It is an int64 array with one entry per row of this
            run's table. The entry is the champion's row for the same id, or -1 for a new id.
    """

    run_id: str
    export: Path
    prepared: Path

    def row_path_by_table(self) -> dict[str, Path]:
        """Return the path of rows_<table>.npy by table, for the tables that are carried over."""
        return {path.stem.removeprefix("rows_"): path for path in sorted(self.prepared.glob("rows_*.npy"))}


class JobSpec(Frozen):
    """The part of a job that training and export share. interactions, embeddings, features: stage folders of the data."""

    work: Path
    spec: ModelSpec
    loss: LossConfig
    training: TrainingConfig
    interactions: Path
    embeddings: Path | None = None
    features: Path | None = None
    plan: Path

    def open_dataset(self) -> Dataset:
        """Open the stages of the ingested data."""
        return Dataset.open(interactions=self.interactions, embeddings=self.embeddings, features=self.features)

    @property
    def heartbeat(self) -> Path:
        """File that the ranks change while they work; the launching process watches it."""
        return self.work / "heartbeat"


class TrainJob(JobSpec):
    """Job that trains a model, and writes checkpoints, metrics.jsonl and result.json to the folder `work`.

    Attributes:
        attempt: number of the attempt, from 1.
        resume: verified checkpoint to resume from; None: the training starts from the initial model or from the champion.
        planned_ranks: world size of the original plan, if this attempt has fewer ranks; otherwise None. The original world size
            still determines the batches and the length of an epoch.
        warm: the champion to start from, if this is a warm start.
    """

    kind: Literal["train"] = "train"
    fingerprint: str
    attempt: int = 1
    resume: Path | None = None
    planned_ranks: int | None = None
    warm: WarmStart | None = None


class ExportJob(JobSpec):
    """Job that writes the vectors, tables and layers of the model in `checkpoint` to the folder `out`."""

    kind: Literal["export"] = "export"
    out: Path
    checkpoint: Path


Job = Annotated[TrainJob | ExportJob, Field(discriminator="kind")]
JOB_ADAPTER: TypeAdapter[TrainJob | ExportJob] = TypeAdapter(Job)


class Progress(Frozen):
    """One line of metrics.jsonl: means over the steps and ranks since the previous line."""

    step: int
    total_steps: int
    epoch: int
    loss: float
    learning_rate: float = Field(description="learning rate of training.table_optimizer")
    samples_per_s: float = Field(description="training examples per second, all ranks")
    ms_per_step: dict[str, float] = Field(
        {}, description="step: duration of a step; data: the part of it that waits for the loader"
    )
    embedding_bytes_per_s: float = Field(0.0, description="bytes of embedding rows looked up per second, all ranks")
    memory_bytes: dict[str, int] = Field({}, description="rss and peak hbm, each the maximum over the ranks")
    unfrozen: dict[str, float] = Field({}, description="trained share of the rows, for each gradually unfrozen table")
    validation: dict[str, float] = Field({}, description="validation metrics, in the last line of an epoch")


class TrainResult(Frozen):
    """Content of result.json, which rank 0 writes at the end of the training."""

    steps: int
    epochs: int
    examples: int
    final_loss: float
    samples_per_s: float
    world_size: int
    checkpoint: str = Field(description="folder name of the checkpoint that is the result")
    best_epoch: int | None
    validation: dict[str, float]
