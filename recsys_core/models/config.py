"""Settings of the two towers."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import Settings

MAX_WIDTH = 16_384
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
PoolingKind = Literal["mean", "sum", "recency", "attention"]
ItemRepresentation = Literal["embedding", "candidate_tower"]


class TowerConfig(Settings):
    """The layers of one tower. Their input is the concatenation of its features; the last layer has no activation."""

    layers: tuple[Width, ...] | None = Field(
        None,
        max_length=64,
        description="widths of the tower's layers. []: no layers, only the sum of the features. null: one layer as wide as the "
        "item vectors in the query tower, no layers in the candidate tower",
    )
    skip_connection: bool = Field(False, description="add the sum of the tower's features to the output of its layers")
    layer_norm: bool = Field(False, description="apply layer norm before each activation")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the features of the tower")
    hidden_dropout: float = Field(0.0, ge=0, lt=1, description="dropout after each activation")


class HistoryConfig(Settings):
    """The history feature of the query tower: the user's last items, pooled into one vector."""

    length: int = Field(
        20,
        ge=0,
        le=10_000,
        description="largest number of items in a history; 0: no history. A history has the user's last items before the "
        "event. In a log without order, it has random other items of the user",
    )
    pooling: PoolingKind = Field(
        "mean",
        description="how the items of a history become one vector. mean; sum; recency: weighted mean, with one learned weight "
        "per position from the end; attention: weighted mean, with weights from one learned query vector",
    )
    item_representation: ItemRepresentation = Field(
        "embedding",
        description="vector of an item in a history: embedding: the item's embedding; candidate_tower: the output of the "
        "candidate tower",
    )
    last_item: bool = Field(True, description="use the last item of a history as a separate feature")
    item_dropout: float = Field(0.0, ge=0, lt=1, description="share of history items that a training step drops at random")
    include_target: bool = Field(
        False, description="logs without order: keep the target item in the user's history while training, as SimpleX does"
    )

    @model_validator(mode="after")
    def _check_last_item(self) -> Self:
        if self.last_item and self.length == 0:
            raise ValueError("last_item is true, but length is 0; set length to 1 or more, or last_item to false")
        return self


class TwoTowerConfig(Settings):
    """The query tower reads the user's id, history and features, and event features. The candidate tower reads the item."""

    embedding_dim: int = Field(
        64,
        ge=4,
        le=MAX_WIDTH,
        multiple_of=4,
        description="width of the item embeddings and of the sum of a tower's features; features of other widths are "
        "projected to it",
    )
    user_id: bool = Field(
        False, description="learn an embedding per user; a user without an embedding is served from the history alone"
    )
    history: HistoryConfig = Field(default_factory=HistoryConfig, description="the user's items, a feature of the query tower")
    query: TowerConfig = Field(
        default_factory=lambda: TowerConfig(skip_connection=True), description="layers of the query tower"
    )
    candidate: TowerConfig = Field(default_factory=TowerConfig, description="layers of the candidate tower")
    similarity: Literal["cosine", "dot"] = Field(
        "cosine", description="score of a query and a candidate in training, index and serving"
    )
    temperature: float = Field(0.1, ge=1e-4, le=1e4, description="temperature of the loss: logits are similarity / temperature")
    learn_temperature: bool = Field(False, description="train the temperature, starting from model.temperature")

    @model_validator(mode="after")
    def _check_widths(self) -> Self:
        for name, layers in (("query", self.query_layers), ("candidate", self.candidate_layers)):
            if getattr(self, name).skip_connection and layers and layers[-1] != self.embedding_dim:
                raise ValueError(
                    f"{name}.skip_connection adds features of width {self.embedding_dim} (embedding_dim) to the last layer, "
                    f"which has width {layers[-1]}; end {name}.layers in {self.embedding_dim}, or set skip_connection to false"
                )
        query_dim = (self.query_layers or (self.embedding_dim,))[-1]
        if query_dim != self.output_dim:
            raise ValueError(
                f"the towers have different output widths: query.layers end in {query_dim}, candidate.layers in "
                f"{self.output_dim}; give both the same last width, or leave query.layers out"
            )
        return self

    @property
    def query_layers(self) -> tuple[int, ...]:
        """Widths of the query tower's layers, with the default filled in."""
        return (self.output_dim,) if self.query.layers is None else self.query.layers

    @property
    def candidate_layers(self) -> tuple[int, ...]:
        """Widths of the candidate tower's layers, with the default filled in."""
        return self.candidate.layers or ()

    @property
    def output_dim(self) -> int:
        """Width of the query and candidate vectors."""
        return (self.candidate_layers or (self.embedding_dim,))[-1]

    @property
    def history_dim(self) -> int:
        """Width of an item's vector in a history."""
        return self.output_dim if self.history.item_representation == "candidate_tower" else self.embedding_dim
