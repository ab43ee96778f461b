"""What a model has to beat: popularity, and nearest neighbours on the pretrained vectors.

Shapes: E queries, I items, R given vectors, D width.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from recsys_core.data.events import EvaluationSplit, EventStore
from recsys_core.data.jagged import JaggedArray
from recsys_core.manifests import InteractionsManifest

BELOW_ANY_COSINE = -4.0


def popularity_order(count_I: NDArray[Any], *, item_ids: pa.Array) -> NDArray[np.int32]:
    """Item rows by falling count, int32 [I]; ties by ascending id (integers by value, strings by code point).

    >>> popularity_order(np.array([2, 5, 2]), item_ids=pa.array([30, 10, 20])).tolist()
    [1, 2, 0]
    """
    by_id_I: NDArray[np.int64] = pc.sort_indices(item_ids).to_numpy().astype(np.int64)
    return by_id_I[np.argsort(-count_I[by_id_I], kind="stable")].astype(np.int32)


def popularity_before(split: EvaluationSplit, *, store: EventStore, interactions: InteractionsManifest) -> NDArray[np.int32]:
    """Item rows by falling number of events before `split`, int32 [I]: what is served to users of whom nothing is known."""
    ids = pq.read_table(interactions.path("items.parquet"), columns=["id"])["id"].combine_chunks()
    return popularity_order(store.counts_before(split), item_ids=ids)


def zero_shot_vectors(
    vectors_RD: NDArray[np.float32], *, vector_row_I: NDArray[Any], histories: JaggedArray
) -> tuple[Tensor, Tensor]:
    """(query_E(D+1), item_I(D+1)): cosine of each item with the mean of the history's normalised vectors.

    vector_row_I: row of each item in vectors_RD, -1 without a vector. The last column puts items without a vector below all
    others. A history without any vector scores every item that has one 0.
    """
    has_vector_I = torch.from_numpy(np.asarray(vector_row_I) >= 0)
    item_ID = torch.zeros((len(vector_row_I), vectors_RD.shape[1]))
    item_ID[has_vector_I] = normalize(
        torch.from_numpy(vectors_RD[vector_row_I[has_vector_I.numpy()]].astype(np.float32)), dim=1
    )
    known = histories.filter(has_vector_I.numpy()[histories.values_L])
    query_ED = embedding_bag(
        torch.from_numpy(known.values_L), item_ID, torch.from_numpy(known.offset), mode="mean", include_last_offset=True
    )
    penalty_I1 = torch.where(has_vector_I, 0.0, BELOW_ANY_COSINE)[:, None]
    return (
        torch.cat([normalize(query_ED, dim=1), torch.ones((len(query_ED), 1))], dim=1),
        torch.cat([item_ID, penalty_I1], dim=1),
    )
