"""The softmax over the whole catalogue, compared with torch's cross-entropy on the whole score matrix."""

from typing import Any, NamedTuple

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
from recsys_core.models.loss.catalogue import BYTES_PER_VALUE, catalogue_share, require_catalogue_fits, weighted_log_partition
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.loss.objective import Objective
from recsys_core.models.spec import ModelSpec
from tests.gloo import run_ranks
from tests.recsys_core.training.small_model import small_spec

NUM_ITEMS, NUM_QUERIES, WIDTH, HISTORY_LENGTH, TEMPERATURE = 23, 6, 4, 5, 0.3
HISTORIES = [[1, 2], [], [5, 5, 7], [21, 22, 1, 3, 2], [9], [3, 6, 10]]
POSITIVES = [6, 1, 9, 2, 9, 11]  # the history of query 3 contains its positive
ITEM_COUNT_I = np.arange(NUM_ITEMS) % 4  # the items 0, 4, 8, ... have no training event
FEW_SCORES_PER_BLOCK = 16
ALL_SCORES_IN_ONE_BLOCK = 1 << 20
LOSS_WEIGHT_B = np.array([0.5, 1.0, 3.0, 0.0, 1.0, 2.0], np.float32)


def objective_of(*, mask_negatives: Any, group: Any = None, negatives_exponent: float = 1.0) -> Objective:
    """Return the softmax over the whole catalogue. The arguments have the names of settings of `loss`."""
    config = TwoTowerConfig(
        embedding_dim=WIDTH, history=MeanHistory(length=HISTORY_LENGTH), temperature=TEMPERATURE, learn_temperature=True
    )
    spec = ModelSpec.sized(config, num_users=1, num_items=NUM_ITEMS)
    loss_config = LossConfig(negatives="all", mask_negatives=mask_negatives, negatives_exponent=negatives_exponent)
    return Objective(spec, loss=loss_config, item_count_I=ITEM_COUNT_I, group=group)


def query_and_item_vectors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    query_BD, item_vector_ID = torch.randn(NUM_QUERIES, WIDTH), torch.randn(NUM_ITEMS, WIDTH)
    return normalize(query_BD, dim=1).requires_grad_(), normalize(item_vector_ID, dim=1).requires_grad_()


def batch_of(query_indices: range, *, share_rows: np.ndarray) -> Batch:
    """Return a batch of some queries. Its candidates are their positives and the items of a share of the catalogue."""
    histories = [HISTORIES[query_index] for query_index in query_indices]
    positives = [POSITIVES[query_index] for query_index in query_indices]
    history_items = [item for items in histories for item in items]
    return Assembler(user_batch_key=None).batch(
        user_row_B=np.arange(len(query_indices)),
        event_index_B=np.arange(len(query_indices)),
        history=JaggedArray.from_lengths(np.array([len(items) for items in histories]), np.array(history_items, np.int64)),
        candidate_row_C=np.concatenate([positives, share_rows]),
        loss_weight_B=LOSS_WEIGHT_B[list(query_indices)],
    )


def mean_cross_entropy(query_BD: Tensor, item_vector_ID: Tensor, *, mask_negatives: str, temperature: Tensor) -> Tensor:
    """Return the weighted mean of the queries' cross-entropies, whose classes are the items with an event."""
    score_BI = query_BD @ item_vector_ID.T / temperature
    is_hidden_BI = torch.from_numpy(ITEM_COUNT_I == 0).repeat(NUM_QUERIES, 1)
    if mask_negatives == "seen":
        for query_index, history in enumerate(HISTORIES):
            is_hidden_BI[query_index, [item for item in history if item != POSITIVES[query_index]]] = True
    loss_B = cross_entropy(score_BI.masked_fill(is_hidden_BI, -torch.inf), torch.tensor(POSITIVES), reduction="none")
    return (loss_B * torch.from_numpy(LOSS_WEIGHT_B)).mean()


class LossAndGradients(NamedTuple):
    """A loss, and its gradients with respect to the queries, the items and the logarithm of the temperature."""

    loss: float
    query_gradient_BD: Tensor
    item_gradient_ID: Tensor
    log_temperature_gradient: Tensor


