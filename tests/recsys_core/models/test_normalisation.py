"""Unit vectors with bounded gradients, and what that makes of a first step: empty histories, rows of zeros, no feature at all.

Shapes: n vectors, O their width, B queries.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_core.data.batch import Batch
from recsys_core.models.normalisation import unit_vectors
from recsys_core.models.task import RetrievalTask
from tests.recsys_core.models.test_task import ITEMS, batch_of, task_of, weight_of

STD, DIM, TEMPERATURE = 0.02, 4, 0.1
NORM = STD * math.sqrt(DIM)
"""Of a random row."""
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
    length_n1 = torch.tensor(lengths)[:, None]
    vector_nO = (normalize(torch.randn(len(lengths), 5), dim=1) * length_n1).requires_grad_()
    gradient_nO = torch.randn(len(lengths), 5)
    unit_nO = unit_vectors(vector_nO, min_norm=min_norm)
    exact_nO = normalize(vector_nO, dim=1)
    torch.testing.assert_close(unit_nO, exact_nO, rtol=0, atol=0)
    (found_nO,) = torch.autograd.grad(unit_nO, vector_nO, gradient_nO)
    (wide_nO,) = torch.autograd.grad(exact_nO, vector_nO, gradient_nO)
    assert (found_nO.norm(dim=1) <= gradient_nO.norm(dim=1) / min_norm * (1 + 1e-5)).all()
    is_long_n = length_n1[:, 0] >= min_norm
    torch.testing.assert_close(found_nO[is_long_n], wide_nO[is_long_n], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found_nO[length_n1[:, 0] == 0], gradient_nO[length_n1[:, 0] == 0] / min_norm)


def fresh(config: dict[str, Any], **more: Any) -> RetrievalTask:
    """A task with tables as a training starts from them, apart from items 0 and 3, whose rows are zeros."""
    task = task_of(config | {"temperature": TEMPERATURE}, **more)
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
def test_no_gradient_is_larger_than_the_loss_warrants(similarity: str, pooling: str, item_representation: str) -> None:
    history = {"pooling": pooling, "item_representation": item_representation, "length": 4, "item_dropout": 0.5}
    task = fresh({"history": history, "similarity": similarity}, loss={"num_negatives": 4})
    min_norm = NORM / math.sqrt(4) if similarity == "cosine" else 1.0
    for histories in (EMPTY, [[0, 3], [3], []], [[1, 4], [], [8, 8, 3]]):
        found = gradients(task, batch_of(histories=histories))
        # The softmax moves each of the B scores by at most 2 / (temperature B), a unit vector by that much, and what is
        # normalised to it by that over the min_norm.
        bias = next(value for name, value in found.items() if name.endswith("query.tower.layers.0.bias"))
        assert 0 < bias.norm() <= 2 / TEMPERATURE / min_norm
        # A row is in several histories, candidates and, as a vector, behind two normalisations.
        assert all(value.norm() < 10 * 2 / TEMPERATURE / min_norm / NORM for value in found.values())


@SIMILARITIES
def test_users_without_history_or_row_do_not_spoil_what_adam_remembers(similarity: str) -> None:
    task = fresh({"similarity": similarity}, loss={"num_negatives": 4})
    optimizer = torch.optim.AdamW(task.head.parameters(), lr=1e-3)
    moments = []
    for histories in (EMPTY, [[1, 4], [2], [8, 8, 3]]):
        gradients(task, batch_of(histories=histories))
        optimizer.step()
        moments.append(max(state["exp_avg_sq"].max().item() for state in optimizer.state.values()))
    assert moments[1] < 100 and moments[0] < 100 * moments[1]


@SIMILARITIES
def test_one_step_of_sgd_leaves_the_layers_of_their_own_size(similarity: str) -> None:
    task = fresh({"similarity": similarity}, loss={"num_negatives": 4})
    optimizer = torch.optim.SGD(task.head.parameters(), lr=1e-3)
    gradients(task, batch_of(histories=EMPTY))
    optimizer.step()
    assert all(parameter.abs().max() < 2 for parameter in task.head.parameters())
    assert task(batch_of(histories=EMPTY))[0] < 10


def test_a_user_without_a_history_learns_a_start() -> None:
    task = fresh({"history": {"length": 4}}, loss={"num_negatives": 4})
    optimizer = torch.optim.AdamW(task.head.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        gradients(task, batch_of([7, 7, 7, 1, 1, 6, 4], histories=EMPTY))
        optimizer.step()
        losses.append(task(batch_of([7, 7, 7, 1, 1, 6, 4], histories=EMPTY))[0].item())
    assert losses[-1] < 0.5 * losses[0]
    assert task.eval().encode_queries(batch_of([], histories=EMPTY)).norm(dim=1).tolist() == pytest.approx([1.0] * 3)


@SIMILARITIES
def test_rows_of_zeros_learn_as_fast_as_random_ones(similarity: str) -> None:
    task = fresh({"similarity": similarity}, loss={"num_negatives": 4, "mask_negatives": "positive"})
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
