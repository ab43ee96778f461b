"""How much the recommendations of two versions differ: overlap of the top lists, and items that more or fewer users get."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from recsys_core.config import Frozen
from recsys_core.errors import InputError
from recsys_core.serving.ids import Id
from recsys_core.serving.retriever import Retriever

NUM_MOVERS = 10
SAMPLE_SEED = 0


class Mover(Frozen):
    """An item, and the number of users who get it from each version."""

    item_id: Id
    title: str | None
    num_users_before: int
    num_users_after: int


class VersionOverlap(Frozen):
    """Difference of the recommendations of two versions to the same users.

    Attributes:
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


def overlap(before: Retriever, after: Retriever, *, num_users: int, k: int) -> VersionOverlap:
    """Compare the top k items of a random sample of the users that both versions know.

    Raises:
        InputError: no user is in both versions, or their ids have different types.
    """
    user_ids = _common_users(before, after, num_users=num_users)
    lists_before, lists_after = (retriever.recommend(user_ids, k).item_ids for retriever in (before, after))
    pairs = [(items.tolist(), new_items.tolist()) for items, new_items in zip(lists_before, lists_after, strict=True)]
    # Two empty lists are equal: a user may have seen all items.
    shares = [
        len({*items} & {*new_items}) / max(len(items), len(new_items)) if items or new_items else 1.0
        for items, new_items in pairs
    ]
    count_before, count_after = (Counter(item for pair in pairs for item in pair[version]) for version in (0, 1))
    return VersionOverlap(
        k=k,
        num_users=len(pairs),
        mean_overlap=float(np.mean(shares)),
        num_equal_lists=sum(items == new_items for items, new_items in pairs),
        movers=_movers(count_before, count_after, titles=(after, before)),
    )


def _common_users(before: Retriever, after: Retriever, *, num_users: int) -> Any:
    """Return a random sample of the user ids that both versions have."""
    order = np.random.default_rng(SAMPLE_SEED).permutation(len(before.user_ids))
    user_ids = before.user_ids.ids(order)
    common_ids = user_ids[after.is_known(user_ids.tolist())] if len(user_ids) else user_ids
    if not len(common_ids):
        raise InputError(
            f"version {before.version} and version {after.version} have no user in common, so their recommendations cannot be "
            "compared"
        )
    return common_ids[:num_users]


def _movers(
    count_before: Mapping[Id, int], count_after: Mapping[Id, int], *, titles: tuple[Retriever, ...]
) -> tuple[Mover, ...]:
    """Return the items whose number of users changes most. titles: versions with titles, the preferred first."""
    changes = {item: count_after.get(item, 0) - count_before.get(item, 0) for item in {**count_before, **count_after}}
    largest = sorted((item for item in changes if changes[item]), key=lambda item: (-abs(changes[item]), str(item)))
    return tuple(
        Mover(
            item_id=item,
            title=_title(item, titles),
            num_users_before=count_before.get(item, 0),
            num_users_after=count_after.get(item, 0),
        )
        for item in largest[:NUM_MOVERS]
    )


def _title(item: Id, retrievers: tuple[Retriever, ...]) -> str | None:
    for retriever in retrievers:
        row = retriever.item_ids.rows([item])
        if row[0] >= 0 and (title := retriever.items.titles(row)[0]) is not None:
            return title
    return None
