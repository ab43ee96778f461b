"""What the user says about evaluation."""

from pydantic import Field, PositiveInt

from recsys_core.config import Frozen


class EvaluationConfig(Frozen):
    """Metrics over the full catalogue."""

    ks: tuple[PositiveInt, ...] = Field(
        (10, 20, 50, 100), min_length=1, description="cut-offs of Recall, NDCG, Precision, HitRate and coverage"
    )
    exclude_seen: bool = Field(
        True, description="items the user had before the split are neither ranked nor counted as targets"
    )
    max_users: int | None = Field(None, ge=1, description="evaluate a fixed random sample of this many users; empty: all")
