import numpy as np
import torch

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation import baselines


def _lists(*rows: list[int]) -> JaggedArray:
    return JaggedArray(np.cumsum([0, *map(len, rows)]), np.array([row for part in rows for row in part], np.int64))


def test_zero_shot_ranks_by_cosine_with_the_mean_of_the_normalised_history() -> None:
    vectors = np.array([[10, 0], [0, 1], [1, 1], [-1, 0]], np.float32)
    row_of_item = np.array([2, 0, -1, 1, 3])
    history = _lists([1, 3, 2], [1, 1, 3], [2], [])
    query, item = baselines.zero_shot_vectors(vectors, vector_row_I=row_of_item, histories=history)
    score = query @ item.T
    half = 2**-0.5
    # The long vector [10, 0] counts no more than [0, 1], and the item without a vector counts nothing.
    torch.testing.assert_close(score[0, [0, 1, 3, 4]], torch.tensor([1.0, half, half, -half]))
    torch.testing.assert_close(score[1, 1] / score[1, 3], torch.tensor(2.0))
    assert (score[:, 2] < score[:, [0, 1, 3, 4]].min(dim=1).values).all()
    assert (score[2:][:, [0, 1, 3, 4]] == 0).all()
