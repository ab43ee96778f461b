"""Config of MLflow tracking, the model registry and the champion gate."""

from typing import Literal

from pydantic import Field

from recsys_core.config import Name, Settings

ServedMetric = Literal["recall@20", "hit_rate@10", "ndcg@20"]


class RegistryConfig(Settings):
    """The MLflow experiment and registered model of a run, and the rule that promotes a version to champion."""

    model_name: str = Field(
        "nightjar",
        max_length=128,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$",
        description="name of the registered model in MLflow. It may contain letters, digits, _ and -",
    )
    experiment: Name = Field("nightjar", description="MLflow experiment in which runs are tracked")
    metric: ServedMetric = Field(
        "recall@20",
        description="metric by which a new version is compared with the champion. It is measured on the recommendations of "
        "both packaged models",
    )
    max_relative_drop: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="largest relative drop of the metric. A new version becomes champion if its metric is at least (1 - "
        "max_relative_drop) times the champion's metric",
    )
    smoke_test_users: int = Field(
        2_000,
        ge=1,
        le=10_000_000,
        description="number of test users in the smoke test. The new version and the champion are tested with the same users",
    )
