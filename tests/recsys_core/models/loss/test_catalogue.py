"""The softmax over the whole catalogue, compared with torch's cross-entropy on the whole score matrix."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import cross_entropy, normalize

from recsys_core.dataset.batch import Assembler, Batch
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import InputError
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.history_config import MeanHistory
from recsys_core.models.loss import catalogue
from recsys_core.models.loss.catalogue import catalogue_share, require_catalogue_fits, weighted_log_partition
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.loss.objective import Objective
from recsys_core.models.spec import ModelSpec
from tests.gloo import run_ranks
from tests.recsys_core.training.small_model import small_spec

NUM_ITEMS, NUM_QUERIES, WIDTH, HISTORY_LENGTH = 23, 6, 4, 5
ITEM_COUNT_I = np.arange(NUM_ITEMS) % 4  # the items 0, 4, 8, ... have no training event
FEW_SCORES_PER_BLOCK = 16
LOSS_WEIGHT_B = np.array([0.5, 1.0, 3.0, 0.0, 1.0, 2.0], np.float32)


def objective_of(*, mask: Any, group: Any = None, temperature: float = 0.3, exponent: float = 1.0) -> Objective:
    """Return a softmax over the whole catalogue. mask: which negatives are masked (`loss.mask_negatives`)."""
    config = TwoTowerConfig(
        embedding_dim=WIDTH, history=MeanHistory(length=HISTORY_LENGTH), temperature=temperature, learn_temperature=True
    )
    spec = ModelSpec.sized(config, num_users=1, num_items=NUM_ITEMS)
    loss = LossConfig(negatives="all", mask_negatives=mask, negatives_exponent=exponent)
    return Objective(spec, loss=loss, item_count_I=ITEM_COUNT_I, group=group)


def queries_and_items() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    query_BD, item_vector_ID = torch.randn(NUM_QUERIES, WIDTH), torch.randn(NUM_ITEMS, WIDTH)
    return normalize(query_BD, dim=1).requires_grad_(), normalize(item_vector_ID, dim=1).requires_grad_()


def histories_and_positives() -> tuple[list[list[int]], list[int]]:
    """Return the histories and the positives of the queries. One history is empty, and one contains the positive."""
    return [[1, 2], [], [5, 5, 7], [21, 22, 1, 3, 2], [9], [3, 6, 10]], [6, 1, 9, 2, 9, 11]


def batch_of(queries: range, *, catalogue_share_C: np.ndarray) -> Batch:
    """Return the batch of the queries with these indices, and with the items of a share of the catalogue as candidates."""
    all_histories, all_positives = histories_and_positives()
    histories, positives = ([values[query] for query in queries] for values in (all_histories, all_positives))
    history_items = [item for items in histories for item in items]
    return Assembler(user_batch_key=None).batch(
        user_row_B=np.arange(len(queries)),
        event_index_B=np.arange(len(queries)),
        history=JaggedArray.from_lengths(np.array([len(items) for items in histories]), np.array(history_items, np.int64)),
        candidate_row_C=np.concatenate([positives, catalogue_share_C]),
        loss_weight_B=LOSS_WEIGHT_B[list(queries)],
    )


def dense_loss(query_BD: Tensor, item_vector_ID: Tensor, *, mask: str, temperature: Tensor) -> Tensor:
    """Return the weighted mean of torch's cross-entropy over the items with an event."""
    histories, positives = histories_and_positives()
    score_BI = query_BD @ item_vector_ID.T / temperature
    is_hidden_BI = torch.from_numpy(ITEM_COUNT_I == 0).repeat(NUM_QUERIES, 1)
    if mask == "seen":
        for query, history in enumerate(histories):
            is_hidden_BI[query, [item for item in history if item != positives[query]]] = True
    loss_B = cross_entropy(score_BI.masked_fill(is_hidden_BI, -torch.inf), torch.tensor(positives), reduction="none")
    return (loss_B * torch.from_numpy(LOSS_WEIGHT_B)).mean()


