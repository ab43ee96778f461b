"""Comparison of two versions' recommendations: overlap of the top lists, and items whose number of users changes most."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from recsys_core.config import Frozen
from recsys_core.errors import InputError
from recsys_core.serving.ids import Id
from recsys_core.serving.retriever import Retriever

MAX_MOVERS = 10
"""Largest number of items in `VersionComparison.movers`."""
SAMPLE_SEED = 0


class Mover(Frozen):
    """An item, and the number of users who get it from each version."""

    item_id: Id
    title: str | None
    num_users_before: int
    num_users_after: int


class VersionComparison(Frozen):
    """Comparison of the recommendations of two versions to the same users.

    Attributes:
        k: number of items per user.
        num_users: number of sampled users.
        mean_overlap: mean share of a user's items that both versions recommend.
        num_equal_lists: number of users who get the same items in the same order.
        movers: the items with the largest differences, the largest first.
    """

    k: int
    num_users: int
    mean_overlap: float
    num_equal_lists: int
    movers: tuple[Mover, ...]


def compare_recommendations(
    retriever_before: Retriever, retriever_after: Retriever, *, num_users: int, k: int
) -> VersionComparison:
    """Compare the top k items of a random sample of the users that both versions know.

    Raises:
        InputError: no user is in both versions, or the user ids of the versions have different types.
    """
    user_ids = _common_users(retriever_before, retriever_after, num_users=num_users)
    lists_before, lists_after = (retriever.recommend(user_ids, k).item_ids for retriever in (retriever_before, retriever_after))
    list_pairs = [
        (ids_before.tolist(), ids_after.tolist()) for ids_before, ids_after in zip(lists_before, lists_after, strict=True)
    ]
    # Two empty lists are equal: a user may have seen all items.
    overlap_shares = [
        len({*ids_before} & {*ids_after}) / max(len(ids_before), len(ids_after)) if ids_before or ids_after else 1.0
        for ids_before, ids_after in list_pairs
    ]
    num_users_before = Counter(item_id for ids_before, _ in list_pairs for item_id in ids_before)
    num_users_after = Counter(item_id for _, ids_after in list_pairs for item_id in ids_after)
    return VersionComparison(
        k=k,
        num_users=len(list_pairs),
        mean_overlap=float(np.mean(overlap_shares)),
        num_equal_lists=sum(ids_before == ids_after for ids_before, ids_after in list_pairs),
        movers=_movers(num_users_before, num_users_after, title_retrievers=(retriever_after, retriever_before)),
    )


def _common_users(retriever_before: Retriever, retriever_after: Retriever, *, num_users: int) -> Any:
    """Return a random sample of the user ids that both versions have."""
    user_rows = np.random.default_rng(SAMPLE_SEED).permutation(len(retriever_before.user_ids))
    user_ids = retriever_before.user_ids.ids(user_rows)
    common_ids = user_ids[retriever_after.is_known(user_ids.tolist())] if len(user_ids) else user_ids
    if not len(common_ids):
        raise InputError(
            f"version {retriever_before.version} and version {retriever_after.version} have no user in common, "
            "so their recommendations cannot be compared"
        )
    return common_ids[:num_users]


def _movers(
    num_users_before: Mapping[Id, int], num_users_after: Mapping[Id, int], *, title_retrievers: tuple[Retriever, ...]
) -> tuple[Mover, ...]:
    """Return the items whose number of users changes most.

    Args:
        num_users_before, num_users_after: number of users who get an item from each version, by item id.
        title_retrievers: retrievers that may have the titles, the preferred retriever first.
    """
    change_by_item = {
        item_id: num_users_after.get(item_id, 0) - num_users_before.get(item_id, 0)
        for item_id in {**num_users_before, **num_users_after}
    }
    moved_ids = [item_id for item_id, change in change_by_item.items() if change]
    moved_ids.sort(key=lambda item_id: (-abs(change_by_item[item_id]), str(item_id)))
    return tuple(
        Mover(
            item_id=item_id,
            title=_title_of(item_id, title_retrievers),
            num_users_before=num_users_before.get(item_id, 0),
            num_users_after=num_users_after.get(item_id, 0),
        )
        for item_id in moved_ids[:MAX_MOVERS]
    )


def _title_of(item_id: Id, retrievers: tuple[Retriever, ...]) -> str | None:
    for retriever in retrievers:
        item_rows = retriever.item_ids.rows([item_id])
        if item_rows[0] >= 0 and (title := retriever.items.titles(item_rows)[0]) is not None:
            return title
    return None
