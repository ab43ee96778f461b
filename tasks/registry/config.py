"""Config of MLflow tracking, the model registry and the champion gate."""

from typing import Any, Literal

from pydantic import Field, model_validator

from recsys_core.comparison.rules import PairedBootstrap, RuleConfig
from recsys_core.config import Name, Settings
from recsys_core.evaluation.config import FeatureKey

ServedMetric = Literal["recall@20", "hit_rate@10", "ndcg@20"]
Baseline = Literal["popularity", "zero_shot"]


class GuardrailsConfig(Settings):
    """Comparisons with the champion that can only prevent a promotion. They use the rule of the gate with a wider margin."""

    metrics: tuple[ServedMetric, ...] = Field(
        ("hit_rate@10", "ndcg@20"), description="metrics that must not drop, in addition to `registry.metric`"
    )
    slices: bool = Field(
        True,
        description="compare `registry.metric` also on slices: head, torso, tail and cold items; new, light and heavy users. A "
        "slice with too few users is named in the reasons, but does not prevent a promotion",
    )
    features: tuple[FeatureKey, ...] = Field(
        (),
        max_length=100,
        description="features of `evaluation.slices`, such as `item.brand`, on whose slices `registry.metric` is compared too. "
        "A slice is compared if it has at least as many users as the `min_users` of its entry in `evaluation.slices`. By "
        "default, this number is `registry.gate.min_users`",
    )
    max_relative_drop: float = Field(
        0.15,
        ge=0.001,
        lt=1,
        description="largest relative drop of a metric in `registry.guardrails.metrics`, and of `registry.metric` on a slice",
    )
    max_coverage_drop: float = Field(
        0.25,
        ge=0,
        le=1,
        description="largest relative drop of the share of the catalogue that is recommended to at least one user. With `1`, "
        "coverage is not compared",
    )
    max_serving_loss: float = Field(
        0.05,
        ge=0.001,
        lt=1,
        description="largest relative drop of `registry.metric` between the trained and the quantized query tower, and between "
        "an exact search and the index",
    )
    max_index_loss: float = Field(
        0.5,
        ge=0.001,
        lt=1,
        description="largest share of the exact best items that the index may miss, on average over the test users. A "
        "compressed index often returns other items that are as good, so this limit finds only a broken index",
    )
    max_cost_increase: float = Field(
        1.0,
        ge=0,
        le=100,
        description="largest relative increase of the CPU time per user, and of the size of the model, compared with the "
        "champion. With `1`, a version may cost twice as much",
    )


class RegistryConfig(Settings):
    """The MLflow experiment and registered model of a run, and the rule that promotes a version to champion."""

    model_name: str = Field(
        "nightjar",
        max_length=128,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$",
        description="name of the registered model in MLflow. It may contain letters, digits, `_` and `-`",
    )
    experiment: Name = Field("nightjar", description="MLflow experiment in which runs are tracked")
    metric: ServedMetric = Field(
        "recall@20",
        description="metric by which a new version is compared with the champion. It is measured on the recommendations of "
        "both packaged models",
    )
    gate: RuleConfig = Field(
        default_factory=PairedBootstrap, description="the rule that compares a new version with the champion"
    )
    guardrails: GuardrailsConfig = Field(
        default_factory=GuardrailsConfig, description="further comparisons, which can only prevent a promotion"
    )
    baselines: tuple[Baseline, ...] = Field(
        ("popularity", "zero_shot"),
        description="baselines that a version must beat if there is no champion. If the list contains `popularity`, every "
        "later version must also beat it",
    )
    smoke_test_users: int = Field(
        20_000,
        ge=1,
        le=10_000_000,
        description="number of test users in the smoke test. The new version and the champion are tested with the same users",
    )

    @model_validator(mode="before")
    @classmethod
    def _complete_gate(cls, settings: Any) -> Any:
        """Set the default kind of the gate. Move `registry.max_relative_drop`, as in earlier configs, into the gate."""
        if not isinstance(settings, dict):
            return settings
        gate = settings.get("gate", {})
        if "max_relative_drop" in settings and "gate" not in settings:
            gate = {"max_relative_drop": settings["max_relative_drop"]}
            settings = {name: value for name, value in settings.items() if name != "max_relative_drop"}
        return settings | {"gate": {"kind": "paired_bootstrap"} | gate if isinstance(gate, dict) else gate}
