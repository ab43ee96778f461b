"""Settings that fit the data: facts about a log, and rules that derive settings from them.

The rules are starting points with measured reasons (docs/models.md). `nightjar tune` finds the best values.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from recsys_core.config import Frozen
from recsys_core.dataset.events import EventStore
from recsys_core.manifests import Dataset

DENSE_LOG = 0.01
"""Share of all (user, item) pairs in the log from which the log counts as dense."""
STEPS_PER_EPOCH = 300
"""Number of steps that the suggested batch size aims at."""
MAX_HISTORY = 50


class DataFacts(Frozen):
    """What the suggestions depend on.

    Attributes:
        density: share of all pairs of a user and an item that are in the training events.
        history_p95: 95th percentile of the number of training events of a user.
        vector_share: share of the training events whose item has a pretrained vector.
        cold_share: share of the held-out events whose item has no training event.
    """

    num_users: int
    num_items: int
    num_train_events: int
    density: float
    history_median: float
    history_p95: float
    is_ordered: bool
    has_item_features: bool
    vector_share: float
    cold_share: float

    @classmethod
    def of(cls, dataset: Dataset) -> "DataFacts":
        """Measure the facts on the ingested data. The held-out events are read only for `cold_share`."""
        interactions, store = dataset.interactions, EventStore.open(dataset.interactions)
        train_count_U, train_count_I = store.train_count_U, store.train_count_I
        lengths = train_count_U[train_count_U > 0]
        num_users, num_items, num_events = len(lengths), int((train_count_I > 0).sum()), interactions.num_train_events
        vector_row_I = store.vector_rows("item")
        held_out_I = store.event_count_I() - train_count_I
        return cls(
            num_users=num_users,
            num_items=num_items,
            num_train_events=num_events,
            density=num_events / max(1, num_users * num_items),
            history_median=float(np.median(lengths)) if len(lengths) else 0.0,
            history_p95=float(np.percentile(lengths, 95)) if len(lengths) else 0.0,
            is_ordered=store.is_ordered,
            has_item_features=dataset.features is not None
            and any(key.startswith("item.") for key in dataset.features.features),
            vector_share=0.0 if vector_row_I is None else float(train_count_I[vector_row_I >= 0].sum() / max(1, num_events)),
            cold_share=float(held_out_I[train_count_I == 0].sum() / max(1, held_out_I.sum())),
        )


class Suggestion(Frozen):
    """A setting, its suggested value, and the reason in one sentence."""

    setting: str
    value: Any
    reason: str


def suggestions(facts: DataFacts) -> Iterator[Suggestion]:
    """Yield the settings that fit the data."""
    density = f"{100 * facts.density:.2g} % of all pairs of users and items are in the log"
    if facts.density >= DENSE_LOG:
        yield Suggestion(setting="model.temperature", value=0.2, reason=f"{density}: a dense log needs a higher temperature")
        reason = f"{density}, so many sampled negatives are items that the user has had"
        yield Suggestion(setting="loss.mask_negatives", value="seen", reason=reason)
    else:
        yield Suggestion(setting="model.temperature", value=0.1, reason=f"{density}: a sparse log needs a low temperature")
    length = int(min(MAX_HISTORY, max(10, 10 * math.ceil(facts.history_p95 / 10))))
    reason = f"95 % of the users have at most {facts.history_p95:,.0f} events"
    yield Suggestion(setting="model.history.length", value=length, reason=reason)
    if facts.is_ordered:
        reason = "the log has an order, so newer items can count more"
        yield Suggestion(setting="model.history.pooling", value="recency", reason=reason)
    else:
        reason = "the log has no order, so no item is the last"
        yield Suggestion(setting="model.history.pooling", value="mean", reason=reason)
        yield Suggestion(setting="model.history.last_item_feature", value=False, reason=reason)
    if facts.has_item_features or facts.vector_share > 0:
        sources = "features" if facts.has_item_features else "pretrained vectors"
        reason = f"items have {sources}, which then also describe the histories"
        yield Suggestion(setting="model.history.item_representation", value="candidate_tower", reason=reason)
    if facts.history_median < 20:
        reason = f"the median user has {facts.history_median:,.0f} training events, so the towers overfit without dropout"
        yield Suggestion(setting="model.query.dropout", value=0.3, reason=reason)
    num_negatives = 2048 if facts.num_items > 4 * 2048 else 512
    reason = f"{facts.num_items:,} items can be negatives; more of them approximate the softmax over all items better"
    yield Suggestion(setting="loss.num_negatives", value=num_negatives, reason=reason)
    if facts.cold_share > 0.2 and facts.vector_share > 0:
        reason = (
            f"{facts.cold_share:.0%} of the held-out events are of items without a training event, which only have their vector"
        )
        yield Suggestion(setting="tables.item.transfer", value="residual", reason=reason)
    batch_size = 2 ** round(math.log2(min(8192, max(256, facts.num_train_events / STEPS_PER_EPOCH))))
    reason = f"an epoch then has about {max(1, facts.num_train_events // batch_size):,} steps"
    yield Suggestion(setting="training.batch_size", value=batch_size, reason=reason)