def expected_loss_and_gradients(mask_negatives: str) -> LossAndGradients:
    query_BD, item_vector_ID = query_and_item_vectors()
    log_temperature = torch.tensor(TEMPERATURE).log().requires_grad_()
    loss = mean_cross_entropy(query_BD, item_vector_ID, mask_negatives=mask_negatives, temperature=log_temperature.exp())
    loss.backward()
    assert query_BD.grad is not None and item_vector_ID.grad is not None and log_temperature.grad is not None
    return LossAndGradients(loss.item(), query_BD.grad, item_vector_ID.grad, log_temperature.grad)


@pytest.mark.parametrize("mask_negatives", ["none", "positive", "seen"])
@pytest.mark.parametrize("max_block_scores", [1, 40, ALL_SCORES_IN_ONE_BLOCK])  # 1, 2 or all queries per block
def test_the_loss_and_its_gradients_equal_torchs_cross_entropy(
    mask_negatives: str, max_block_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "MAX_BLOCK_SCORES", max_block_scores)
    expected = expected_loss_and_gradients(mask_negatives)
    query_BD, item_vector_ID = query_and_item_vectors()
    objective = objective_of(mask_negatives=mask_negatives)
    batch = batch_of(range(NUM_QUERIES), share_rows=catalogue_share(ITEM_COUNT_I, rank=0, world_size=1))
    candidate_CD = item_vector_ID[batch.item_row_V[batch.candidate_index_C]]
    loss = objective(query_BD, candidate_CD, batch=batch, teacher_CD=None)
    loss.backward()
    assert loss.item() == pytest.approx(expected.loss, rel=1e-5)
    assert objective.log_temperature is not None
    torch.testing.assert_close(query_BD.grad, expected.query_gradient_BD, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(item_vector_ID.grad, expected.item_gradient_ID, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(objective.log_temperature.grad, expected.log_temperature_gradient, rtol=1e-5, atol=1e-6)


def test_the_exponent_multiplies_the_log_partition_and_not_the_positive() -> None:
    query_BD, item_vector_ID = query_and_item_vectors()
    objective = objective_of(mask_negatives="positive", negatives_exponent=1.25)
    batch = batch_of(range(NUM_QUERIES), share_rows=catalogue_share(ITEM_COUNT_I, rank=0, world_size=1))
    loss = objective(query_BD, item_vector_ID[batch.item_row_V[batch.candidate_index_C]], batch=batch, teacher_CD=None)
    loss.backward()
    expected_query_BD, expected_item_vector_ID = query_and_item_vectors()
    score_BI = expected_query_BD @ expected_item_vector_ID.T / TEMPERATURE
    log_partition_B = score_BI[:, ITEM_COUNT_I > 0].logsumexp(dim=1)
    positive_score_B = score_BI[torch.arange(NUM_QUERIES), torch.tensor(POSITIVES)]
    expected_loss = ((1.25 * log_partition_B - positive_score_B) * torch.from_numpy(LOSS_WEIGHT_B)).mean()
    expected_loss.backward()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(query_BD.grad, expected_query_BD.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(item_vector_ID.grad, expected_item_vector_ID.grad, rtol=1e-5, atol=1e-6)


def test_an_exponent_with_sampled_negatives_is_rejected() -> None:
    message = "loss.negatives_exponent is 1.25, but loss.negatives is sampled; set negatives to all, or leave"
    with pytest.raises(ValueError, match=message):
        LossConfig(negatives_exponent=1.25)


def compare_with_one_process(rank: int, mask_negatives: str, max_block_scores: int) -> None:
    """Assert on each rank that the mean loss and mean gradients of the ranks equal the loss and gradients of one process."""
    catalogue.MAX_BLOCK_SCORES = max_block_scores
    expected = expected_loss_and_gradients(mask_negatives)
    world_size = dist.get_world_size()
    num_rank_queries = NUM_QUERIES // world_size
    query_BD, item_vector_ID = query_and_item_vectors()
    objective = objective_of(mask_negatives=mask_negatives, group=dist.group.WORLD)
    own_query_indices = range(rank * num_rank_queries, (rank + 1) * num_rank_queries)
    batch = batch_of(own_query_indices, share_rows=catalogue_share(ITEM_COUNT_I, rank=rank, world_size=world_size))
    candidate_CD = item_vector_ID[batch.item_row_V[batch.candidate_index_C]]
    loss = objective(query_BD[list(own_query_indices)], candidate_CD, batch=batch, teacher_CD=None)
    loss.backward()
    assert objective.log_temperature is not None and query_BD.grad is not None and item_vector_ID.grad is not None
    # Training averages the gradients over the ranks.
    for rank_tensor, expected_mean in (
        (loss.detach(), torch.tensor(expected.loss)),
        (query_BD.grad, expected.query_gradient_BD),
        (item_vector_ID.grad, expected.item_gradient_ID),
        (objective.log_temperature.grad, expected.log_temperature_gradient),
    ):
        dist.all_reduce(rank_tensor)
        torch.testing.assert_close(rank_tensor / world_size, expected_mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask_negatives", ["positive", "seen"])
@pytest.mark.parametrize(
    ("world_size", "max_block_scores"),
    [(2, ALL_SCORES_IN_ONE_BLOCK), (3, ALL_SCORES_IN_ONE_BLOCK), (2, FEW_SCORES_PER_BLOCK)],
)
def test_several_ranks_that_each_score_a_share_of_the_items_give_the_loss_of_one_process(
    mask_negatives: str, world_size: int, max_block_scores: int
) -> None:
    share_sizes = [len(catalogue_share(ITEM_COUNT_I, rank=rank, world_size=2)) for rank in range(2)]
    # If a rank computed its number of queries per block from its own share, the ranks would have different blocks.
    assert FEW_SCORES_PER_BLOCK // share_sizes[0] != FEW_SCORES_PER_BLOCK // share_sizes[1]
    run_ranks(compare_with_one_process, world_size=world_size, arguments=(mask_negatives, max_block_scores))


def test_a_rank_without_items_has_the_log_partition_of_an_empty_sum() -> None:
    query_BD = torch.randn(2, WIDTH)
    no_pairs = (torch.zeros(0, dtype=torch.int64),) * 2
    log_partition = weighted_log_partition(
        query_BD, torch.zeros(0, WIDTH), weight_B=torch.ones(2), hidden_pairs=no_pairs, largest_share_size=0, group=None
    )
    assert log_partition.item() == -torch.inf  # the logarithm of 0


def test_each_item_with_an_event_is_in_exactly_one_share() -> None:
    shares = [catalogue_share(ITEM_COUNT_I, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(np.concatenate(shares).tolist()) == np.flatnonzero(ITEM_COUNT_I).tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_catalogue_that_does_not_fit_is_rejected_and_the_error_shows_the_arithmetic() -> None:
    spec = ModelSpec.sized(TwoTowerConfig(embedding_dim=64), num_users=1, num_items=10_000_000)
    require_catalogue_fits(spec, limit_gb=10.3, world_size=1)  # needs 10.24 GB
    with pytest.raises(
        InputError,
        match=r"needs 5.12 GB in each step, and loss.catalogue_gb is 4: 10,000,000 items / 2 ranks x 128 values \(64 \+ 64\) x "
        r"8 bytes; set loss.negatives to sampled, use at least 3 ranks, or raise loss.catalogue_gb",
    ):
        require_catalogue_fits(spec, limit_gb=4, world_size=2)
    require_catalogue_fits(spec, limit_gb=4, world_size=3)


def test_the_vectors_of_list_values_have_to_fit_too() -> None:
    spec = small_spec(forms={"item.brand": "single", "item.genres": "list", "user.groups": "list"})
    num_values_by_list = {"item.genres": 25 * spec.num_items, "user.groups": 10**12}  # a query has one vector per list
    # Pooled vectors of the tables, the item vector, and vectors of the 25 values of the list, each of width 8.
    num_item_values = sum(table.dim for table in spec.on_side("item").values()) + 8 + 25 * 8
    limit_gb = spec.num_items * num_item_values * BYTES_PER_VALUE / 1e9
    require_catalogue_fits(spec, limit_gb=limit_gb, world_size=1, num_values_by_list=num_values_by_list)
    with pytest.raises(InputError, match=rf"x {num_item_values} values \(8 \+ .* \+ 8 \+ 200\) x 8 bytes"):
        require_catalogue_fits(spec, limit_gb=0.99 * limit_gb, world_size=1, num_values_by_list=num_values_by_list)
