"""Random queries, and items of which many have equal scores."""

import numpy as np
import torch

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation.ranking.queries import Queries


def random_queries_and_items(*, num_queries: int, num_items: int, dim: int) -> tuple[Queries, torch.Tensor]:
    """Return queries with seen items and targets, and item vectors of which a third are copies of other vectors."""
    random = np.random.default_rng(7)
    item_vector_ID = random.normal(size=(num_items, dim)).astype(np.float32)
    copied_items = random.choice(num_items, num_items // 3)
    item_vector_ID[random.choice(num_items, num_items // 3, replace=False)] = item_vector_ID[copied_items]
    seen, targets = (
        JaggedArray.from_lengths(np.full(num_queries, length), random.integers(0, num_items, num_queries * length))
        for length in (20, 9)
    )
    query_BD = torch.from_numpy(random.normal(size=(num_queries, dim)).astype(np.float32))
    queries = Queries(query_BD, is_known_B=np.ones(num_queries, np.bool_), seen=seen, targets=targets)
    return queries, torch.from_numpy(item_vector_ID)
