"""Manifests of the stages from the sharding plan to the registration, and the list of all stages."""

from collections.abc import Mapping
from typing import ClassVar, Literal, cast

from pydantic import Field

from recsys_core.config import Frozen
from recsys_core.manifests.data_stages import (
    DataReportManifest,
    EmbeddingsManifest,
    FeaturesManifest,
    InteractionsManifest,
    LogVectorsManifest,
)
from recsys_core.manifests.stage_folder import Manifest, StageGroup


class PlanManifest(Manifest):
    """plan.json (recsys_core.sharding.plan_file.PlanFile): the sharding that training executes."""

    stage: ClassVar[str] = "plan_sharding"
    group: ClassVar[StageGroup] = "training"
    pages: ClassVar[Mapping[str, str]] = {"plan": "plan_sharding/plan.html"}
    world_size: int
    device: Literal["cpu", "cuda"]


class TrainManifest(Manifest):
    """The trained model and its metrics.

    Files: checkpoint/ (torch.distributed.checkpoint), metrics.jsonl, model.json (ModelSpec), plan.json and, with
    training.profile, profile/. A new attempt with fewer ranks makes its own sharding plan; plan.json is the plan of the last
    attempt.
    """

    stage: ClassVar[str] = "train"
    group: ClassVar[StageGroup] = "training"
    pages: ClassVar[Mapping[str, str]] = {"loss": "loss.png"}
    world_size: int
    num_steps: int
    num_epochs: int
    num_examples: int
    final_loss: float
    samples_per_s: float
    num_attempts: int = Field(description="number of attempts, including failed attempts")
    best_epoch: int | None = Field(
        description="epoch with the best validation metric, whose model the checkpoint holds; null if there is no validation"
    )
    validation: dict[str, float] = Field(description="metrics of the trained model on the validation split, e.g. ndcg@10")
    temperature: float | None = Field(
        None, description="temperature of the loss at the start; null in runs of earlier versions"
    )
    temperature_trials: dict[str, float] = Field(
        {}, description="validation metric after one epoch, by temperature; empty unless model.temperature is auto"
    )
    warm_from: str | None = Field(None, description="run whose model this training started from; null: trained from scratch")
    num_warm_starts: int = Field(0, description="number of warm starts in a row since the last training from scratch")


class RankingSettings(Frozen):
    """The evaluation settings that determine the rankings of the test and validation users."""

    k: int = Field(description="length of the top lists")
    top_only: bool = Field(description="whether only targets in the top lists have their exact position")
    exclude_seen: bool = Field(description="whether items that a user has seen are not ranked")
    max_users: int | None = Field(description="number of sampled users of each split; null: all users")


class ExportManifest(Manifest):
    """Vectors and parameters for evaluation, index and serving. Each rank writes its own rows.

    The score of an item is the inner product of two vectors. If `similarity` is cosine, the vectors are normalised. With a
    popularity term, the normalised vector is followed by one more number: the weight of popularity in a query vector, and the
    popularity in an item vector. Files:

        item_vectors.npy: float32 [items, dim].
        query_vectors_<split>.npy: float32 [queries, dim]; split is validation or test. One query per user with at least one
            event in the split, with the user's history before the split.
        query_users_<split>.npy: int64 [queries], user rows.
        history_items.npy: float32 [items, width], the vector that represents each item in a history.
        table_<name>.npy: float32 [rows, dim], the embedding tables.
        state_<name>.npy: float32 [rows] (rowwise_adagrad) or [rows, dim] (adagrad), the Adagrad accumulator of each trained
            table with one of these optimizers.
        dense.safetensors: all other parameters.
        block_history.npy: float32 [items, block width]. The spectral block of a query is the normalised sum of these vectors
            over the items of the history.
        block_maps.safetensors: query_map and item_map, float32 [trained width + block width, dim], which map the
            concatenation of a trained vector and its block to a query vector or an item vector, and similar_map, float32
            [dim, dim], which maps an item vector to a query for similar items.
            A model without a spectral block has neither file.
        model.json: recsys_core.models.spec.ModelSpec.

    If `ranking` is not null, there are rankings of the items by the model, for the known users in the order of the queries:

        ranking_<split>_top.npy: int32 [known users, k], item rows, best first; -1 after the last candidate.
        ranking_<split>_positions.npy: int64 [targets], position of each target; see `Ranking.position_T`.
        ranking_<split>_cold_positions.npy: int64 [cold targets], positions in the ranking of the cold items.

    If there also are pretrained vectors of items, the files zero_shot_ranking_test_top.npy, ..._positions.npy and
    ..._cold_positions.npy have the rankings by these vectors, for all users of the test split.
    """

    stage: ClassVar[str] = "export"
    group: ClassVar[StageGroup] = "evaluation"
    num_items: int
    dim: int
    similarity: Literal["cosine", "dot"]
    num_queries: dict[str, int] = Field(description="number of queries by split")
    ranking: RankingSettings | None = Field(None, description="settings of the stored rankings; null: there are no rankings")
    popularity_weight: float | None = Field(
        None, description="weight of the popularity term, chosen by the validation; null: there was no choice"
    )
    spectral_block_weight: float | None = Field(None, description="weight of the spectral block; null: there is no block")

    @property
    def weight_by_term(self) -> dict[str, float]:
        """The weight of each term of the score, by name. The export chooses a weight, or the config sets it."""
        optional_weight_by_term = {"spectral block": self.spectral_block_weight, "popularity": self.popularity_weight}
        return {term: weight for term, weight in optional_weight_by_term.items() if weight is not None}


