"""Settings of the terms that are added to the scores of the trained model: popularity, and the spectral block."""

from typing import Annotated, Literal

from pydantic import Field

from recsys_core.config import MAX_COUNT, Settings

MAX_WIDTH = 16_384
"""Largest width of a vector."""
ScoreWeight = Annotated[float, Field(ge=-1e4, le=1e4)]


class NoPopularity(Settings):
    """Scores without a term for the popularity of an item."""

    kind: Literal["none"] = Field("none", description="the score is the similarity of the query and the candidate alone")


class FixedPopularity(Settings):
    """A popularity term that is added to the scores of the trained model, but not in the training."""

    kind: Literal["fixed"] = Field(
        "fixed",
        description="the training does not use the popularity term. The validation, the metrics and the served model use it",
    )
    weight: ScoreWeight = Field(
        description="weight of the popularity in the score. Below 0, popular items are recommended less"
    )


class LearnedPopularity(Settings):
    """A popularity term with a trained weight, which serving may replace."""

    kind: Literal["learned"] = Field("learned", description="the weight of the popularity term is trained. It starts from 0")
    served_weight: ScoreWeight | None = Field(
        None,
        description="weight of the popularity term in the validation, the metrics and the served model. With `0`, the term is "
        "removed after the training. Default: the trained weight",
    )


class ValidatedPopularity(Settings):
    """A popularity term with a weight that the validation chooses after the training."""

    kind: Literal["validated"] = Field(
        "validated",
        description="the training does not use the popularity term. The export tries the `weights`; the metrics and the served "
        "model use the weight with the best metric of `training.validation`",
    )
    weights: tuple[ScoreWeight, ...] = Field(
        (0.0, 0.05, 0.1, 0.2, 0.3, 0.4),
        min_length=1,
        max_length=20,
        description="weights of the popularity in the score. The scores of `model.similarity: cosine` are between -1 and 1",
    )


class SpectralBlockSettings(Settings):
    """Vectors in closed form, computed from the log, that are appended to the trained vectors."""

    dim: int = Field(80, ge=4, le=2_048, description="number of singular vectors of the normalised user-item matrix")
    item_exponent: float = Field(
        0.4,
        ge=0,
        le=2,
        description="exponent e: an item's vector in a history is divided by (number of the item's events)^e, and its "
        "candidate vector is multiplied by the same number. With a lower exponent, popular items are recommended less",
    )
    history_length: int = Field(
        200,
        ge=1,
        le=10_000,
        description="maximum number of items in a history. The newest items are used, and their order is ignored",
    )
    weights: tuple[Annotated[float, Field(ge=0, le=100)], ...] = Field(
        (0.0, 0.1, 0.25, 0.5),
        min_length=1,
        max_length=20,
        description="weights of the block to try. A weight is the standard deviation of the block's scores divided by the "
        "standard deviation of the trained scores. The weight with the best metric of `training.validation` is served. With "
        "`0`, the block does not change the scores",
    )
    output_dim: int | None = Field(
        None,
        ge=4,
        le=MAX_WIDTH,
        multiple_of=4,
        description="width to which the concatenated vectors are reduced, so that their scores change as little as possible. "
        "Default: no reduction",
    )
    max_events: int = Field(
        20_000_000,
        ge=1_000,
        le=MAX_COUNT,
        description="number of training events that are used. With more events, the users are sampled with a fixed seed",
    )


PopularityConfig = Annotated[
    NoPopularity | FixedPopularity | LearnedPopularity | ValidatedPopularity, Field(discriminator="kind")
]
