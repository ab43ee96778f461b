import pytest
import torch
from pydantic import ValidationError

from recsys_core.models.config import ModelSpec, TwoTowerConfig
from recsys_core.models.two_tower import TwoTower, embedding_configs


def spec(**settings) -> ModelSpec:
    return ModelSpec(config=TwoTowerConfig(embedding_dim=4, **settings), users=7, items=5)


def test_the_last_layer_has_no_activation_so_vectors_point_anywhere():
    torch.manual_seed(0)
    towers = TwoTower(spec(query_layers=(8, 4), candidate_layers=(4,)))
    vectors = towers.candidate(torch.randn(64, 4))
    assert (vectors < 0).any() and (vectors > 0).any()


def test_cosine_vectors_have_unit_length_and_dot_vectors_do_not():
    items = torch.randn(3, 4)
    cosine = TwoTower(spec(query_layers=(4,))).candidate(items)
    torch.testing.assert_close(cosine.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(TwoTower(spec(query_layers=(4,), similarity="dot")).candidate(items), items)


def test_a_plain_dot_product_of_user_and_item_rows_can_be_expressed():
    towers = TwoTower(spec(user_id=True, max_history=0, last_item=False, query_layers=(), similarity="dot"))
    users, items = torch.randn(2, 4), torch.randn(2, 4)
    assert not list(towers.parameters())
    torch.testing.assert_close(towers.query({"user": users}), users)
    torch.testing.assert_close(towers.candidate(items), items)


def test_history_and_candidate_share_the_item_table():
    tables = {table.name: table.feature_names for table in embedding_configs(spec(user_id=True, query_layers=(4,)))}
    assert tables == {"item": ["history", "last_item", "item"], "user": ["user"]}


def test_towers_of_different_width_are_refused():
    with pytest.raises(ValidationError, match="query_layers end in 8, candidate_layers in 4"):
        TwoTowerConfig(embedding_dim=4, query_layers=(8,))
