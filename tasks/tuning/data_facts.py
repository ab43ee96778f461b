"""Facts about an ingested log, from which `suggestions` derives settings."""

from typing import Self

import numpy as np

from recsys_core.config import Frozen
from recsys_core.dataset.events import EventStore
from recsys_core.manifests import Dataset

DENSE_LOG = 0.01
"""Share of all (user, item) pairs in the log from which the log counts as dense."""


class DataFacts(Frozen):
    """What the suggestions depend on.

    Attributes:
        density: share of all pairs of a user and an item that are in the training events.
        history_median, history_p95: median and 95th percentile of the number of training events of a user.
        has_vectors: whether any table has vectors from files.
        vector_share: share of the training events whose item has a pretrained vector.
        vector_dim: width of the item vectors; 0 without vectors.
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
    has_vectors: bool
    vector_share: float
    vector_dim: int
    cold_share: float

    @classmethod
    def of(cls, dataset: Dataset) -> Self:
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
            has_vectors=dataset.embeddings is not None,
            vector_share=0.0 if vector_row_I is None else float(train_count_I[vector_row_I >= 0].sum() / max(1, num_events)),
            vector_dim=0 if vector_row_I is None or dataset.embeddings is None else dataset.embeddings.tables["item"].dim,
            cold_share=float(held_out_I[train_count_I == 0].sum() / max(1, held_out_I.sum())),
        )

    @property
    def is_dense(self) -> bool:
        """Whether so many pairs of users and items are in the log that it counts as dense."""
        return self.density >= DENSE_LOG

    @property
    def describes_items(self) -> bool:
        """Whether items have features or pretrained vectors in addition to their ids."""
        return self.has_item_features or self.vector_share > 0
