"""The dense part of the towers: what is summed, what the layers get, and how vectors come out."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.models.config import TowerConfig, TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.table_config import OFFSET, TableConfig
from recsys_core.models.towers import MLP, CandidateTower, QueryTower

NO_HISTORY = {"length": 0, "last_item": False}
NOTHING = (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
"""Histories of two queries that have none."""


def spec(*, tables: dict[str, TableConfig] | None = None, vectors: dict[str, int] | None = None, **config: Any) -> ModelSpec:
    model = TwoTowerConfig.model_validate({"embedding_dim": 4, **config})
    return ModelSpec.sized(model, num_users=7, num_items=5, tables=tables, vector_dims=vectors)


def residual(**item: Any) -> CandidateTower:
    settings_of = TableConfig(transfer="residual", **item)
    return CandidateTower(spec(tables={"item": settings_of}, vectors={"item": item.get("dim", 4)}, similarity="dot"))


def test_the_last_layer_has_no_activation_so_vectors_point_anywhere() -> None:
    torch.manual_seed(0)
    side = CandidateTower(spec(query={"layers": (8, 4)}, candidate={"layers": (8, 4)}, similarity="dot"))
    vectors = side(10 * torch.randn(64, 4), features={})
    assert ((vectors < 0).any(dim=0) & (vectors > 0).any(dim=0)).all()


def test_cosine_vectors_have_unit_length_and_dot_vectors_are_left_as_they_are() -> None:
    items, users = torch.randn(3, 4), torch.randn(2, 4)
    cosine = spec(user_id=True, history=NO_HISTORY, query={"layers": ()})
    torch.testing.assert_close(CandidateTower(cosine)(items, features={}).norm(dim=1), torch.ones(3))
    torch.testing.assert_close(QueryTower(cosine)(*NOTHING, features={"user": users}).norm(dim=1), torch.ones(2))
    dot = spec(user_id=True, history=NO_HISTORY, query={"layers": ()}, similarity="dot")
    assert torch.equal(CandidateTower(dot)(items, features={}), items)
    assert torch.equal(QueryTower(dot)(*NOTHING, features={"user": users}), users)


def test_a_plain_dot_product_of_user_and_item_rows_has_no_other_parameter() -> None:
    plain = spec(user_id=True, history=NO_HISTORY, query={"layers": ()}, similarity="dot")
    assert not list(QueryTower(plain).parameters()) and not list(CandidateTower(plain).parameters())


def test_a_query_is_the_sum_of_its_history_its_last_item_and_its_row() -> None:
    items = torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0]])
    side = QueryTower(spec(user_id=True, query={"layers": ()}, similarity="dot"))
    users = torch.tensor([[0.0, 0, 0, 5], [0, 0, 0, 7]])
    found = side(items, torch.tensor([0, 1]), torch.tensor([0, 2, 2]), features={"user": users})
    # The mean of both items, the second one again, the user.
    assert found[0].tolist() == [0.5, 1.0 + 2.0, 0.0, 5.0]
    # An empty history is one of a single item, the learned start: its mean is that item, and so is its last item.
    torch.testing.assert_close(found[1], 2 * side.pooling.start + users[1])


def test_a_tower_that_adds_its_layers_to_the_sum_starts_from_the_plain_sum() -> None:
    torch.manual_seed(0)
    tower = MLP(TowerConfig(skip_connection=True), layers=(16, 4), widths=(4, 4), dim=4)
    one, other = torch.randn(5, 4), torch.randn(5, 4)
    assert torch.equal(tower([one, other]), one + other)
    tower([one, other]).square().sum().backward()
    assert tower.layers is not None and tower.layers[-1].weight.grad.any()  # it leaves the start


def test_features_of_another_width_are_projected_and_those_of_this_width_are_not() -> None:
    tower = MLP(TowerConfig(), layers=(), widths=(4, 6), dim=4)
    plain, wide = torch.randn(3, 4), torch.randn(3, 6)
    (projection,) = tower.parameters()
    assert projection.shape == (4, 6)
    torch.testing.assert_close(tower([plain, wide]), plain + wide @ projection.T)


def test_layers_read_the_features_side_by_side_in_order() -> None:
    tower = MLP(TowerConfig(), layers=(3,), widths=(4, 2), dim=4)
    (layer,) = tower.layers
    one, other = torch.randn(5, 4), torch.randn(5, 2)
    torch.testing.assert_close(tower([one, other]), layer(torch.cat([one, other], dim=1)))
    assert not hasattr(tower, "projections")  # nothing is summed, so nothing is projected to one width


def test_between_layers_stand_norm_activation_and_dropout_and_none_after_the_last() -> None:
    config = TowerConfig(layer_norm=True, hidden_dropout=0.5)
    tower = MLP(config, layers=(8, 6, 4), widths=(4,), dim=4)
    kinds = [type(module).__name__ for module in tower.layers]
    assert kinds == ["Linear", "LayerNorm", "ReLU", "Dropout"] * 2 + ["Linear"]


def test_dropout_is_for_training_alone() -> None:
    torch.manual_seed(0)
    tower = MLP(TowerConfig(dropout=0.5), layers=(), widths=(4,), dim=4)
    features = torch.ones(200, 4)
    assert set(tower([features]).unique().tolist()) == {0.0, 2.0}
    assert torch.equal(tower.eval()([features]), features)


def test_an_item_is_its_frozen_row_plus_its_offset() -> None:
    side = residual()
    rows, offsets = torch.randn(5, 4), torch.randn(5, 4)
    assert torch.equal(side.embed({"item": rows, OFFSET: offsets}), rows + offsets)
    assert torch.equal(side.embed({"item": rows}), rows)


def test_an_offset_has_the_width_of_the_sum_whatever_the_frozen_row_has() -> None:
    side = residual(dim=12)
    rows, offsets = torch.randn(5, 12), torch.randn(5, 4)
    torch.testing.assert_close(side.embed({"item": rows, OFFSET: offsets}), rows @ side.projection.weight.T + offsets)


def test_dropped_offsets_leave_whole_rows_and_nothing_is_scaled_and_serving_drops_none() -> None:
    torch.manual_seed(0)
    side = residual(id_dropout=0.25)
    rows, offsets = torch.full((4_000, 4), 3.0), torch.ones(4_000, 4)
    embedded = side.embed({"item": rows, OFFSET: offsets})
    kept = embedded[:, 0] == 4.0
    assert torch.equal(embedded, torch.where(kept[:, None], 4.0, 3.0).expand(-1, 4))
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.03)
    assert torch.equal(side.eval().embed({"item": rows, OFFSET: offsets}), rows + offsets)


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    pooling=st.sampled_from(["mean", "sum", "recency", "attention"]),
    layers=st.sampled_from([None, (), (6, 4)]),
    similarity=st.sampled_from(["cosine", "dot"]),
    seed=st.integers(0, 99),
)
def test_a_query_does_not_depend_on_the_others_of_its_batch(
    lengths: list[int], pooling: Any, layers: Any, similarity: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    side = QueryTower(
        spec(
            user_id=True,
            history={"length": 4, "pooling": pooling},
            query={"layers": layers, "skip_connection": True},
            similarity=similarity,
        )
    )
    for parameter in side.parameters():
        torch.nn.init.normal_(parameter)
    items, users = torch.randn(6, 4), torch.randn(len(lengths), 4)
    item_T = torch.randint(0, 6, (sum(lengths),))
    offset = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    together = side(items, item_T, offset, features={"user": users})
    for place, length in enumerate(lengths):
        alone = side(
            items,
            item_T[offset[place] : offset[place + 1]],
            torch.tensor([0, length]),
            features={"user": users[place : place + 1]},
        )
        torch.testing.assert_close(together[place : place + 1], alone, rtol=1e-4, atol=1e-5)
