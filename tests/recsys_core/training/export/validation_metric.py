"""NDCG of the validation events, by sorting the scores of each user."""

import numpy as np

from recsys_core.dataset.events import EventStore


def mean_ndcg(score_UI: np.ndarray, *, store: EventStore, k: int) -> float:
    """Return the mean NDCG@k of all users. Items that a user had before the validation events are not ranked."""
    users = np.arange(len(score_UI))
    seen_items, targets = store.items_before(users, "validation"), store.targets(users, "validation")
    ndcg_by_user = []
    for user, score_I in enumerate(score_UI.copy()):
        score_I[seen_items.slice(user, user + 1).values_L] = -np.inf
        target_items = targets.slice(user, user + 1).values_L
        discount_K = 1 / np.log2(np.arange(2, k + 2))
        is_target_K = np.isin(np.argsort(-score_I)[:k], target_items)
        ndcg_by_user.append((is_target_K * discount_K).sum() / discount_K[: len(target_items)].sum())
    return float(np.mean(ndcg_by_user))