def expected_gradients(mask: str) -> tuple[float, Tensor, Tensor, Tensor]:
    """Return the loss and its gradients with respect to the queries, the items and the logarithm of the temperature."""
    query_BD, item_vector_ID = queries_and_items()
    log_temperature = torch.tensor(0.3).log().requires_grad_()
    loss = dense_loss(query_BD, item_vector_ID, mask=mask, temperature=log_temperature.exp())
    loss.backward()
    assert query_BD.grad is not None and item_vector_ID.grad is not None and log_temperature.grad is not None
    return loss.item(), query_BD.grad, item_vector_ID.grad, log_temperature.grad


@pytest.mark.parametrize("mask", ["none", "positive", "seen"])
@pytest.mark.parametrize("block_scores", [1, 40, 1 << 20])
def test_the_loss_and_its_gradients_equal_torchs_cross_entropy(
    mask: str, block_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "MAX_BLOCK_SCORES", block_scores)
    expected_loss, query_gradient, item_gradient, temperature_gradient = expected_gradients(mask)
    query_BD, item_vector_ID = queries_and_items()
    objective = objective_of(mask=mask)
    batch = batch_of(range(NUM_QUERIES), catalogue_share_C=catalogue_share(ITEM_COUNT_I, rank=0, world_size=1))
    candidate_CD = item_vector_ID[batch.item_row_V[batch.candidate_index_C]]
    loss = objective(query_BD, candidate_CD, batch=batch, teacher_CD=None)
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    assert objective.log_temperature is not None
    torch.testing.assert_close(query_BD.grad, query_gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(item_vector_ID.grad, item_gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(objective.log_temperature.grad, temperature_gradient, rtol=1e-5, atol=1e-6)


def test_the_exponent_multiplies_the_log_partition_and_not_the_positive() -> None:
    query_BD, item_vector_ID = queries_and_items()
    objective = objective_of(mask="positive", exponent=1.25)
    batch = batch_of(range(NUM_QUERIES), catalogue_share_C=catalogue_share(ITEM_COUNT_I, rank=0, world_size=1))
    loss = objective(query_BD, item_vector_ID[batch.item_row_V[batch.candidate_index_C]], batch=batch, teacher_CD=None)
    loss.backward()
    expected_query_BD, expected_item_vector_ID = queries_and_items()
    score_BI = expected_query_BD @ expected_item_vector_ID.T / 0.3
    log_partition_B = score_BI[:, ITEM_COUNT_I > 0].logsumexp(dim=1)
    positive_score_B = score_BI[torch.arange(NUM_QUERIES), torch.tensor(histories_and_positives()[1])]
    expected_loss = ((1.25 * log_partition_B - positive_score_B) * torch.from_numpy(LOSS_WEIGHT_B)).mean()
    expected_loss.backward()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(query_BD.grad, expected_query_BD.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(item_vector_ID.grad, expected_item_vector_ID.grad, rtol=1e-5, atol=1e-6)


def test_an_exponent_with_sampled_negatives_is_rejected() -> None:
    message = "loss.negatives_exponent is 1.25, but loss.negatives is sampled; set negatives to all, or leave"
    with pytest.raises(ValueError, match=message):
        LossConfig(negatives_exponent=1.25)


def compare_with_one_process(rank: int, mask: str, block_scores: int) -> None:
    """Assert on each rank that the mean loss and mean gradients of the ranks equal the loss and gradients of one process."""
    catalogue.MAX_BLOCK_SCORES = block_scores
    expected_loss, query_gradient, item_gradient, temperature_gradient = expected_gradients(mask)
    world_size = dist.get_world_size()
    queries_per_rank = NUM_QUERIES // world_size
    query_BD, item_vector_ID = queries_and_items()
    objective = objective_of(mask=mask, group=dist.group.WORLD)
    own_queries = range(rank * queries_per_rank, (rank + 1) * queries_per_rank)
    batch = batch_of(own_queries, catalogue_share_C=catalogue_share(ITEM_COUNT_I, rank=rank, world_size=world_size))
    candidate_CD = item_vector_ID[batch.item_row_V[batch.candidate_index_C]]
    loss = objective(query_BD[list(own_queries)], candidate_CD, batch=batch, teacher_CD=None)
    loss.backward()
    assert objective.log_temperature is not None and query_BD.grad is not None and item_vector_ID.grad is not None
    # A training uses the mean of the gradients of all ranks.
    for value, expected in (
        (loss.detach(), torch.tensor(expected_loss)),
        (query_BD.grad, query_gradient),
        (item_vector_ID.grad, item_gradient),
        (objective.log_temperature.grad, temperature_gradient),
    ):
        dist.all_reduce(value)
        torch.testing.assert_close(value / world_size, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", ["positive", "seen"])
@pytest.mark.parametrize(("world_size", "block_scores"), [(2, 1 << 20), (3, 1 << 20), (2, FEW_SCORES_PER_BLOCK)])
def test_several_ranks_that_each_score_a_share_of_the_items_equal_one_process(
    mask: str, world_size: int, block_scores: int
) -> None:
    share_sizes = [len(catalogue_share(ITEM_COUNT_I, rank=rank, world_size=2)) for rank in range(2)]
    # If a rank computed its number of queries per block from its own share, the ranks would have different blocks.
    assert FEW_SCORES_PER_BLOCK // share_sizes[0] != FEW_SCORES_PER_BLOCK // share_sizes[1]
    run_ranks(compare_with_one_process, world_size=world_size, arguments=(mask, block_scores))


def test_a_rank_without_items_contributes_an_empty_sum() -> None:
    query_BD = torch.randn(2, WIDTH)
    no_pairs = (torch.zeros(0, dtype=torch.int64),) * 2
    value = weighted_log_partition(
        query_BD, torch.zeros(0, WIDTH), weight_B=torch.ones(2), hidden_pairs=no_pairs, largest_share_size=0, group=None
    )
    assert value.item() == -torch.inf  # the logarithm of 0


def test_each_item_with_an_event_is_in_exactly_one_share() -> None:
    shares = [catalogue_share(ITEM_COUNT_I, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(np.concatenate(shares).tolist()) == np.flatnonzero(ITEM_COUNT_I).tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_catalogue_that_does_not_fit_is_rejected_and_the_error_shows_the_arithmetic() -> None:
    spec = ModelSpec.sized(TwoTowerConfig(embedding_dim=64), num_users=1, num_items=10_000_000)
    require_catalogue_fits(spec, limit_gb=10.3, world_size=1)
    with pytest.raises(
        InputError,
        match=r"needs 5.12 GB in each step, and loss.catalogue_gb is 4: 10,000,000 items / 2 ranks x 128 values \(64 \+ 64\) x "
        r"8 bytes; set loss.negatives to sampled, use at least 3 ranks, or raise loss.catalogue_gb",
    ):
        require_catalogue_fits(spec, limit_gb=4, world_size=2)
    require_catalogue_fits(spec, limit_gb=4, world_size=3)


def test_the_vectors_of_the_values_of_a_list_feature_have_to_fit() -> None:
    spec = small_spec(forms={"item.brand": "single", "item.genres": "list", "user.groups": "list"})
    num_values_by_list = {"item.genres": 25 * spec.num_items, "user.groups": 10**12}  # the queries have a vector per list
    num_item_values = sum(table.dim for table in spec.on_side("item").values()) + 8 + 25 * 8
    limit_gb = spec.num_items * num_item_values * 8 / 1e9
    require_catalogue_fits(spec, limit_gb=limit_gb, world_size=1, num_values_by_list=num_values_by_list)
    with pytest.raises(InputError, match=rf"x {num_item_values} values \(8 \+ .* \+ 8 \+ 200\) x 8 bytes"):
        require_catalogue_fits(spec, limit_gb=0.99 * limit_gb, world_size=1, num_values_by_list=num_values_by_list)
