"""What the user says about the model and its loss."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from recsys_core.config import Frozen
from recsys_core.errors import InputError
from recsys_core.manifests import EmbeddingsManifest, InteractionsManifest


class TwoTowerConfig(Frozen):
    """Query tower (user id, history, last item) and candidate tower (item id)."""

    embedding_dim: int = Field(64, ge=4, multiple_of=4, description="width of the embedding tables")
    user_id: bool = Field(
        False, description="give each user a row of its own; unknown users are then served by their history alone"
    )
    max_history: int = Field(
        20, ge=0, description="the user's last N items before the event, mean-pooled from the item table; 0: no history"
    )
    last_item: bool = Field(True, description="the last item of the history as a feature of its own")
    query_layers: tuple[PositiveInt, ...] | None = Field(
        None,
        description="MLP of the query tower, no activation after the last layer; null: one layer as wide as the item vectors; "
        "[]: sum of the features",
    )
    candidate_layers: tuple[PositiveInt, ...] = Field(
        (), description="MLP of the candidate tower; empty: the item's embedding itself"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the pooled embeddings of the query tower")
    similarity: Literal["cosine", "dot"] = Field("cosine", description="training, index and serving all score by it")
    temperature: float = Field(0.1, gt=0, description="logits are similarity / temperature")

    @model_validator(mode="after")
    def _towers_meet(self) -> Self:
        if not self.user_id and self.max_history == 0:
            raise ValueError("the query tower has no feature: set user_id to true or max_history above 0")
        if self.last_item and self.max_history == 0:
            raise ValueError("last_item is true but max_history is 0; set max_history to 1 or more, or last_item to false")
        query_dim = (self.query_sizes or (self.embedding_dim,))[-1]
        if query_dim != self.output_dim:
            raise ValueError(
                f"the towers do not meet: query_layers end in {query_dim}, candidate_layers in {self.output_dim}; "
                "give both the same last size, or leave query_layers out"
            )
        return self

    @property
    def output_dim(self) -> int:
        """Width of the vectors that are compared."""
        return (self.candidate_layers or (self.embedding_dim,))[-1]

    @property
    def query_sizes(self) -> tuple[int, ...]:
        """Sizes of the query tower's layers, the default filled in."""
        return (self.output_dim,) if self.query_layers is None else self.query_layers


class PretrainedConfig(Frozen):
    """How pretrained vectors enter their tables."""

    rescale: bool = Field(
        True,
        description="scale each vector to the norm of a random row; another scale changes the effective learning rate",
    )
    missing: Literal["random", "zero", "mean"] = Field(
        "random", description="first values of a row without a vector; mean: the mean of the rows that have one"
    )


class LossConfig(Frozen):
    """What is minimised."""

    kind: Literal["softmax", "bce"] = Field(
        "softmax", description="in-batch softmax, or binary cross-entropy against sampled negatives"
    )
    logq: bool = Field(
        True, description="softmax: correct for the sampling probability of the candidates (Yi et al., RecSys 2019)"
    )
    uniform_negatives: int = Field(512, ge=0, description="items drawn uniformly per step and rank, added to the candidates")
    mask_accidental_hits: bool = Field(True, description="softmax: a candidate equal to the row's own positive is no negative")

    @model_validator(mode="after")
    def _has_negatives(self) -> Self:
        if self.kind == "bce" and self.uniform_negatives == 0:
            raise ValueError("loss.kind is bce, which needs negatives, but uniform_negatives is 0")
        return self


class ModelSpec(Frozen):
    """A model config together with the sizes that the data gave it: all that is needed to build the towers."""

    config: TwoTowerConfig
    users: int
    items: int

    @classmethod
    def of(cls, config: TwoTowerConfig, *, interactions: InteractionsManifest, embeddings: EmbeddingsManifest | None) -> Self:
        """The spec for these data; InputError when the vectors do not fit the table."""
        for table, vectors in (embeddings.tables if embeddings is not None else {}).items():
            require_width(config, vectors.dim, table=table)
        return cls(config=config, users=interactions.users, items=interactions.items)

    @property
    def tables(self) -> dict[str, tuple[int, int]]:
        """Embedding tables: name -> (rows, dim)."""
        tables = {"item": (self.items, self.config.embedding_dim)}
        if self.config.user_id:
            tables["user"] = (self.users, self.config.embedding_dim)
        return tables


def require_width(config: TwoTowerConfig, dim: int, *, table: str) -> None:
    """InputError unless pretrained vectors of `dim` numbers fit `table`."""
    if dim != config.embedding_dim:
        shorter = f", or embeddings.pca_dim to {config.embedding_dim}" if dim > config.embedding_dim else ""
        raise InputError(
            f"embeddings: the vectors of table {table!r} have {dim} numbers, but model.embedding_dim is "
            f"{config.embedding_dim}; set model.embedding_dim to {dim}{shorter}"
        )
