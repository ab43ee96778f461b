"""What the stages from the plan to the registration leave behind."""

from typing import ClassVar, Literal

from pydantic import Field

from recsys_core.config import Frozen
from recsys_core.manifests.stage_folder import Manifest


class PlanManifest(Manifest):
    """plan.json (recsys_core.sharding.plan_file.PlanFile): what training executes."""

    kind: ClassVar[str] = "plan"
    world_size: int
    device: Literal["cpu", "cuda"]


class TrainManifest(Manifest):
    """checkpoint/ (torch.distributed.checkpoint), metrics.jsonl, model.json (ModelSpec), plan.json (that was
    executed last), and where asked for profile/.
    """

    kind: ClassVar[str] = "train"
    world_size: int
    steps: int
    epochs: int
    examples: int
    final_loss: float
    samples_per_s: float
    attempts: int
    best_epoch: int | None = Field(description="the epoch whose model this is; none where nothing was measured")
    validation: dict[str, float] = Field(description="of that model on the validation split, e.g. ndcg@10")
    warm_from: str | None = Field(None, description="run whose model this one started from; none: trained from scratch")
    warm_nights: int = Field(0, description="trainings since the last from scratch, along the runs that each started from")


class ExportManifest(Manifest):
    """What serving and evaluation need, each rank having written its own rows.

    item_vectors.npy float32 [items, dim]; for split in (validation, test): query_vectors_<split>.npy float32 [n, dim] and
    query_users_<split>.npy int64 [n] (user rows; users with at least one target in that split; history before the split).
    Vectors are scored by inner product: with cosine similarity they are already normalised.
    history_items.npy float32 [items, width]: what stands for each item in a history. table_<name>.npy float32 [rows, dim]: the
    embedding tables; state_<name>.npy: what Adagrad has summed up for them, float32 [rows] (rowwise_adagrad) or [rows, dim]
    (adagrad), of trained tables with one of these optimizers; dense.safetensors: all that is not a table; model.json:
    recsys_core.models.spec.ModelSpec.
    """

    kind: ClassVar[str] = "export"
    items: int
    dim: int
    similarity: Literal["cosine", "dot"]
    queries: dict[str, int]


class EvaluationManifest(Manifest):
    """metrics.json (flat) and popularity.npy int32 [items]: item rows by falling popularity over train and validation."""

    kind: ClassVar[str] = "evaluation"
    metrics: dict[str, float] = Field(description="flat, e.g. test/recall@20, baseline/popularity/recall@20")


class IndexReport(Frozen):
    """One index beside exact search, on the evaluation queries."""

    recall: float = Field(description="share of the exact top `k` that the index returns")
    k: int
    ms_per_query: float
    bytes: int
    parameters: dict[str, int]


class IndexManifest(Manifest):
    """<kind>.faiss for each built kind; `served` is the one that goes into the package."""

    kind: ClassVar[str] = "index"
    served: str
    similarity: Literal["cosine", "dot"]
    dim: int
    items: int
    reports: dict[str, IndexReport]


class PackageManifest(Manifest):
    """package/: everything a recsys_core.serving.retriever.Retriever loads, with checksums of its own."""

    kind: ClassVar[str] = "package"
    bytes: int
    served_index: str
    quantization: Literal["int8", "none"]


class RegistrationManifest(Manifest):
    """registration.json: the model version that MLflow gave."""

    kind: ClassVar[str] = "registration"
    model_name: str
    version: str
    alias: Literal["champion", "challenger"]
    promoted: bool
    reasons: tuple[str, ...]
    alarm: str | None = Field(None, description="what was wrong with the champion that this version was to be compared with")
    mlflow_run_id: str
    metrics: dict[str, float]
