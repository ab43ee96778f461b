"""What the user says about tracking, registry and promotion."""

from typing import Literal

from pydantic import Field

from recsys_core.config import Name, Settings

ServedMetric = Literal["recall@20", "hit_rate@10", "ndcg@20"]


class RegistryConfig(Settings):
    """Where the result is registered, and when it becomes the champion."""

    model_name: str = Field(
        "nightjar",
        max_length=128,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$",
        description="registered model in MLflow; letters, digits, _ and -",
    )
    experiment: Name = Field("nightjar", description="MLflow experiment that the runs go to")
    metric: ServedMetric = Field(
        "recall@20", description="decides between the new version and the champion, both as they are served"
    )
    margin: float = Field(
        0.02, ge=0, lt=1, description="relative: the new version becomes champion when its metric >= champion's * (1 - margin)"
    )
    smoke_users: int = Field(
        2_000, ge=1, le=10_000_000, description="test users (a fixed sample) asked of the loaded version, and of the champion"
    )
