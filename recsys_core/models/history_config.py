"""Settings of the history feature of the query tower, by encoder."""

from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from recsys_core.config import Settings

ItemRepresentation = Literal["embedding", "candidate_tower"]


class HistorySettings(Settings):
    """The history feature of the query tower: the user's last items, which an encoder converts to one vector.

    To add an encoder, add a subclass with its own value of `pooling`, list it in HistoryConfig, and add a class to
    models/history.py.

    Attributes:
        needs_order: whether the encoder reads the order of the items.
        has_padded_form: whether recsys_core/serving/exports implements the encoder for padded histories.
        architecture_settings: names of the settings that must be equal in two models, so that one model can start from the
            weights of the other.
    """

    needs_order: ClassVar[bool] = False
    has_padded_form: ClassVar[bool] = False
    architecture_settings: ClassVar[tuple[str, ...]] = ("pooling", "item_representation")

    length: int = Field(
        20,
        ge=0,
        le=10_000,
        description="maximum number of items in a history. A history contains the last items of the user before the event. In "
        "a log without order, it contains other items of the user in random order. With `0`, the model has no history",
    )
    item_representation: ItemRepresentation = Field(
        "embedding",
        description="vector that represents an item in a history: the embedding of the item (`embedding`) or the output of "
        "the candidate tower (`candidate_tower`)",
    )
    learn_offsets: bool = Field(
        False,
        description="learn an offset for each item, which is added to the vector of the item in histories. The vector in "
        "histories then differs from the candidate vector, so that an item can predict the items that follow it",
    )
    last_item_feature: bool = Field(True, description="use the last item of a history as an additional feature")
    item_dropout: float = Field(
        0.0, ge=0, lt=1, description="share of the history items that are removed at random in each training step"
    )
    include_target: bool = Field(
        False,
        description="keep the target item in the user's history during the training, as SimpleX does. Only for a log "
        "without order",
    )

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        for name in ("last_item_feature", "learn_offsets"):
            if getattr(self, name) and self.length == 0:
                raise ValueError(f"{name} is true, but length is 0; set length to 1 or more, or {name} to false")
        return self

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs of the query tower that are computed from the history, in order."""
        return ["history"] * bool(self.length) + ["last_item"] * self.last_item_feature

    def architecture(self) -> dict[str, object]:
        """Return the values of `architecture_settings` by dotted key."""
        return {f"model.history.{name}": getattr(self, name) for name in self.architecture_settings}


class MeanHistory(HistorySettings):
    """Mean of the items."""

    has_padded_form: ClassVar[bool] = True

    pooling: Literal["mean"] = Field("mean", description="mean of the vectors of the items")


class SumHistory(HistorySettings):
    """Sum of the items."""

    has_padded_form: ClassVar[bool] = True

    pooling: Literal["sum"] = Field("sum", description="sum of the vectors of the items")


class RecencyHistory(HistorySettings):
    """Weighted mean of the items, with one weight per position."""

    has_padded_form: ClassVar[bool] = True
    needs_order: ClassVar[bool] = True
    architecture_settings: ClassVar[tuple[str, ...]] = (*HistorySettings.architecture_settings, "length")

    pooling: Literal["recency"] = Field(
        "recency",
        description="weighted mean of the vectors of the items. One weight is learned for each position from the end of the "
        "history",
    )


class AttentionHistory(HistorySettings):
    """Weighted mean of the items, with weights by attention."""

    has_padded_form: ClassVar[bool] = True

    pooling: Literal["attention"] = Field(
        "attention",
        description="weighted mean of the vectors of the items. The weights are computed with one learned attention vector",
    )


class SelfAttentionHistory(HistorySettings):
    """The state of the last item after blocks of causal self-attention, as in SASRec."""

    has_padded_form: ClassVar[bool] = True
    needs_order: ClassVar[bool] = True
    architecture_settings: ClassVar[tuple[str, ...]] = (
        *HistorySettings.architecture_settings,
        "length",
        "num_blocks",
        "num_heads",
        "recency_residual",
    )

    pooling: Literal["self_attention"] = Field(
        "self_attention",
        description="the state of the last item after blocks of causal self-attention, as in SASRec. A vector is learned for "
        "each position from the end of the history",
    )
    num_blocks: int = Field(2, ge=1, le=3, description="number of blocks of self-attention")
    num_heads: int = Field(1, ge=1, le=64, description="number of attention heads; a divisor of the width of an item's vector")
    recency_residual: bool = Field(
        False,
        description="add a weighted mean of the vectors of the items to the state, with one learned weight for each position, "
        "as with `pooling: recency`",
    )
    attention_dropout: float = Field(0.3, ge=0, lt=1, description="dropout rate of the attention weights")
    hidden_dropout: float = Field(
        0.3, ge=0, lt=1, description="dropout rate of the item vectors and of the output of each layer in the blocks"
    )


HistoryConfig = Annotated[
    MeanHistory | SumHistory | RecencyHistory | AttentionHistory | SelfAttentionHistory, Field(discriminator="pooling")
]
ORDER_FREE_POOLINGS = tuple(
    history_class.model_fields["pooling"].default
    for history_class in get_args(get_args(HistoryConfig)[0])
    if not history_class.needs_order
)
"""Values of `pooling` that do not depend on the order of the items."""
