"""The unsharded task: configs of well-known models, weight decay, gradual unfreezing and encoding."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import cross_entropy, normalize

from recsys_core.dataset.batch import Assembler, Batch
from recsys_core.dataset.feature_store import UNPOOLED, FeatureStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.loss.catalogue import catalogue_share
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.loss.objective import negative_share
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import EmbeddingTables, parameter_name
from recsys_core.models.tables.table_config import TableConfig
from recsys_core.models.task import RetrievalHead, RetrievalTask
from tests.gloo import run_ranks
from tests.recsys_core.ingest.random_features import feature_store, ingested_features

NUM_USERS, NUM_ITEMS = 6, 9
COUNT_I = np.array([9, 4, 0, 2, 1, 1, 3, 5, 2])
"""Training events of each item."""
NO_HISTORY = {"length": 0, "last_item_feature": False}
QUERY_USERS, HISTORIES = [2, 0, 5], [[1, 4], [], [8, 8, 3]]
CANDIDATES = [7, 0, 3, 1, 1, 6, 4]
"""The positives of three queries, then four sampled negatives."""


def task_of(
    model_settings: dict[str, Any],
    *,
    loss_settings: dict[str, Any] | None = None,
    tables: dict[str, Any] | None = None,
    vector_dims: dict[str, int] | None = None,
    features: tuple[str, ...] = (),
    popularity_rank_by_table: dict[str, list[int]] | None = None,
    weight_decay: dict[str, float] | None = None,
    group: dist.ProcessGroup | None = None,
) -> RetrievalTask:
    """Return a task with random tables on the CPU."""
    loss_config = LossConfig.model_validate(loss_settings or {})
    spec = ModelSpec.sized(
        TwoTowerConfig.model_validate({"embedding_dim": 4, **model_settings}),
        num_users=NUM_USERS,
        num_items=NUM_ITEMS,
        ingested_by_feature=ingested_features(*features) if features else None,
        vector_dim_by_table=vector_dims,
        tables={name: TableConfig.model_validate(settings) for name, settings in (tables or {}).items()},
        has_distillation=loss_config.distillation is not None,
    )
    torch.manual_seed(0)
    head = RetrievalHead(
        spec,
        loss=loss_config,
        item_count_I=COUNT_I,
        popularity_rank={name: np.array(ranks) for name, ranks in (popularity_rank_by_table or {}).items()},
        weight_decay=weight_decay or {},
        group=group,
    )
    task = RetrievalTask(head, device=torch.device("cpu"))
    task.embedding_tables = EmbeddingTables(spec, device=torch.device("cpu"))
    for parameter in task.embedding_tables.parameters():
        nn.init.normal_(parameter)
    return task


def weight_of(task: RetrievalTask, table_name: str) -> Tensor:
    return task.embedding_tables.get_parameter(parameter_name(task.head.spec, table_name))


def batch_of(
    candidates: list[int] = CANDIDATES,
    *,
    features: FeatureStore | None = None,
    users: list[int] = QUERY_USERS,
    histories: list[list[int]] = HISTORIES,
) -> Batch:
    """Return a batch of queries. The event row of a query equals its user row."""
    return Assembler(user_batch_key=UNPOOLED, features=features).batch(
        user_row_B=np.array(users),
        event_index_B=np.array(users),
        history=JaggedArray.from_lengths(
            np.array([len(items) for items in histories]), np.array([item for items in histories for item in items], np.int64)
        ),
        candidate_row_C=np.array(candidates, np.int64),
    )


def loss_of(task: RetrievalTask, batch: Batch) -> Tensor:
    """Return the loss of a batch as a tensor for `backward`."""
    loss, _ = task(batch)
    return loss


def item_scores(task: RetrievalTask) -> Tensor:
    """Return the scores [B, I] of all items for the queries of `batch_of`."""
    catalogue_batch = Assembler(user_batch_key=UNPOOLED).item_batch(np.arange(NUM_ITEMS))
    return task.eval().encode_queries(batch_of([])) @ task.encode_items(catalogue_batch)[1].T


DOT_PRODUCT = {
    "learn_user_embedding": True,
    "history": NO_HISTORY,
    "query": {"layers": []},
    "similarity": "dot",
    "temperature": 1.0,
}


def test_a_dot_product_of_embeddings_can_be_configured() -> None:
    task = task_of(DOT_PRODUCT)
    user_row_UD, item_row_ID = weight_of(task, "user"), weight_of(task, "item")
    assert torch.equal(item_scores(task), user_row_UD[QUERY_USERS] @ item_row_ID.T)
    assert len(list(task.parameters())) == 2


def test_a_matrix_factorisation_with_a_sampled_softmax_can_be_configured() -> None:
    task = task_of(
        DOT_PRODUCT,
        loss_settings={
            "in_batch_negatives": False,
            "num_negatives": 4,
            "negative_sampling_alpha": 0.5,
            "mask_negatives": "none",
            "logq_correction": "none",
        },
    )
    user_row_UD, item_row_ID = weight_of(task, "user"), weight_of(task, "item")
    logit_BC = user_row_UD[QUERY_USERS] @ item_row_ID[CANDIDATES].T
    candidate_logits = torch.cat([logit_BC.diag()[:, None], logit_BC[:, 3:]], dim=1)  # the positive, then the negatives
    torch.testing.assert_close(loss_of(task, batch_of()), cross_entropy(candidate_logits, torch.zeros(3, dtype=torch.int64)))
    task_with_correction = task_of(
        DOT_PRODUCT,
        loss_settings={
            "in_batch_negatives": False,
            "num_negatives": 4,
            "negative_sampling_alpha": 0.5,
            "mask_negatives": "none",
        },
    )
    log_q_I = torch.from_numpy(4 * negative_share(COUNT_I, 0.5)).float().log()
    positive_log_q = log_q_I[CANDIDATES[:3]][:, None]
    candidate_logits = candidate_logits - torch.cat([positive_log_q, log_q_I[CANDIDATES[3:]].expand(3, -1)], dim=1)
    torch.testing.assert_close(
        loss_of(task_with_correction, batch_of()), cross_entropy(candidate_logits, torch.zeros(3, dtype=torch.int64))
    )


def test_simplex_can_be_configured() -> None:
    """Mao et al., "SimpleX", CIKM 2021: user row plus mean of the history, with the cosine contrastive loss."""
    task = task_of(
        {"learn_user_embedding": True, "history": {"pooling": "mean", "last_item_feature": False}, "query": {"layers": []}},
        loss_settings={"kind": "cosine_contrastive", "margin": 0.1, "negative_weight": 3.0, "mask_negatives": "none"},
    )
    user_row_UD, item_row_ID = weight_of(task, "user"), weight_of(task, "item")
    start_vector = task.head.query.pooling.start
    history_BD = torch.stack([item_row_ID[history].mean(dim=0) if history else start_vector for history in HISTORIES])
    cosine_BI = normalize(user_row_UD[QUERY_USERS] + history_BD, dim=1) @ normalize(item_row_ID, dim=1).T
    torch.testing.assert_close(item_scores(task), cosine_BI)
    negative_loss_B = (cosine_BI[:, CANDIDATES[3:]] - 0.1).relu().mean(dim=1)
    expected_loss = (1 - cosine_BI[range(3), CANDIDATES[:3]] + 3.0 * negative_loss_B).mean()
    torch.testing.assert_close(loss_of(task.train(), batch_of()), expected_loss)


def test_history_items_can_be_encoded_by_the_candidate_tower() -> None:
    model_settings = {
        "history": {"item_representation": "candidate_tower", "last_item_feature": False},
        "candidate": {"layers": [6]},
        "query": {"layers": [6]},
    }
    task = task_of(model_settings)
    catalogue_batch = Assembler(user_batch_key=None).item_batch(np.arange(NUM_ITEMS))
    history_vector_ID, item_vector_ID = task.eval().encode_items(catalogue_batch)
    assert history_vector_ID.shape == (NUM_ITEMS, 6) and torch.equal(history_vector_ID, item_vector_ID)
    (layer,) = task.head.query.tower.layers
    start_vector = task.head.query.pooling.start
    history_BD = torch.stack([item_vector_ID[history].mean(dim=0) if history else start_vector for history in HISTORIES])
    torch.testing.assert_close(task.encode_queries(batch_of([])), normalize(layer(history_BD), dim=1))
    embedding_ID, _ = task_of(model_settings | {"history": {}}).eval().encode_items(catalogue_batch)
    assert embedding_ID.shape == (NUM_ITEMS, 4)


def test_the_encoders_compute_the_vectors_that_the_loss_compares() -> None:
    feature_keys = ("user.list", "item.list", "item.number", "context.weighted_list")
    feature_by_key = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_USERS).feature_by_key
    store = FeatureStore({key: feature_by_key[key] for key in feature_keys})
    model_settings = {"learn_user_embedding": True, "candidate": {"layers": [5]}, "query": {"layers": [7, 5]}}
    for item_representation in ("embedding", "candidate_tower"):
        task = task_of(
            model_settings | {"history": {"item_representation": item_representation}},
            features=feature_keys,
            loss_settings={"kind": "bce", "in_batch_negatives": True, "mask_negatives": "none"},
        ).eval()
        query_BD = task.encode_queries(batch_of([], features=store))
        catalogue_batch = Assembler(user_batch_key=UNPOOLED, features=store).item_batch(np.arange(NUM_ITEMS))
        candidate_CD = task.encode_items(catalogue_batch)[1][CANDIDATES]
        expected_loss = task.head.objective(query_BD, candidate_CD, batch=batch_of(features=store), teacher_CD=None)
        torch.testing.assert_close(loss_of(task, batch_of(features=store)), expected_loss)


def test_weight_decay_penalises_the_distinct_rows_that_a_step_looks_up() -> None:
    model_settings = DOT_PRODUCT | {"history": {"length": 3, "last_item_feature": False}}
    task, task_with_decay = task_of(model_settings), task_of(model_settings, weight_decay={"item": 0.1, "user": 0.3})
    item_row_ID, user_row_UD = weight_of(task, "item"), weight_of(task, "user")
    distinct_items = sorted({*CANDIDATES, *(item for history in HISTORIES for item in history)})
    penalty = 0.1 / 2 * item_row_ID[distinct_items].square().sum() + 0.3 / 2 * user_row_UD[QUERY_USERS].square().sum()
    torch.testing.assert_close(loss_of(task_with_decay, batch_of()), loss_of(task, batch_of()) + penalty)
    batch = batch_of(users=[2, 0, 2])  # a user with two queries counts once
    penalty += 0.3 / 2 * (user_row_UD[[2, 0]].square().sum() - user_row_UD[QUERY_USERS].square().sum())
    torch.testing.assert_close(loss_of(task_with_decay, batch), loss_of(task, batch) + penalty)


def compare_penalty_of_catalogue(rank: int) -> None:
    """Compare the ranks' mean penalty with the penalty of all distinct rows. The last rank's share has fewer items."""
    world_size = dist.get_world_size()
    model_settings = DOT_PRODUCT | {"history": {"length": 1, "last_item_feature": False}}
    item_rows_by_rank = [
        catalogue_share(COUNT_I, rank=each_rank, world_size=world_size).tolist() for each_rank in range(world_size)
    ]
    assert [len(rows) for rows in item_rows_by_rank] == [3, 3, 2]
    batch = batch_of([7, *item_rows_by_rank[rank]], users=[rank], histories=[[2]])
    loss_settings = {"negatives": "all"}
    task = task_of(model_settings, loss_settings=loss_settings, group=dist.group.WORLD)
    task_with_decay = task_of(model_settings, loss_settings=loss_settings, weight_decay={"item": 0.1}, group=dist.group.WORLD)
    penalty = (loss_of(task_with_decay, batch) - loss_of(task, batch)).detach()
    dist.all_reduce(penalty)
    # All items are looked up: the shares have the items with an event, and the history has item 2, which has no event.
    expected_penalty = 0.1 / 2 * weight_of(task, "item").detach().square().sum()
    torch.testing.assert_close(penalty / world_size, expected_penalty, rtol=1e-4, atol=1e-5)


def test_weight_decay_counts_each_row_once_for_unequal_shares_of_the_catalogue() -> None:
    run_ranks(compare_penalty_of_catalogue, world_size=3, timeout_s=30)


def rows_with_gradient(task: RetrievalTask, table_name: str) -> set[int]:
    """Return the rows of a table that get a gradient from `batch_of()`."""
    task.zero_grad()
    loss_of(task, batch_of()).backward()
    gradient = weight_of(task, table_name).grad
    return set() if gradient is None else set(gradient.any(dim=1).nonzero().flatten().tolist())


@pytest.mark.parametrize("weight_decay", [{}, {"item": 0.1}], ids=["no decay", "decay"])
def test_an_epoch_trains_only_the_most_frequent_rows_of_a_gradual_table(weight_decay: dict[str, float]) -> None:
    task = task_of(
        DOT_PRODUCT | {"history": {"length": 3, "last_item_feature": False}},
        tables={"item": {"transfer": "gradual", "unfreeze": [{"epoch": 2, "share": 1 / 3}, {"epoch": 4, "share": 1}]}},
        vector_dims={"item": 4},
        popularity_rank_by_table={"item": [8, 7, 6, 5, 4, 3, 2, 1, 0]},  # row 8 is the most frequent
        weight_decay=weight_decay,
    )
    looked_up_items = {*CANDIDATES, *(item for history in HISTORIES for item in history)}
    losses = []
    for epoch, trained_items in ((1, set()), (2, {6, 7, 8}), (3, {6, 7, 8}), (4, set(range(NUM_ITEMS)))):
        trained_share_by_table = task.head.set_epoch(epoch)
        assert trained_share_by_table == {"item": pytest.approx(len(trained_items) / NUM_ITEMS)}
        assert rows_with_gradient(task, "item") == trained_items & looked_up_items
        assert rows_with_gradient(task, "user") == set(QUERY_USERS)
        losses.append(loss_of(task, batch_of()).item())
    assert len(set(losses)) == 1  # frozen rows count in the loss too


def test_an_epoch_trains_only_the_most_frequent_rows_of_a_gradual_user_table() -> None:
    task = task_of(
        DOT_PRODUCT,
        tables={"user": {"transfer": "gradual", "unfreeze": [{"epoch": 1, "share": 0.5}]}},
        vector_dims={"user": 4},
        popularity_rank_by_table={"user": [0, 3, 1, 4, 2, 5]},
    )
    task.head.set_epoch(1)
    assert rows_with_gradient(task, "user") == {0, 2}  # users with a query and a rank below 3


@pytest.mark.parametrize("transfer", ["frozen", "residual"])
def test_a_frozen_table_has_no_gradient_but_its_offsets_have_a_gradient(transfer: str) -> None:
    task = task_of(DOT_PRODUCT, tables={"item": {"transfer": transfer, "dim": 8}}, vector_dims={"item": 8})
    assert rows_with_gradient(task, "item") == set()
    assert rows_with_gradient(task, "user") == set(QUERY_USERS)
    if transfer == "residual":
        assert rows_with_gradient(task, "item_offset") == set(CANDIDATES)
        with torch.no_grad():
            weight_of(task, "item_offset").zero_()
        projected_ID = weight_of(task, "item") @ task.head.item.projection.weight.T
        torch.testing.assert_close(item_scores(task), weight_of(task, "user")[QUERY_USERS] @ projected_ID.T)


@pytest.mark.parametrize("num_members", [1, 2])
@pytest.mark.parametrize("item_representation", ["embedding", "candidate_tower"])
def test_offsets_change_the_history_vectors_of_items_but_not_their_candidate_vectors(
    item_representation: str, num_members: int
) -> None:
    history_settings = {"pooling": "mean", "item_representation": item_representation, "learn_offsets": True}
    task = task_of({"history": history_settings, "num_members": num_members, "similarity": "dot"})
    assert rows_with_gradient(task, "history_offset") == {1, 3, 4, 8}  # the items in histories
    catalogue_batch = Assembler(user_batch_key=UNPOOLED).item_batch(np.arange(NUM_ITEMS))
    task.eval()
    with torch.no_grad():
        query_BD = task.encode_queries(batch_of([]))
        history_ID, candidate_ID = task.encode_items(catalogue_batch)
        offset_ID = weight_of(task, "history_offset").clone()
        weight_of(task, "history_offset").zero_()
        query_without_offset_BD = task.encode_queries(batch_of([]))
        history_without_offset_ID, candidate_without_offset_ID = task.encode_items(catalogue_batch)
    # An ensemble scales the vectors of its members.
    member_scale = num_members**-0.5 if item_representation == "candidate_tower" else 1
    torch.testing.assert_close(history_ID - history_without_offset_ID, member_scale * offset_ID)
    torch.testing.assert_close(candidate_ID, candidate_without_offset_ID)
    assert (query_BD != query_without_offset_BD).any(dim=1).tolist() == [bool(items) for items in HISTORIES]


def test_the_teacher_table_adds_to_the_loss_but_is_not_trained() -> None:
    task = task_of(DOT_PRODUCT, loss_settings={"distillation": {"weight": 0.5}}, vector_dims={"item": 4})
    task_without_teacher = task_of(DOT_PRODUCT)
    with torch.no_grad():
        weight_of(task, "item").copy_(weight_of(task_without_teacher, "item"))
        weight_of(task, "user").copy_(weight_of(task_without_teacher, "user"))
    assert loss_of(task, batch_of()) > loss_of(task_without_teacher, batch_of())
    assert rows_with_gradient(task, "item_teacher") == set()


def test_tables_of_different_widths_work_in_one_model() -> None:
    feature_keys = ("item.single", "item.list", "user.number")
    feature_by_key = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_USERS).feature_by_key
    store = FeatureStore({key: feature_by_key[key] for key in feature_keys})
    task = task_of(
        {"candidate": {"layers": [8, 4]}},
        tables={"item": {"dim": 12, "transfer": "residual"}, "item.single": {"dim": 8}, "user.number": {"dim": 16}},
        vector_dims={"item": 12},
        features=feature_keys,
    )
    loss, detached_loss = task(batch_of(features=store))
    loss.backward()
    assert loss.isfinite() and not detached_loss.requires_grad
    trained_tables = {name for name, table in task.head.spec.tables.items() if not table.is_frozen}
    assert trained_tables == {"item_offset", *feature_keys}
    assert all(weight_of(task, name).grad is not None for name in trained_tables)


def test_the_loss_with_autocast_is_a_float32_close_to_the_loss_without_autocast() -> None:
    task = task_of({"learn_user_embedding": True, "query": {"layers": [8, 4], "skip_connection": False}})
    fp32_loss = loss_of(task, batch_of())
    task.head.uses_bf16 = True
    bf16_loss = loss_of(task, batch_of())
    assert bf16_loss.dtype == torch.float32 and bf16_loss != fp32_loss
    assert bf16_loss.item() == pytest.approx(fp32_loss.item(), rel=0.02)
