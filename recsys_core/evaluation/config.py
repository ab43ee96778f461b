"""Settings of the evaluation."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from recsys_core.config import MAX_COUNT, MAX_DAYS, Settings

MetricName = Literal["recall", "ndcg", "precision", "hit_rate", "map", "mrr", "auc"]
BaselineName = Literal["recent_popularity", "cooccurrence", "closed_form"]
FeatureKey = Annotated[str, Field(max_length=120, pattern=r"^(user|item|context)\.[A-Za-z0-9_]+$")]
CutOff = Annotated[int, Field(ge=1, le=1_000_000)]


class ClosedFormConfig(Settings):
    """Settings of the baselines that are computed from the log without training: co-occurrence, and a linear model.

    The linear model is EASE up to `ease_max_items` items, and a truncated SVD above.
    """

    max_items: int = Field(
        100_000,
        ge=1,
        le=MAX_COUNT,
        description="number of items above which the baselines `closed_form` and `cooccurrence` are left out",
    )
    ease_max_items: int = Field(
        5_000,
        ge=0,
        le=50_000,
        description="number of items up to which `closed_form` is EASE, which inverts a matrix of all pairs of items. With "
        "more items it is a truncated SVD",
    )
    l2: float = Field(500.0, gt=0, le=1e9, description="L2 regularisation of EASE")
    rank: int = Field(128, ge=1, le=2_048, description="number of singular vectors of the truncated SVD")
    user_exponent: float = Field(
        0.5,
        ge=0,
        le=2,
        description="exponent e: in the matrix of the truncated SVD, each entry of a user is divided by (number of the user's "
        "events)^e",
    )
    item_exponents: tuple[Annotated[float, Field(ge=0, le=2)], ...] = Field(
        (0.4, 0.3, 0.5),
        min_length=1,
        max_length=20,
        description="exponents e to try: in the matrix of the truncated SVD, each entry of an item is divided by (number of "
        "the item's events)^e, and the score of the item is multiplied by the same number. The exponent with the best "
        "NDCG@20 of the validation users is used, or the first exponent if there are no validation events",
    )


class FeatureSlice(Settings):
    """Slices by the values of one feature: one slice for each of the most frequent values among the test events."""

    feature: FeatureKey = Field(description="Declared feature, such as `item.brand`, `user.country` or `context.device`")
    max_values: int = Field(10, ge=1, le=1_000, description="number of most frequent values that get a slice")
    min_users: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="smallest number of users for which a slice has metrics. Default: `min_slice_users`",
    )


class EvaluationConfig(Settings):
    """Metrics over the full catalogue."""

    ks: tuple[CutOff, ...] = Field(
        (10, 20, 50, 100),
        min_length=1,
        max_length=100,
        description="cut-offs K of the metrics, such as Recall@K",
    )
    metrics: tuple[MetricName, ...] = Field(
        ("recall", "ndcg", "precision", "hit_rate", "map", "mrr", "auc"),
        min_length=1,
        description="metrics of the model and the baselines, at each of the cut-offs. `auc` also adds `gauc`, the AUC "
        "weighted by each user's number of targets, and the MRR without a cut-off. `auc` needs the exact position of "
        "every target; without `auc`, only the first `max(ks)` items are computed, which is faster for a large catalogue",
    )
    confidence: float = Field(
        0.95,
        ge=0.5,
        le=0.9999,
        description="confidence of the metrics' intervals. An interval describes the variation between users",
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
    baselines: tuple[BaselineName, ...] = Field(
        ("recent_popularity", "cooccurrence", "closed_form"),
        description="baselines in addition to popularity and zero-shot. `recent_popularity` ranks by the number of events in "
        "the last `recent_days`, `cooccurrence` by the number of users who had both items, and `closed_form` by a linear model "
        "of the log",
    )
    recent_days: float = Field(
        7.0,
        gt=0,
        le=MAX_DAYS,
        description="length in days of the period before the test events that `recent_popularity` counts",
    )
    closed_form: ClosedFormConfig = Field(
        default_factory=ClosedFormConfig,
        description="the baselines `closed_form` and `cooccurrence`, which are computed from the log",
    )
    slices: tuple[FeatureSlice, ...] = Field(
        (),
        max_length=100,
        description="slices of the test events by the values of features, in addition to the slices by item popularity and "
        "user activity",
    )
    min_slice_users: int = Field(
        30,
        ge=1,
        le=MAX_COUNT,
        description="smallest number of users for which a slice has metrics. Smaller slices are listed as `not enough data`",
    )

    @field_validator("ks")
    @classmethod
    def _remove_repeated_cut_offs(cls, ks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(ks))

    @field_validator("slices")
    @classmethod
    def _reject_repeated_features(cls, slices: tuple[FeatureSlice, ...]) -> tuple[FeatureSlice, ...]:
        features = [feature_slice.feature for feature_slice in slices]
        for feature in features:
            if features.count(feature) > 1:
                raise ValueError(f"{features.count(feature)} entries have the feature {feature}; keep one of them")
        return slices

    def linear_baselines(self, num_items: int | None = None) -> tuple[BaselineName, ...]:
        """Return the baselines with a linear model of the log; none if `num_items` is more than `closed_form.max_items`.

        >>> EvaluationConfig().linear_baselines(), EvaluationConfig().linear_baselines(num_items=200_000)
        (('cooccurrence', 'closed_form'), ())
        """
        if num_items is not None and num_items > self.closed_form.max_items:
            return ()
        names: tuple[BaselineName, ...] = ("cooccurrence", "closed_form")
        return tuple(name for name in names if name in self.baselines)
