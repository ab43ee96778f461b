"""Files of a job: the JSON job description that every rank reads, and the results that rank 0 writes."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from recsys_core.config import Frozen
from recsys_core.manifests import Dataset, RankingSettings
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
        export_folder: stage folder with the champion's tables and Adagrad accumulators.
        prepared_folder: folder with these files:
            dense.safetensors: the champion's layers, named as in this run's model.
            rows_<table>.npy for each table that is carried over: int64, for each row of this run's table, the row with the same
                id in the champion's table; -1 for a new id.
            vectors_<table>.npy for each table whose pretrained vectors are projected or come from the log: the vectors, rotated
                to be as near as possible to the champion's table. Vectors of another width than this table have no file.
    """

    run_id: str
    export_folder: Path
    prepared_folder: Path

    def row_path_by_table(self) -> dict[str, Path]:
        """Return the path of rows_<table>.npy by table, for the tables that are carried over."""
        return {path.stem.removeprefix("rows_"): path for path in sorted(self.prepared_folder.glob("rows_*.npy"))}

    def vectors_path_by_table(self) -> dict[str, Path]:
        """Return the path of vectors_<table>.npy by table, for the tables with rotated vectors."""
        return {path.stem.removeprefix("vectors_"): path for path in sorted(self.prepared_folder.glob("vectors_*.npy"))}


class JobSpec(Frozen):
    """The fields that the jobs of training and export have in common."""

    work_folder: Path
    spec: ModelSpec
    loss: LossConfig
    training: TrainingConfig
    interactions_folder: Path
    embeddings_folder: Path | None = None
    features_folder: Path | None = None
    log_vectors_folder: Path | None = None
    plan_path: Path

    def open_dataset(self) -> Dataset:
        """Open the results of the ingest stages."""
        return Dataset.open(
            interactions=self.interactions_folder,
            embeddings=self.embeddings_folder,
            features=self.features_folder,
            log_vectors=self.log_vectors_folder,
        )

    @property
    def heartbeat_path(self) -> Path:
        """File that the ranks change while they work; the launching process watches it."""
        return self.work_folder / "heartbeat"


class TrainJob(JobSpec):
    """Job that trains a model, and writes checkpoints, metrics.jsonl and result.json to `work_folder`.

    Attributes:
        attempt: number of the attempt, from 1.
        resume_folder: folder of the verified checkpoint from which the attempt resumes; None if there is no checkpoint.
        num_planned_ranks: world size of the original plan, if this attempt has fewer ranks; otherwise None. The original world
            size still determines the batches and the length of an epoch.
        warm_start: the champion from which the training starts; None for a training from scratch.
    """

    kind: Literal["train"] = "train"
    fingerprint: str
    attempt: int = 1
    resume_folder: Path | None = None
    num_planned_ranks: int | None = None
    warm_start: WarmStart | None = None


class ExportJob(JobSpec):
    """Job that writes the vectors, tables and layers of the model in `checkpoint_folder` to `output_folder`.

    ranking: settings of the rankings that the job writes; None for no rankings.
    """

    kind: Literal["export"] = "export"
    output_folder: Path
    checkpoint_folder: Path
    ranking: RankingSettings | None = None


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
        {}, description="step: duration of a step; data: part of this time that is spent waiting for the loader"
    )
    embedding_bytes_per_s: float = Field(0.0, description="bytes of embedding rows looked up per second, all ranks")
    memory_bytes: dict[str, int] = Field({}, description="rss and peak hbm, each the maximum over the ranks")
    unfrozen: dict[str, float] = Field({}, description="trained share of the rows, for each gradually unfrozen table")
    validation: dict[str, float] = Field({}, description="validation metrics, in the last line of an epoch")


class TrainResult(Frozen):
    """Content of result.json, which rank 0 writes at the end of the training."""

    num_steps: int
    num_epochs: int
    num_examples: int
    final_loss: float
    samples_per_s: float
    world_size: int
    checkpoint: str = Field(description="folder name of the checkpoint that is the result")
    best_epoch: int | None
    validation: dict[str, float]
