"""What the user says about evaluation."""

from typing import Annotated

from pydantic import Field

from recsys_core.config import MANY, Settings

CutOff = Annotated[int, Field(ge=1, le=1_000_000)]


class EvaluationConfig(Settings):
    """Metrics over the full catalogue."""

    ks: tuple[CutOff, ...] = Field(
        (10, 20, 50, 100), min_length=1, max_length=100, description="cut-offs of Recall, NDCG, Precision, HitRate and coverage"
    )
    exclude_seen: bool = Field(
        True, description="items the user had before the split are neither ranked nor counted as targets"
    )
    max_users: int | None = Field(
        None, ge=1, le=MANY, description="evaluate a fixed random sample of this many users; empty: all"
    )