class SliceReport(Frozen):
    """Metrics of the model over a subset of the test events. Each event's item is ranked among all items."""

    name: str
    num_users: int
    num_targets: int
    min_users: int = Field(description="number of users below which there are no metrics")
    metrics: dict[str, float] = Field(description="metrics by name, e.g. recall@20; empty if there are too few users")
    half_widths: dict[str, float]


class EvaluationManifest(Manifest):
    """Exact metrics of the model and the baselines.

    Files:
        metrics.json: `metrics`.
        popularity.npy: int32 [items], item rows by descending popularity over train and validation.
        user_metrics.parquet: metrics of each test user; see `write_user_metrics`.
        positions.parquet: position of each test target in the rankings of the model and the baselines; see `write_positions`.
    """

    stage: ClassVar[str] = "evaluate"
    group: ClassVar[StageGroup] = "evaluation"
    pages: ClassVar[Mapping[str, str]] = {"recall": "recall.png"}
    metrics: dict[str, float] = Field(description="metrics by name, e.g. test/recall@20, baseline/popularity/recall@20")
    half_widths: dict[str, float] = Field(
        {}, description="half the width of the confidence interval of each metric that is a mean over the users"
    )
    slices: tuple[SliceReport, ...] = ()


class SearchPoint(Frozen):
    """Recall and latency of an index with one setting of its search."""

    parameters: dict[str, int]
    recall: float
    ms_per_query: float


class IndexReport(Frozen):
    """Comparison of one index with exact search on test queries."""

    recall: float = Field(description="share of the exact top `k` that the index returns")
    k: int
    ms_per_query: float
    size_bytes: int
    shards: int = Field(1, description="number of files of the index, each with a part of the items")
    parameters: dict[str, int]
    tried: tuple[SearchPoint, ...] = Field((), description="search settings that were measured to reach the recall target")


class IndexManifest(Manifest):
    """The indexes and their comparison.

    Files:
        <kind>.faiss, or <kind>.0.faiss, <kind>.1.faiss, ... for several shards: each index. With `auto`, only the flat index,
            the chosen index and the indexes in the config are kept.
        served_recall.parquet: recall of the served index for each measured test query; columns user (int64, row) and recall.
    """

    stage: ClassVar[str] = "build_index"
    group: ClassVar[StageGroup] = "release"
    pages: ClassVar[Mapping[str, str]] = {"indexes": "indexes.png"}
    served_index: str = Field(description="kind of the index that goes into the package")
    similarity: Literal["cosine", "dot"]
    dim: int
    num_items: int
    recall_target: float | None = None
    choice: str | None = Field(
        None, description="why this index was chosen, if `index.served.kind` is `auto`; null for a kind that the config sets"
    )
    warning: str | None = Field(None, description="recall target that the served index misses, and the recall of the index")
    reports: dict[str, IndexReport]

    @property
    def notes(self) -> tuple[str, ...]:
        """The reason of the choice and the warning, if there are any, without repetition."""
        return tuple(dict.fromkeys(note for note in (self.choice, self.warning) if note is not None))


class PackageManifest(Manifest):
    """package/: the files that recsys_core.serving.retriever.Retriever loads; package.json has their checksums."""

    stage: ClassVar[str] = "package"
    group: ClassVar[StageGroup] = "release"
    size_bytes: int
    served_index: str
    quantization: Literal["int8", "int4", "fp16", "fp32", "none"]


class RegistrationManifest(Manifest):
    """registration.json: the registered MLflow model version, and evidence.json: the comparisons behind the verdict."""

    stage: ClassVar[str] = "register"
    group: ClassVar[StageGroup] = "release"
    pages: ClassVar[Mapping[str, str]] = {"decision": "register/decision.html"}
    model_name: str
    version: str
    alias: Literal["champion", "challenger"]
    promoted: bool
    has_enough_data: bool = Field(True, description="whether there were enough test users for a decision")
    reasons: tuple[str, ...] = Field(description="why the version was promoted or not")
    promote: Literal["by_gate", "never", "force"] = Field(
        "by_gate", description="by_gate: the comparison decided; never, force: the person who started the run decided"
    )
    run_reason: str = Field("", description="why the run was started; empty for a scheduled run")
    alarm: str | None = Field(
        None,
        description="error of a champion that did not load, and the version that replaces it; null if there was no such error",
    )
    mlflow_run_id: str
    metrics: dict[str, float]

    @property
    def state_name(self) -> Literal["Promoted", "NotPromoted", "NotEnoughData"]:
        """Name of the end state of the run."""
        return "Promoted" if self.promoted else "NotPromoted" if self.has_enough_data else "NotEnoughData"


StageName = Literal[
    "ingest_embeddings",
    "ingest_interactions",
    "ingest_features",
    "embed_log",
    "check_data",
    "plan_sharding",
    "train",
    "export",
    "evaluate",
    "build_index",
    "package",
    "register",
]
STAGES: dict[StageName, type[Manifest]] = {
    cast(StageName, manifest_type.stage): manifest_type
    for manifest_type in (
        EmbeddingsManifest,
        InteractionsManifest,
        FeaturesManifest,
        LogVectorsManifest,
        DataReportManifest,
        PlanManifest,
        TrainManifest,
        ExportManifest,
        EvaluationManifest,
        IndexManifest,
        PackageManifest,
        RegistrationManifest,
    )
}
"""The stages in their order. The manifest of a stage declares its name, its group on the pages, and its pages."""
