"""The weight of a validated popularity term, which an export chooses after the ranks have written the vectors."""

from pathlib import Path

import numpy as np

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import memory_map
from recsys_core.models.config import ValidatedPopularity
from recsys_core.models.spec import ModelSpec
from recsys_core.training.config import ValidationConfig
from recsys_core.training.export.validated_choice import Floats32, best_weight


def choose_popularity(spec: ModelSpec, *, store: EventStore, validation: ValidationConfig | None, folder: Path) -> float:
    """Choose the weight, write it into the query vectors of the export in `folder`, and return it.

    Raises:
        InputError: there are several weights and no validation events.
    """
    popularity = spec.config.popularity
    assert isinstance(popularity, ValidatedPopularity)
    user_B = np.load(folder / "query_users_validation.npy")
    query_BD = memory_map(folder / "query_vectors_validation.npy")
    weight = best_weight(
        popularity.weights,
        _with_weight,
        queries=lambda users: query_BD[np.searchsorted(user_B, users)],
        item_ID=np.load(folder / "item_vectors.npy"),
        setting="model.popularity.weights",
        spec=spec,
        store=store,
        validation=validation,
    )
    for split in ("validation", "test"):
        np.load(folder / f"query_vectors_{split}.npy", mmap_mode="r+")[:, -1] = weight
    return weight


def _with_weight(query_BD: Floats32, weight: float) -> Floats32:
    """Return the query vectors with this weight as their last number."""
    weighted_BD = query_BD.copy()
    weighted_BD[:, -1] = weight
    return weighted_BD
