"""Settings of the two towers and their scores, and of the packaged model."""

from importlib.util import find_spec
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from recsys_core.config import Settings
from recsys_core.errors import InputError
from recsys_core.models.history_config import HistoryConfig, MeanHistory, SelfAttentionHistory
from recsys_core.models.score_config import MAX_WIDTH, NoPopularity, PopularityConfig, SpectralBlockSettings

Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Temperature = Annotated[float, Field(ge=1e-4, le=1e4)]
DEFAULT_TEMPERATURE = 0.1


class TowerConfig(Settings):
    """The layers of one tower. The first layer reads the tower's concatenated features. The last layer has no activation."""

    layers: tuple[Width, ...] | None = Field(
        None,
        max_length=64,
        description="widths of the tower's layers. With `[]`, the tower has no layers and its features are added up. Default: "
        "one layer in the query tower, as wide as the item vectors, and no layers in the candidate tower",
    )
    skip_connection: bool = Field(
        False,
        description="add the sum of the tower's features to the output of its layers. By default, only the query tower does "
        "this",
    )
    layer_norm: bool = Field(False, description="apply layer norm before each activation function")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate of the tower's features")
    hidden_dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate after each activation function")


class TwoTowerConfig(Settings):
    """The query tower reads the user's id, history and features, and event features. The candidate tower reads the item."""

    embedding_dim: int = Field(
        64,
        ge=4,
        le=MAX_WIDTH,
        multiple_of=4,
        description="width of the item embeddings. Features of another width are projected to this width",
    )
    learn_user_embedding: bool = Field(
        False,
        description="learn an embedding for each user. The query of a user without an embedding is computed from the other "
        "features",
    )
    num_members: int = Field(
        1,
        ge=1,
        le=16,
        description="number of models that are trained together, each with its own embeddings and layers. The query vectors of "
        "the members are concatenated, and so are their candidate vectors. The score is the mean of the members' scores",
    )
    history: HistoryConfig = Field(
        default_factory=MeanHistory,
        description="the user's last items, a feature of the query tower. The setting `pooling` selects how the vectors of the "
        "items are combined into one vector",
    )
    query: TowerConfig = Field(
        default_factory=lambda: TowerConfig(skip_connection=True), description="layers of the query tower"
    )
    candidate: TowerConfig = Field(default_factory=TowerConfig, description="layers of the candidate tower")
    similarity: Literal["cosine", "dot"] = Field(
        "cosine", description="how the score of a query and a candidate is computed in the training, the index and serving"
    )
    temperature: Temperature | Literal["auto"] = Field(
        DEFAULT_TEMPERATURE,
        description="temperature of the loss. The logits are the scores divided by the temperature. With `auto`, a training "
        "from scratch first trains one epoch with each of 0.07, 0.1, 0.15 and 0.2, and then starts again with the value that "
        "has the best `training.validation` metric. A warm start and a refit keep the temperature of the model that they "
        "continue",
    )
    learn_temperature: bool = Field(False, description="train the temperature. It starts from `model.temperature`")
    popularity: PopularityConfig = Field(
        default_factory=NoPopularity,
        description="term for the popularity of an item in its score: a weight times log(1 + training events of the item), "
        "divided by the same logarithm for the most popular item. With such a term, the query and item vectors "
        "have one more number",
    )
    spectral_block: SpectralBlockSettings | None = Field(
        None,
        description="vectors of a truncated singular value decomposition of the training events, which are computed after the "
        "training and appended to the trained vectors. A score is then the sum of the scores of both parts. Default: trained "
        "vectors alone",
    )

    @model_validator(mode="before")
    @classmethod
    def _set_default_pooling(cls, settings: Any) -> Any:
        history = settings.get("history") if isinstance(settings, dict) else None
        return settings | {"history": {"pooling": "mean"} | history} if isinstance(history, dict) else settings

    @model_validator(mode="after")
    def _check_widths(self) -> Self:
        for tower_name, layers in (("query", self.query_layers), ("candidate", self.candidate_layers)):
            if getattr(self, tower_name).skip_connection and layers and layers[-1] != self.embedding_dim:
                raise ValueError(
                    f"{tower_name}.skip_connection adds features of width {self.embedding_dim} (embedding_dim) to the last "
                    f"layer, which has width {layers[-1]}; end {tower_name}.layers in {self.embedding_dim}, or set "
                    "skip_connection to false"
                )
        query_dim = (self.query_layers or (self.embedding_dim,))[-1]
        if query_dim != self.tower_dim:
            raise ValueError(
                f"the towers have different output widths: query.layers end in {query_dim}, candidate.layers in "
                f"{self.tower_dim}; give both the same last width, or leave query.layers out"
            )
        return self

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        if self.num_members > 1 and self.has_popularity:
            raise ValueError(
                f"num_members is {self.num_members}, but a popularity term ({self.popularity.kind}) needs a model with one "
                "member; set num_members to 1, or popularity.kind to none"
            )
        return self

    @model_validator(mode="after")
    def _check_block(self) -> Self:
        block = self.spectral_block
        if block is None:
            return self
        if self.has_popularity:
            raise ValueError(
                f"spectral_block is set, and popularity.kind is {self.popularity.kind}; a model has only one of them: remove "
                "spectral_block, or set popularity.kind to none"
            )
        if block.output_dim is not None and block.output_dim > self.trained_dim + block.dim:
            raise ValueError(
                f"spectral_block.output_dim is {block.output_dim}, but the concatenated vectors have only {self.trained_dim} + "
                f"{block.dim} numbers; lower output_dim, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        history = self.history
        if isinstance(history, SelfAttentionHistory) and self.member_history_dim % history.num_heads:
            width_setting = "candidate.layers" if self.member_history_dim != self.embedding_dim else "embedding_dim"
            divisors = [num_heads for num_heads in range(1, 65) if self.member_history_dim % num_heads == 0]
            raise ValueError(
                f"history.num_heads is {history.num_heads}, which does not divide the width of an item's vector in a history, "
                f"{self.member_history_dim} ({width_setting}); set num_heads to one of {', '.join(map(str, divisors))}"
            )
        return self

    @property
    def start_temperature(self) -> float:
        """The temperature at the start of the training; DEFAULT_TEMPERATURE for `auto`."""
        return DEFAULT_TEMPERATURE if self.temperature == "auto" else self.temperature

    @property
    def query_layers(self) -> tuple[int, ...]:
        """Widths of the query tower's layers, with the default filled in."""
        return (self.tower_dim,) if self.query.layers is None else self.query.layers

    @property
    def candidate_layers(self) -> tuple[int, ...]:
        """Widths of the candidate tower's layers, with the default filled in."""
        return self.candidate.layers or ()

    @property
    def tower_dim(self) -> int:
        """Width of the vectors that both towers of a member return."""
        return (self.candidate_layers or (self.embedding_dim,))[-1]

    @property
    def member_history_dim(self) -> int:
        """Width of an item's vector in a history of one member."""
        return self.tower_dim if self.history.item_representation == "candidate_tower" else self.embedding_dim

    @property
    def has_popularity(self) -> bool:
        """Whether query and candidate vectors have one more number, for the popularity term."""
        return not isinstance(self.popularity, NoPopularity)

    @property
    def trained_dim(self) -> int:
        """Width of the trained vectors: the widths of all members, plus 1 with a popularity term."""
        return self.num_members * self.tower_dim + self.has_popularity

    @property
    def output_dim(self) -> int:
        """Width of the exported query and candidate vectors, which include the spectral block if there is one."""
        block = self.spectral_block
        return self.trained_dim if block is None else block.output_dim or self.trained_dim + block.dim

    @property
    def history_dim(self) -> int:
        """Width of an item's vector in a history."""
        return self.num_members * self.member_history_dim


Quantization = Literal["int8", "int4", "fp16", "fp32"]
ExportFormat = Literal["pt2", "onnx"]


class PackageConfig(Settings):
    """The packaged model."""

    quantization: Quantization = Field(
        "int8",
        description="precision of the query tower's embedding tables in the served model: 8-bit or 4-bit integers with a scale "
        "and an offset per row (`int8`, `int4`), or floats (`fp16`, `fp32`). The value `none` of earlier configs "
        "means `fp32`",
    )
    users: Literal["stored", "none"] = Field(
        "stored",
        description="whether the served model stores the history and the features of each user. With `none`, its size does not "
        "depend on the number of users, and each request brings the history of its user",
    )

    item_vectors: Literal["fp32", "fp16", "none"] = Field(
        "fp32",
        description="precision of the item vectors in `items.parquet`. With `none`, the file has no vectors, and they are read "
        "from the index, which has to be `flat`, `hnsw`, `ivf_flat` or `ivf_sq8`",
    )
    popularity_by: str | None = Field(
        None,
        min_length=1,
        max_length=1_000,
        description="categorical feature of users or context, e.g. `user.country`. If the value of this feature is the only "
        "model input of a request, the answer is the most popular items of the events with this value. Default: the model "
        "computes the recommendations from the value",
    )
    popularity_min_events: int = Field(
        100,
        ge=1,
        le=1_000_000_000,
        description="smallest number of events of a value of `package.popularity_by`. A value with fewer events gets the most "
        "popular items of all users",
    )
    exports: tuple[ExportFormat, ...] = Field(
        (),
        max_length=2,
        description="formats in which the query tower is also written for other runtimes: `pt2` for torch.export, and `onnx` "
        "for ONNX, which needs the extra `onnx`. Each file takes some seconds, and as many bytes as the query tower",
    )

    @field_validator("quantization", mode="before")
    @classmethod
    def _rename_none(cls, quantization: object) -> object:
        return "fp32" if quantization == "none" else quantization

    def require_libraries(self) -> None:
        """Raise InputError if a library for one of the `exports` is not installed."""
        needed_libraries = ("onnx", "onnxscript") if "onnx" in self.exports else ()
        missing_libraries = [library for library in needed_libraries if find_spec(library) is None]
        if missing_libraries:
            raise InputError(
                f"package.exports has onnx, which needs {', '.join(missing_libraries)}; install nightjar with the extra onnx, "
                'e.g. pip install ".[onnx]", or leave onnx out'
            )
