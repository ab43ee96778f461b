"""Settings of the loss."""

from typing import Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import Settings

LossKind = Literal["softmax", "bce", "bpr", "cosine_contrastive"]


class DistillationConfig(Settings):
    """A second loss that keeps items similar when their pretrained vectors are similar."""

    weight: float = Field(0.1, gt=0, le=1e6, description="weight of the distillation loss in the total loss")
    temperature: float = Field(
        0.1, ge=1e-4, le=1e4, description="temperature of the softmax over the similarities between items"
    )


class LossConfig(Settings):
    """The retrieval loss, its negatives, and the optional distillation loss."""

    kind: LossKind = Field(
        "softmax",
        description="loss function: sampled softmax over the candidates (`softmax`), binary cross-entropy (`bce`), pairwise "
        "ranking (`bpr`), or the loss of SimpleX, which has a margin on the cosine (`cosine_contrastive`)",
    )
    negatives: Literal["sampled", "all"] = Field(
        "sampled",
        description="items that the loss compares with the target item. `sampled`: the items that the next settings describe. "
        "`all`: all items that have a training event, only with `softmax`",
    )
    catalogue_gb: float = Field(
        4.0,
        gt=0,
        le=1e6,
        description="memory limit in GB for the vectors of a rank's share of the items, of the values in their list features, "
        "and for the gradients of these vectors, with `negatives: all`",
    )
    negatives_exponent: float = Field(
        1.0,
        ge=1,
        le=10,
        description="exponent of the sum over the catalogue in the softmax, with `negatives: all`. Above `1`, the negatives "
        "have more influence, as in the loss BSL, which has two temperatures",
    )
    in_batch_negatives: bool | None = Field(
        None,
        description="use the target items of the other queries of the batch as negatives. Default: `true` with `softmax` and "
        "sampled negatives, otherwise `false`",
    )
    num_negatives: int = Field(
        512,
        ge=0,
        le=1_000_000,
        description="number of items that a rank samples as negatives in each step. All queries of the rank share them",
    )
    negative_sampling_alpha: float = Field(
        0.0,
        ge=0,
        le=10,
        description="negatives are sampled in proportion to `(number of training events)^alpha`. With `0`, all items with a "
        "training event are equally likely",
    )
    explicit_negatives: int = Field(
        0,
        ge=0,
        le=1_000,
        description="largest number of known negatives that a query has in addition to the negatives of the batch. In an "
        "ordered log, they are the user's newest known negatives at the time of the event; in a log without order, they "
        "are a random sample. Needs `interactions.explicit_negatives`",
    )
    explicit_negative_weight: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="weight of a known negative. With `softmax`, a known negative counts as this many items of the catalogue; "
        "with another loss, as this many sampled negatives",
    )
    cross_rank_negatives: bool = Field(
        False,
        description="use the candidates of all ranks as negatives of each query. Each rank still encodes only its own "
        "candidates",
    )
    logq_correction: Literal["counts", "none"] = Field(
        "counts",
        description="how the softmax loss corrects logits for the frequency with which a candidate is sampled (logQ "
        "correction, Yi et al., RecSys 2019). `counts`: by the number of training events; `none`: no correction",
    )
    mask_negatives: Literal["none", "positive", "seen"] = Field(
        "positive",
        description="candidates that are not used as negatives of a query. `positive`: the target item of the query. `seen`: "
        "the target item, and the items of the query's history. `none`: no candidate is left out",
    )
    margin: float = Field(
        0.5,
        ge=-1,
        le=1,
        description="margin of `cosine_contrastive`. A negative with a cosine below the margin adds nothing to the loss",
    )
    negative_weight: float = Field(
        100.0, gt=0, le=1e6, description="weight of the mean over the negatives in the loss `cosine_contrastive`"
    )
    user_exponent: float = Field(
        0.0,
        ge=-1,
        le=0,
        description="factor on the weight of each training event: `(number of training events of its user)^user_exponent`. "
        "With `0`, all events count alike. With `-1`, all users count alike",
    )
    distillation: DistillationConfig | None = Field(
        None, description="second loss that keeps the similarities of the pretrained item vectors. Default: no second loss"
    )

    @model_validator(mode="after")
    def _check_all_negatives(self) -> Self:
        if self.negatives == "sampled":
            if self.negatives_exponent != 1:
                raise ValueError(
                    f"loss.negatives_exponent is {self.negatives_exponent:g}, but loss.negatives is sampled; set negatives "
                    "to all, or leave negatives_exponent out"
                )
            return self
        for is_conflict, conflict_text, advice in (
            (self.kind != "softmax", f"loss.kind is {self.kind}", "set loss.kind to softmax"),
            (self.in_batch_negatives, "in_batch_negatives is true", "leave in_batch_negatives out"),
            (self.cross_rank_negatives, "cross_rank_negatives is true", "leave cross_rank_negatives out"),
            (
                self.explicit_negatives > 0,
                "loss.explicit_negatives adds known negatives, which the catalogue contains",
                "leave explicit_negatives out",
            ),
            (self.distillation is not None, "loss.distillation compares sampled items", "leave distillation out"),
        ):
            if is_conflict:
                raise ValueError(
                    f"loss.negatives is all, a softmax over the whole catalogue, but {conflict_text}; {advice}, or set "
                    "loss.negatives to sampled"
                )
        return self

    @model_validator(mode="after")
    def _check_negatives(self) -> Self:
        if self.negatives == "all":
            return self
        has_only_known_negatives = self.explicit_negatives > 0 and self.kind != "softmax"
        if not self.uses_in_batch_negatives and self.num_negatives == 0 and not has_only_known_negatives:
            raise ValueError(
                f"loss.kind is {self.kind}, which needs negatives, but num_negatives is 0 and in_batch_negatives is not true; "
                "set num_negatives"
            )
        if self.cross_rank_negatives and not self.uses_in_batch_negatives:
            raise ValueError(
                "loss.cross_rank_negatives shares in-batch negatives between ranks, but in_batch_negatives is false for "
                f"loss.kind {self.kind}; set in_batch_negatives to true"
            )
        return self

    @property
    def uses_in_batch_negatives(self) -> bool:
        """Whether the positives of the other queries are negatives."""
        if self.in_batch_negatives is None:
            return self.kind == "softmax" and self.negatives == "sampled"
        return self.in_batch_negatives

    @property
    def num_sampled_negatives(self) -> int:
        """Number of items that a rank samples in each step."""
        return self.num_negatives if self.negatives == "sampled" else 0
