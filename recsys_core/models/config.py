"""What the user says about the two towers."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import Settings

MOST_WIDTH = 16_384
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
HistoryPooling = Literal["mean", "sum", "recency", "attention"]


class TowerConfig(Settings):
    """The layers of one tower, over its features side by side; no activation after the last one."""

    layers: tuple[Width, ...] | None = Field(
        None,
        max_length=64,
        description="sizes of the layers; []: the sum of the features; null: in the query tower one layer as wide as the item "
        "vectors, in the candidate tower none",
    )
    residual: bool = Field(False, description="add the sum of the features to what the layers give")
    layer_norm: bool = Field(False, description="layer norm before each activation")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the tower's features")
    hidden_dropout: float = Field(0.0, ge=0, lt=1, description="dropout after each activation")


class HistoryConfig(Settings):
    """How a user's items become one vector."""

    length: int = Field(
        20,
        ge=0,
        le=10_000,
        description="the user's last N items before the event (without order: N of the others); 0: no history",
    )
    pooling: HistoryPooling = Field(
        "mean",
        description="mean; sum; recency: mean weighted by place, learned; attention: mean weighted by one learned query",
    )
    items: Literal["embedding", "vector"] = Field(
        "embedding", description="what stands for an item in it: its embedding, or its vector as the candidate tower gives it"
    )
    last_item: bool = Field(True, description="the last item as a feature of its own")
    item_dropout: float = Field(0.0, ge=0, lt=1, description="share of a history's items that a training step leaves out")
    with_target: bool = Field(
        False, description="logs without order: leave the target among the user's items while training, as SimpleX does"
    )

    @model_validator(mode="after")
    def _has_items(self) -> Self:
        if self.last_item and self.length == 0:
            raise ValueError("last_item is true, but length is 0; set length to 1 or more, or last_item to false")
        return self


class TwoTowerConfig(Settings):
    """Query tower (user id, history, last item, features of user and event); candidate tower (item id, the item's features)."""

    embedding_dim: int = Field(
        64,
        ge=4,
        le=MOST_WIDTH,
        multiple_of=4,
        description="width in which features are added up; tables of another width are projected to it",
    )
    user_id: bool = Field(
        False, description="give each user a row of its own; unknown users are then served by their history alone"
    )
    history: HistoryConfig = Field(default_factory=HistoryConfig, description="the user's items as a feature")
    query: TowerConfig = Field(default_factory=lambda: TowerConfig(residual=True), description="layers of the query tower")
    candidate: TowerConfig = Field(default_factory=TowerConfig, description="layers of the candidate tower")
    similarity: Literal["cosine", "dot"] = Field("cosine", description="training, index and serving all score by it")
    temperature: float = Field(0.1, ge=1e-4, le=1e4, description="logits are similarity / temperature")
    learn_temperature: bool = Field(False, description="train the temperature too, starting from that value")

    @model_validator(mode="after")
    def _towers_meet(self) -> Self:
        ends = {"query": self.query_layers, "candidate": self.candidate_layers}
        for name, layers in ends.items():
            if getattr(self, name).residual and layers and layers[-1] != self.embedding_dim:
                raise ValueError(
                    f"{name}.residual adds {self.embedding_dim} numbers (embedding_dim) to the {layers[-1]} of the last layer; "
                    f"end {name}.layers in {self.embedding_dim}, or set residual to false"
                )
        query_dim = (self.query_layers or (self.embedding_dim,))[-1]
        if query_dim != self.output_dim:
            raise ValueError(
                f"the towers do not meet: query.layers end in {query_dim}, candidate.layers in {self.output_dim}; "
                "give both the same last size, or leave query.layers out"
            )
        return self

    @property
    def query_layers(self) -> tuple[int, ...]:
        """Sizes of the query tower's layers, the default filled in."""
        return (self.output_dim,) if self.query.layers is None else self.query.layers

    @property
    def candidate_layers(self) -> tuple[int, ...]:
        """Sizes of the candidate tower's layers, the default filled in."""
        return self.candidate.layers or ()

    @property
    def output_dim(self) -> int:
        """Width of the vectors that are compared."""
        return (self.candidate_layers or (self.embedding_dim,))[-1]

    @property
    def history_dim(self) -> int:
        """Width of what stands for an item in a history."""
        return self.output_dim if self.history.items == "vector" else self.embedding_dim
