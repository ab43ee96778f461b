"""The towers: sums of features, layers, and output vectors with bounded gradients."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_core.dataset.batch import Batch
from recsys_core.models.config import TowerConfig, TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import OFFSET_TABLE, TableConfig
from recsys_core.models.task import RetrievalTask
from recsys_core.models.towers import MLP, CandidateTower, QueryTower, unit_vectors
from tests.recsys_core.models.test_task import NUM_ITEMS, batch_of, loss_of, task_of, weight_of

STD, DIM, TEMPERATURE = 0.02, 4, 0.1
NORM = STD * math.sqrt(DIM)
"""Expected norm of a random row."""
HISTORIES_WITHOUT_ITEMS = [[], [], []]
both_similarities = pytest.mark.parametrize("similarity", ["cosine", "dot"])
NO_HISTORY = {"length": 0, "last_item_feature": False}
INPUT_WITHOUT_HISTORIES = (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
"""Item vectors, histories and offsets of two queries without history."""


def spec_of(
    *, tables: dict[str, TableConfig] | None = None, vector_dims: dict[str, int] | None = None, **model_settings: Any
) -> ModelSpec:
    config = TwoTowerConfig.model_validate({"embedding_dim": 4, **model_settings})
    return ModelSpec.sized(config, num_users=7, num_items=5, tables=tables, vector_dim_by_table=vector_dims)


def residual_tower(*, dim: int = 4, **table_settings: Any) -> CandidateTower:
    table_config = TableConfig(transfer="residual", dim=dim, **table_settings)
    return CandidateTower(spec_of(tables={"item": table_config}, vector_dims={"item": dim}, similarity="dot"))


def test_the_last_layer_has_no_activation_so_all_numbers_of_a_vector_can_be_negative() -> None:
    torch.manual_seed(0)
    tower = CandidateTower(spec_of(query={"layers": (8, 4)}, candidate={"layers": (8, 4)}, similarity="dot"))
    vector_BD = tower(10 * torch.randn(64, 4), features={})
    assert ((vector_BD < 0).any(dim=0) & (vector_BD > 0).any(dim=0)).all()


def test_only_cosine_similarity_scales_vectors_to_norm_1() -> None:
    item_row_ID, user_row_BD = torch.randn(3, 4), torch.randn(2, 4)
    cosine_spec = spec_of(learn_user_embedding=True, history=NO_HISTORY, query={"layers": ()})
    item_vector_ID = CandidateTower(cosine_spec)(item_row_ID, features={})
    query_BD = QueryTower(cosine_spec)(*INPUT_WITHOUT_HISTORIES, features={"user": user_row_BD})
    torch.testing.assert_close(item_vector_ID.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(query_BD.norm(dim=1), torch.ones(2))
    dot_spec = spec_of(learn_user_embedding=True, history=NO_HISTORY, query={"layers": ()}, similarity="dot")
    assert torch.equal(CandidateTower(dot_spec)(item_row_ID, features={}), item_row_ID)
    assert torch.equal(QueryTower(dot_spec)(*INPUT_WITHOUT_HISTORIES, features={"user": user_row_BD}), user_row_BD)


def test_the_towers_of_a_plain_dot_product_have_no_parameters() -> None:
    spec_without_layers = spec_of(learn_user_embedding=True, history=NO_HISTORY, query={"layers": ()}, similarity="dot")
    assert not list(QueryTower(spec_without_layers).parameters()) and not list(CandidateTower(spec_without_layers).parameters())


def test_a_query_is_the_sum_of_its_history_its_last_item_and_its_user_row() -> None:
    item_row_ID = torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0]])
    tower = QueryTower(spec_of(learn_user_embedding=True, query={"layers": ()}, similarity="dot"))
    user_row_BD = torch.tensor([[0.0, 0, 0, 5], [0, 0, 0, 7]])
    query_BD = tower(item_row_ID, torch.tensor([0, 1]), torch.tensor([0, 2, 2]), features={"user": user_row_BD})
    # The sum of the mean [0.5, 1, 0, 0] of both items, the last item [0, 2, 0, 0] and the user row [0, 0, 0, 5].
    assert query_BD[0].tolist() == [0.5, 1.0 + 2.0, 0.0, 5.0]
    # For an empty history, both the mean and the last item are the learned start vector.
    torch.testing.assert_close(query_BD[1], 2 * tower.pooling.start + user_row_BD[1])


def test_a_tower_with_a_skip_connection_starts_from_the_plain_sum() -> None:
    torch.manual_seed(0)
    tower = MLP(TowerConfig(skip_connection=True), layers=(16, 4), feature_dims=(4, 4), dim=4)
    feature_vectors = [torch.randn(5, 4), torch.randn(5, 4)]
    assert torch.equal(tower(feature_vectors), feature_vectors[0] + feature_vectors[1])
    tower(feature_vectors).square().sum().backward()
    assert tower.layers is not None and tower.layers[-1].weight.grad.any()  # the zero layer is trained


def test_the_last_query_layer_has_no_bias_next_to_a_skip_connection() -> None:
    tower = QueryTower(
        spec_of(
            learn_user_embedding=True, history=NO_HISTORY, query={"layers": (4,), "skip_connection": True}, similarity="dot"
        )
    )
    torch.nn.init.ones_(tower.tower.layers[-1].weight)
    assert not tower(*INPUT_WITHOUT_HISTORIES, features={"user": torch.zeros(2, 4)}).any()


def test_only_features_of_another_width_are_projected() -> None:
    tower = MLP(TowerConfig(), layers=(), feature_dims=(4, 6), dim=4)
    narrow_BD, wide_BD = torch.randn(3, 4), torch.randn(3, 6)
    (projection,) = tower.parameters()
    assert projection.shape == (4, 6)
    torch.testing.assert_close(tower([narrow_BD, wide_BD]), narrow_BD + wide_BD @ projection.T)


def test_the_layers_read_the_concatenated_features() -> None:
    tower = MLP(TowerConfig(), layers=(3,), feature_dims=(4, 2), dim=4)
    (layer,) = tower.layers
    feature_vectors = [torch.randn(5, 4), torch.randn(5, 2)]
    torch.testing.assert_close(tower(feature_vectors), layer(torch.cat(feature_vectors, dim=1)))
    assert not hasattr(tower, "projections")  # only a sum needs features of the same width


def test_layer_norm_activation_and_dropout_follow_every_layer_except_the_last() -> None:
    config = TowerConfig(layer_norm=True, hidden_dropout=0.5)
    tower = MLP(config, layers=(8, 6, 4), feature_dims=(4,), dim=4)
    module_types = [type(module).__name__ for module in tower.layers]
    assert module_types == ["Linear", "LayerNorm", "ReLU", "Dropout"] * 2 + ["Linear"]


def test_features_are_dropped_only_in_the_training() -> None:
    torch.manual_seed(0)
    tower = MLP(TowerConfig(dropout=0.5), layers=(), feature_dims=(4,), dim=4)
    feature_BD = torch.ones(200, 4)
    assert set(tower([feature_BD]).unique().tolist()) == {0.0, 2.0}
    assert torch.equal(tower.eval()([feature_BD]), feature_BD)


def test_an_item_is_its_frozen_row_plus_its_offset() -> None:
    tower = residual_tower()
    row_VD, offset_VD = torch.randn(5, 4), torch.randn(5, 4)
    assert torch.equal(tower.embed({"item": row_VD, OFFSET_TABLE: offset_VD}), row_VD + offset_VD)
    assert torch.equal(tower.embed({"item": row_VD}), row_VD)


def test_a_frozen_row_of_another_width_is_projected_before_the_offset_is_added() -> None:
    tower = residual_tower(dim=12)
    row_VD, offset_VD = torch.randn(5, 12), torch.randn(5, 4)
    item_VD = tower.embed({"item": row_VD, OFFSET_TABLE: offset_VD})
    torch.testing.assert_close(item_VD, row_VD @ tower.projection.weight.T + offset_VD)


def test_id_dropout_drops_whole_offsets_without_scaling_and_only_while_training() -> None:
    torch.manual_seed(0)
    tower = residual_tower(id_dropout=0.25)
    row_VD, offset_VD = torch.full((4_000, 4), 3.0), torch.ones(4_000, 4)
    item_VD = tower.embed({"item": row_VD, OFFSET_TABLE: offset_VD})
    is_offset_used = item_VD[:, 0] == 4.0
    assert torch.equal(item_VD, torch.where(is_offset_used[:, None], 4.0, 3.0).expand(-1, 4))
    assert is_offset_used.float().mean().item() == pytest.approx(0.75, abs=0.03)
    assert torch.equal(tower.eval().embed({"item": row_VD, OFFSET_TABLE: offset_VD}), row_VD + offset_VD)


@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    pooling=st.sampled_from(["mean", "sum", "recency", "attention"]),
    layers=st.sampled_from([None, (), (6, 4)]),
    similarity=st.sampled_from(["cosine", "dot"]),
    seed=st.integers(0, 99),
)
def test_a_query_does_not_depend_on_the_other_queries_of_its_batch(
    lengths: list[int], pooling: Any, layers: Any, similarity: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    tower = QueryTower(
        spec_of(
            learn_user_embedding=True,
            history={"length": 4, "pooling": pooling},
            query={"layers": layers, "skip_connection": True},
            similarity=similarity,
        )
    )
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter)
    item_row_VD, user_row_BD = torch.randn(6, 4), torch.randn(len(lengths), 4)
    history_H = torch.randint(0, 6, (sum(lengths),))
    offset = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    query_BD = tower(item_row_VD, history_H, offset, features={"user": user_row_BD})
    for query_index, length in enumerate(lengths):
        query_alone_1D = tower(
            item_row_VD,
            history_H[offset[query_index] : offset[query_index + 1]],
            torch.tensor([0, length]),
            features={"user": user_row_BD[query_index : query_index + 1]},
        )
        torch.testing.assert_close(query_BD[query_index : query_index + 1], query_alone_1D, rtol=1e-4, atol=1e-5)


@given(
    seed=st.integers(0, 99),
    norms=st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 0.5, 3.0, 1e4]), min_size=1, max_size=6),
    min_norm=st.sampled_from([0.01, 0.5]),
)
def test_unit_vectors_have_norm_1_and_a_gradient_bounded_by_min_norm(seed: int, norms: list[float], min_norm: float) -> None:
    torch.manual_seed(seed)
    norm_R = torch.tensor(norms)
    vector_RD = (normalize(torch.randn(len(norms), 5), dim=1) * norm_R[:, None]).requires_grad_()
    gradient_RD = torch.randn(len(norms), 5)
    unit_RD = unit_vectors(vector_RD, min_norm=min_norm)
    normalised_RD = normalize(vector_RD, dim=1)
    torch.testing.assert_close(unit_RD, normalised_RD, rtol=0, atol=0)
    (bounded_gradient_RD,) = torch.autograd.grad(unit_RD, vector_RD, gradient_RD)
    (exact_gradient_RD,) = torch.autograd.grad(normalised_RD, vector_RD, gradient_RD)
    assert (bounded_gradient_RD.norm(dim=1) <= gradient_RD.norm(dim=1) / min_norm * (1 + 1e-5)).all()
    has_exact_gradient_R = norm_R >= min_norm
    torch.testing.assert_close(
        bounded_gradient_RD[has_exact_gradient_R], exact_gradient_RD[has_exact_gradient_R], rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(bounded_gradient_RD[norm_R == 0], gradient_RD[norm_R == 0] / min_norm)


def initial_task(model_settings: dict[str, Any], **task_arguments: Any) -> RetrievalTask:
    """Return an untrained task, in which the rows of items 0 and 3 are zero."""
    task = task_of(model_settings | {"temperature": TEMPERATURE}, **task_arguments)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in task.embedding_tables.parameters():
            parameter.normal_(0.0, STD)
        weight_of(task, "item")[[0, 3]] = 0.0
    return task


def compute_gradients(task: RetrievalTask, batch: Batch) -> dict[str, Tensor]:
    """Return the gradient of the loss by parameter name, and leave it in `parameter.grad` for an optimizer."""
    task.zero_grad()
    loss_of(task, batch).backward()
    return {name: parameter.grad for name, parameter in task.named_parameters() if parameter.grad is not None}


@both_similarities
@pytest.mark.parametrize("pooling", ["mean", "sum", "recency", "attention"])
@pytest.mark.parametrize("item_representation", ["embedding", "candidate_tower"])
def test_gradients_of_vectors_with_small_norms_are_bounded(similarity: str, pooling: str, item_representation: str) -> None:
    history_settings = {"pooling": pooling, "item_representation": item_representation, "length": 4, "item_dropout": 0.5}
    task = initial_task({"history": history_settings, "similarity": similarity}, loss_settings={"num_negatives": 4})
    # Only cosine similarity normalises. Its `min_norm` is the expected norm of the mean of 4 random rows.
    min_norm = NORM / math.sqrt(4) if similarity == "cosine" else 1.0
    for histories in (HISTORIES_WITHOUT_ITEMS, [[0, 3], [3], []], [[1, 4], [], [8, 8, 3]]):
        gradient_by_name = compute_gradients(task, batch_of(histories=histories))
        # The gradient of the unit vectors is at most 2 / temperature. Normalisation multiplies it by at most 1 / min_norm.
        max_gradient_norm = 2 / TEMPERATURE / min_norm
        start_gradient = next(gradient for name, gradient in gradient_by_name.items() if name.endswith("query.pooling.start"))
        assert 0 < start_gradient.norm() <= max_gradient_norm
        # A row is used up to ten times, in histories and as a candidate. With candidate_tower it is normalised twice.
        assert all(gradient.norm() < 10 * max_gradient_norm / NORM for gradient in gradient_by_name.values())


@both_similarities
def test_users_without_history_or_row_do_not_inflate_adams_second_moment(similarity: str) -> None:
    task = initial_task({"similarity": similarity}, loss_settings={"num_negatives": 4})
    optimizer = torch.optim.AdamW(task.head.parameters(), lr=1e-3)
    largest_moments = []
    for histories in (HISTORIES_WITHOUT_ITEMS, [[1, 4], [2], [8, 8, 3]]):
        compute_gradients(task, batch_of(histories=histories))
        optimizer.step()
        largest_moments.append(max(parameter_state["exp_avg_sq"].max().item() for parameter_state in optimizer.state.values()))
    moment_without_history, moment_with_history = largest_moments
    assert moment_with_history < 100 and moment_without_history < 100 * moment_with_history


@both_similarities
def test_the_layers_stay_small_after_a_step_of_sgd(similarity: str) -> None:
    task = initial_task({"similarity": similarity}, loss_settings={"num_negatives": 4})
    optimizer = torch.optim.SGD(task.head.parameters(), lr=1e-3)
    compute_gradients(task, batch_of(histories=HISTORIES_WITHOUT_ITEMS))
    optimizer.step()
    assert all(parameter.abs().max() < 2 for parameter in task.head.parameters())
    assert loss_of(task, batch_of(histories=HISTORIES_WITHOUT_ITEMS)) < 10


def test_empty_histories_train_the_start_vector() -> None:
    task = initial_task({"history": {"length": 4}}, loss_settings={"num_negatives": 4})
    optimizer = torch.optim.AdamW(task.head.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        compute_gradients(task, batch_of([7, 7, 7, 1, 1, 6, 4], histories=HISTORIES_WITHOUT_ITEMS))
        optimizer.step()
        losses.append(loss_of(task, batch_of([7, 7, 7, 1, 1, 6, 4], histories=HISTORIES_WITHOUT_ITEMS)).item())
    assert losses[-1] < 0.5 * losses[0]
    query_BD = task.eval().encode_queries(batch_of([], histories=HISTORIES_WITHOUT_ITEMS))
    torch.testing.assert_close(query_BD.norm(dim=1), torch.ones(3))


@both_similarities
def test_zero_rows_are_trained_at_least_a_fifth_as_fast_as_random_rows(similarity: str) -> None:
    task = initial_task({"similarity": similarity}, loss_settings={"num_negatives": 4, "mask_negatives": "positive"})
    item_row_ID = weight_of(task, "item")
    optimizer = RowWiseAdagrad([item_row_ID], lr=0.01, eps=1e-8)
    path_length_I = torch.zeros(NUM_ITEMS)
    candidates = [0, 1, 3, 2, 5, 6, 4]
    for step in range(40):
        rotated_candidates = candidates[step % 3 :] + candidates[: step % 3]  # so that each step has other positives
        previous_row_ID = item_row_ID.detach().clone()
        compute_gradients(task, batch_of(rotated_candidates, histories=[[7], [8], [7, 8]]))
        optimizer.step()
        if step >= 10:  # the first steps of Adagrad have the same length for every row
            path_length_I += (item_row_ID - previous_row_ID).norm(dim=1).detach()
    zero_rows, random_rows = [0, 3], [1, 2, 4, 5, 6]
    assert path_length_I[zero_rows].min() > 0.2 * path_length_I[random_rows].mean()
