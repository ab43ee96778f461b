"""Unit vectors with bounded gradients, and first training steps with empty histories and zero rows."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_core.dataset.batch import Batch
from recsys_core.models.normalisation import unit_vectors
from recsys_core.models.task import RetrievalTask
from tests.recsys_core.models.test_task import ITEMS, batch_of, task_of, weight_of

STD, DIM, TEMPERATURE = 0.02, 4, 0.1
NORM = STD * math.sqrt(DIM)
"""Expected length of a random row."""
EMPTY = [[], [], []]
SIMILARITIES = pytest.mark.parametrize("similarity", ["cosine", "dot"])


@settings(deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 0.5, 3.0, 1e4]), min_size=1, max_size=6),
    min_norm=st.sampled_from([0.01, 0.5]),
)
def test_unit_vectors_have_length_one_and_a_gradient_bounded_by_min_norm(
    seed: int, lengths: list[float], min_norm: float
) -> None:
    torch.manual_seed(seed)
    length_R1 = torch.tensor(lengths)[:, None]
    vector_RD = (normalize(torch.randn(len(lengths), 5), dim=1) * length_R1).requires_grad_()
    gradient_RD = torch.randn(len(lengths), 5)
    unit_RD = unit_vectors(vector_RD, min_norm=min_norm)
    exact_RD = normalize(vector_RD, dim=1)
    torch.testing.assert_close(unit_RD, exact_RD, rtol=0, atol=0)
    (bounded_gradient_RD,) = torch.autograd.grad(unit_RD, vector_RD, gradient_RD)
    (exact_gradient_RD,) = torch.autograd.grad(exact_RD, vector_RD, gradient_RD)
    assert (bounded_gradient_RD.norm(dim=1) <= gradient_RD.norm(dim=1) / min_norm * (1 + 1e-5)).all()
    is_long_R = length_R1[:, 0] >= min_norm
    torch.testing.assert_close(bounded_gradient_RD[is_long_R], exact_gradient_RD[is_long_R], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(bounded_gradient_RD[length_R1[:, 0] == 0], gradient_RD[length_R1[:, 0] == 0] / min_norm)


def initial_task(config: dict[str, Any], **kwargs: Any) -> RetrievalTask:
    """Return a task before the first step. The rows of items 0 and 3 are zero."""
    task = task_of(config | {"temperature": TEMPERATURE}, **kwargs)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in task.embedding_tables.parameters():
            parameter.normal_(0.0, STD)
        weight_of(task, "item")[[0, 3]] = 0.0
    return task


def gradients(task: RetrievalTask, batch: Batch) -> dict[str, Tensor]:
    task.zero_grad()
    task(batch)[0].backward()
    return {name: parameter.grad for name, parameter in task.named_parameters() if parameter.grad is not None}


@SIMILARITIES
@pytest.mark.parametrize("pooling", ["mean", "sum", "recency", "attention"])
@pytest.mark.parametrize("item_representation", ["embedding", "candidate_tower"])
def test_gradients_of_short_vectors_are_bounded(similarity: str, pooling: str, item_representation: str) -> None:
    history = {"pooling": pooling, "item_representation": item_representation, "length": 4, "item_dropout": 0.5}
    task = initial_task({"history": history, "similarity": similarity}, loss={"num_negatives": 4})
    min_norm = NORM / math.sqrt(4) if similarity == "cosine" else 1.0
    for histories in (EMPTY, [[0, 3], [3], []], [[1, 4], [], [8, 8, 3]]):
        gradient = gradients(task, batch_of(histories=histories))
        # The gradient of a score is at most 2 / (temperature B), and so is that of a unit vector; normalisation divides it by
        # at least min_norm.
        start = next(value for name, value in gradient.items() if name.endswith("query.pooling.start"))
        assert 0 < start.norm() <= 2 / TEMPERATURE / min_norm
        # A row is used in several histories and candidates, and behind two normalisations with candidate_tower.
        assert all(value.norm() < 10 * 2 / TEMPERATURE / min_norm / NORM for value in gradient.values())


@SIMILARITIES
def test_users_without_history_or_row_do_not_inflate_adams_second_moment(similarity: str) -> None:
    task = initial_task({"similarity": similarity}, loss={"num_negatives": 4})
    optimizer = torch.optim.AdamW(task.head.parameters(), lr=1e-3)
    moments = []
    for histories in (EMPTY, [[1, 4], [2], [8, 8, 3]]):
        gradients(task, batch_of(histories=histories))
        optimizer.step()
        moments.append(max(state["exp_avg_sq"].max().item() for state in optimizer.state.values()))
    assert moments[1] < 100 and moments[0] < 100 * moments[1]


@SIMILARITIES
def test_one_sgd_step_does_not_blow_up_the_layers(similarity: str) -> None:
    task = initial_task({"similarity": similarity}, loss={"num_negatives": 4})
    optimizer = torch.optim.SGD(task.head.parameters(), lr=1e-3)
    gradients(task, batch_of(histories=EMPTY))
    optimizer.step()
    assert all(parameter.abs().max() < 2 for parameter in task.head.parameters())
    assert task(batch_of(histories=EMPTY))[0] < 10


def test_empty_histories_train_the_start_vector() -> None:
    task = initial_task({"history": {"length": 4}}, loss={"num_negatives": 4})
    optimizer = torch.optim.AdamW(task.head.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        gradients(task, batch_of([7, 7, 7, 1, 1, 6, 4], histories=EMPTY))
        optimizer.step()
        losses.append(task(batch_of([7, 7, 7, 1, 1, 6, 4], histories=EMPTY))[0].item())
    assert losses[-1] < 0.5 * losses[0]
    assert task.eval().encode_queries(batch_of([], histories=EMPTY)).norm(dim=1).tolist() == pytest.approx([1.0] * 3)


@SIMILARITIES
def test_zero_rows_are_trained_as_fast_as_random_rows(similarity: str) -> None:
    task = initial_task({"similarity": similarity}, loss={"num_negatives": 4, "mask_negatives": "positive"})
    items = weight_of(task, "item")
    optimizer = RowWiseAdagrad([items], lr=0.01, eps=1e-8)
    path = torch.zeros(ITEMS)
    candidates = [0, 1, 3, 2, 5, 6, 4]
    for step in range(40):
        before = items.detach().clone()
        gradients(task, batch_of(candidates[step % 3 :] + candidates[: step % 3], histories=[[7], [8], [7, 8]]))
        optimizer.step()
        if step >= 10:  # after the first steps, which Adagrad makes equally long for every row
            path += (items - before).norm(dim=1).detach()
    zeros, random = path[[0, 3]], path[[1, 2, 5, 6, 4]]
    assert zeros.min() > 0.2 * random.mean()
