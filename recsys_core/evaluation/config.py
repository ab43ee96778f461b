"""Settings of the evaluation."""

from typing import Annotated

from pydantic import Field

from recsys_core.config import MAX_COUNT, Settings

CutOff = Annotated[int, Field(ge=1, le=1_000_000)]


class EvaluationConfig(Settings):
    """Metrics over the full catalogue."""

    ks: tuple[CutOff, ...] = Field(
        (10, 20, 50, 100),
        min_length=1,
        max_length=100,
        description="cut-offs K of the metrics Recall@K, NDCG@K, Precision@K, HitRate@K and Coverage@K",
    )
    exclude_seen: bool = Field(
        True,
        description="do not rank items that the user had before the evaluated events, and do not count them as targets",
    )
    max_users: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="number of users that are evaluated. They are sampled with a fixed seed. Default: all users",
    )
