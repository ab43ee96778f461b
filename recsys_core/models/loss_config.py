"""What the user says about the loss."""

from typing import Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import Settings

LossKind = Literal["softmax", "bce", "bpr", "cosine_contrastive"]


class DistillationConfig(Settings):
    """A second loss: items that the pretrained vectors hold similar stay similar."""

    weight: float = Field(0.1, gt=0, le=1e6, description="of this loss beside the other")
    temperature: float = Field(0.1, ge=1e-4, le=1e4, description="of the softmax over similarities")


class LossConfig(Settings):
    """What is minimised."""

    kind: LossKind = Field(
        "softmax",
        description="softmax over the candidates; bce: binary cross-entropy; bpr: pairs; cosine_contrastive: margin (SimpleX)",
    )
    in_batch: bool | None = Field(
        None, description="the other queries' positives are negatives too; empty: for softmax they are, else not"
    )
    negatives: int = Field(512, ge=0, le=1_000_000, description="items drawn per step and rank, shared by its queries")
    negatives_alpha: float = Field(
        0.0, ge=0, le=10, description="drawn in proportion to (training events)^alpha; 0: all items with a training event alike"
    )
    all_ranks: bool = Field(
        False, description="share the candidates of all ranks: more negatives for the same work of the towers"
    )
    logq: Literal["counts", "streaming", "none"] = Field(
        "counts",
        description="softmax: correct for how often a candidate is sampled (Yi et al., RecSys 2019), known from the counts of "
        "the ingest or estimated while training",
    )
    mask: Literal["none", "positive", "seen"] = Field(
        "positive", description="never a negative: the query's own positive; seen: nor what is in its history"
    )
    margin: float = Field(0.5, ge=-1, le=1, description="cosine_contrastive: a negative below this similarity costs nothing")
    negative_weight: float = Field(100.0, gt=0, le=1e6, description="cosine_contrastive: weight of the mean over the negatives")
    distillation: DistillationConfig | None = Field(
        None, description="keep the pretrained item vectors' similarities; empty: do not"
    )

    @model_validator(mode="after")
    def _has_negatives(self) -> Self:
        if not self.uses_batch and self.negatives == 0:
            raise ValueError(
                f"loss.kind is {self.kind}, which needs negatives, but negatives is 0 and in_batch is not true; set negatives"
            )
        if self.all_ranks and not self.uses_batch:
            raise ValueError(
                f"loss.all_ranks shares in-batch candidates, but loss.kind {self.kind} has none; set in_batch to true"
            )
        return self

    @property
    def uses_batch(self) -> bool:
        """Whether the other queries' positives are negatives."""
        return self.kind == "softmax" if self.in_batch is None else self.in_batch
