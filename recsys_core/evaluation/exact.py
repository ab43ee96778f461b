"""Exact ranking of the full catalogue, in bounded memory.

Shapes: E queries, I items, D width, C queries of a chunk, P (query, target) pairs, K length of the list.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.data.lists import Lists
from recsys_core.errors import StageError

SCORE_BUDGET = 1 << 20
"""Scores held at a time: 4 MiB in float32, which stays in the caches."""
LEAST_QUERIES = 16
"""Queries of a chunk, however many items: one reading of the item vectors should serve several."""


@dataclass(frozen=True)
class Ranking:
    """What ranking the whole catalogue gave.

    query_P int64 [P], target_row_P int64 [P], rank_P int64 [P] (0-based): the targets that could be ranked.
    candidates_E int64 [E]: items ranked per query. top_EK int32 [E, K]: best item rows, -1 after the last candidate.
    seen_targets: targets left out because the query's user had seen them. items: I, the catalogue.
    """

    query_P: NDArray[np.int64]
    target_row_P: NDArray[np.int64]
    rank_P: NDArray[np.int64]
    candidates_E: NDArray[np.int64]
    top_EK: NDArray[np.int32]
    seen_targets: int
    items: int


def rank_catalogue(
    query_ED: Tensor, *, item_ID: Tensor, seen: Lists, targets: Lists, k: int, score_budget: int = SCORE_BUDGET
) -> Ranking:
    """Ranks all items but the seen ones by inner product, for every query; equal scores go by ascending item row.

    Args:
        query_ED, item_ID: of one floating type. seen, targets: item rows per query. k: length of the top list; 0 for none,
            which saves most of the time.
        score_budget: scores held at a time, unless the catalogue is so large that LEAST_QUERIES exceed it.

    A target that is seen is no target; the other targets of a user are candidates like any item. Raises StageError if a
    vector is not finite.
    """
    items = len(item_ID)
    for name, vectors in (("query", query_ED), ("item", item_ID)):
        if not torch.isfinite(vectors).all():
            row = int(torch.nonzero(~torch.isfinite(vectors).all(dim=1))[0])
            raise StageError(
                f"{name} vector {row} has a number that is not finite; training diverged: lower its learning rates"
            )
    seen, wanted = seen.distinct(rows=items), targets.distinct(rows=items)
    rankable = wanted.without(seen, rows=items)
    k = min(k, items)
    top_EK = np.full((len(query_ED), k), -1, np.int32)
    rank_P = np.zeros(len(rankable.row_T), np.int64)

    step = max(LEAST_QUERIES, score_budget // max(items, 1))
    for start in range(0, len(query_ED), step):
        end = min(start + step, len(query_ED))
        seen_part, target_part = seen.part(start, end), rankable.part(start, end)
        score_CI = query_ED[start:end] @ item_ID.T
        score_CI[torch.from_numpy(seen_part.owner_T), torch.from_numpy(seen_part.row_T)] = -torch.inf
        if k:
            top_EK[start:end] = _top(score_CI, k=k).numpy()
        rank_P[rankable.offset[start] : rankable.offset[end]] = _ranks(score_CI, targets=target_part, pairs_at_once=step)
    return Ranking(
        query_P=rankable.owner_T,
        target_row_P=rankable.row_T,
        rank_P=rank_P,
        candidates_E=items - seen.length_N,
        top_EK=top_EK,
        seen_targets=len(wanted.row_T) - len(rankable.row_T),
        items=items,
    )


def _ranks(score_CI: Tensor, *, targets: Lists, pairs_at_once: int) -> NDArray[np.int64]:
    """Items above each target: those with a higher score, and those with the same score and a lower row."""
    query_P, row_P = torch.from_numpy(targets.owner_T), torch.from_numpy(targets.row_T)
    row_I = torch.arange(score_CI.shape[1])
    rank_P = torch.empty(len(row_P), dtype=torch.int64)
    for start in range(0, len(row_P), pairs_at_once):
        part = slice(start, start + pairs_at_once)
        score_pI = score_CI[query_P[part]]
        score_p1 = score_pI.gather(1, row_P[part, None])
        rank_P[part] = (score_pI > score_p1).sum(dim=1)
        tied_p = (score_pI == score_p1).sum(dim=1) > 1
        if tied_p.any():
            tied_tI = score_pI[tied_p] == score_p1[tied_p]
            rank_P[part][tied_p] += (tied_tI & (row_I < row_P[part][tied_p, None])).sum(dim=1)
    return rank_P.numpy()


def _top(score_CI: Tensor, *, k: int) -> Tensor:
    """Rows of the k best scores, int32 [C, k]; equal scores by ascending row, -1 where the score is -inf."""
    value_CK, row_CK = score_CI.topk(k, dim=1)
    # topk breaks ties as it likes: order them by row, and where a tie crosses the cut take a full stable sort.
    row_CK = row_CK.sort(dim=1).values
    value_CK, order_CK = score_CI.gather(1, row_CK).sort(dim=1, descending=True, stable=True)
    row_CK = row_CK.gather(1, order_CK)
    cut_C = (score_CI >= value_CK[:, -1:]).sum(dim=1) > k
    if cut_C.any():
        value_CK[cut_C], row_CK[cut_C] = (part[:, :k] for part in score_CI[cut_C].sort(dim=1, descending=True, stable=True))
    return torch.where(value_CK == -torch.inf, -1, row_CK).to(torch.int32)
