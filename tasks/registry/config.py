"""Config of MLflow tracking, the model registry and the champion gate."""

from typing import Any, Literal

from pydantic import Field, model_validator

from recsys_core.comparison.rules import Margin, RuleConfig
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
    gate: RuleConfig = Field(default_factory=Margin, description="the rule that compares a new version with the champion")
    smoke_test_users: int = Field(
        2_000,
        ge=1,
        le=10_000_000,
        description="number of test users in the smoke test. The new version and the champion are tested with the same users",
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_margin_outside_gate(cls, settings: Any) -> Any:
        """Accept max_relative_drop without its group `gate`, where earlier configs have it."""
        if not isinstance(settings, dict) or "max_relative_drop" not in settings or "gate" in settings:
            return settings
        other_settings = {name: value for name, value in settings.items() if name != "max_relative_drop"}
        return other_settings | {"gate": {"max_relative_drop": settings["max_relative_drop"]}}
