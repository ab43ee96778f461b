"""The choice of a popularity weight or spectral-block weight after the training, by the metric on the validation users.

Shapes: B queries, I items, U users with a target, D width of a vector.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import memory_map
from recsys_core.errors import InputError
from recsys_core.evaluation.held_out import queries_of
from recsys_core.evaluation.ranking.catalogue import rank_catalogue
from recsys_core.models.score_config import ValidatedPopularity
from recsys_core.models.spec import ModelSpec
from recsys_core.training.config import ValidationConfig
from recsys_core.training.validation import METRIC_BY_NAME, users_to_validate

Floats32 = NDArray[np.float32]


def best_weight(
    weights: Sequence[float],
    apply_weight: Callable[[Floats32, float], Floats32],
    *,
    vectors_of_users: Callable[[NDArray[np.int64]], Floats32],
    item_vector_ID: Floats32,
    setting: str,
    spec: ModelSpec,
    store: EventStore,
    validation: ValidationConfig | None,
) -> float:
    """Return the weight with the best metric on the validation users. Of equally good weights, return the smallest.

    A single weight is returned without a ranking. All items are ranked, even with `candidates: cold`, because a weight does not
    change the order of the cold items, which have neither a block nor a popularity.

    Args:
        apply_weight: `apply_weight(query_BD, weight)` returns the query vectors with this weight.
        vectors_of_users: `vectors_of_users(user_rows)` returns the query vectors [B, D] without a weight.
        item_vector_ID: vectors of all items.
        setting: name of the setting in an error message.

    Raises:
        InputError: there are several weights, but no validation event.
    """
    if len(weights) == 1:
        return weights[0]
    user_row_U = np.zeros(0, np.int64) if validation is None else users_to_validate(validation, store=store, cold_items=None)
    if validation is None or not len(user_row_U):
        raise InputError(
            f"{setting} has {len(weights)} values, but there are no validation events to choose one of them; give one "
            "weight, or hold out validation events (interactions.split)"
        )
    query_BD, metric_by_weight = vectors_of_users(user_row_U), {}
    unweighted_queries, _ = queries_of(
        user_row_U, torch.from_numpy(query_BD), split="validation", exclude_seen=True, store=store, spec=spec
    )
    for weight in sorted(weights):
        known_queries = replace(unweighted_queries, query_BD=torch.from_numpy(apply_weight(query_BD, weight))).known()
        ranking = rank_catalogue(known_queries, item_vector_ID=torch.from_numpy(item_vector_ID), k=0)
        metric_U = METRIC_BY_NAME[validation.metric](ranking.target_positions(), k=validation.k)
        metric_by_weight[weight] = float(metric_U.mean()) if len(metric_U) else 0.0
    return max(metric_by_weight, key=lambda weight: metric_by_weight[weight])


def choose_popularity(spec: ModelSpec, *, store: EventStore, validation: ValidationConfig | None, folder: Path) -> float:
    """Choose the weight of a popularity term, write the weight into the query vectors of the export in `folder`, and return it.

    Raises:
        InputError: there are several weights and no validation events.
    """
    popularity = spec.config.popularity
    assert isinstance(popularity, ValidatedPopularity)
    user_row_B = np.load(folder / "query_users_validation.npy")
    query_BD = memory_map(folder / "query_vectors_validation.npy")
    weight = best_weight(
        popularity.weights,
        _with_weight,
        vectors_of_users=lambda user_row_U: query_BD[np.searchsorted(user_row_B, user_row_U)],
        item_vector_ID=np.load(folder / "item_vectors.npy"),
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
