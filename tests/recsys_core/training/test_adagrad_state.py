import pytest
import torch

from recsys_core.manifests import FeatureFacts
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.training.optimizers import SumShard, sums_of, table_of


def test_sums_per_row_of_column_shards_make_up_the_mean_over_the_whole_row() -> None:
    first = SumShard(row=1, column=0, columns=4, sum_RS=torch.tensor([[1.0], [2.0]]))
    second = SumShard(row=1, column=4, columns=12, sum_RS=torch.tensor([[5.0], [2.0]]))
    shares = [sums_of(shard, by_row=True, dim=16) for shard in (first, second)]
    assert [place for *place, _ in shares] == [[1, 0], [1, 0]]
    assert (shares[0][2] + shares[1][2]).tolist() == [[(1 * 4 + 5 * 12) / 16], [2.0]]


def test_sums_per_number_land_where_their_columns_are() -> None:
    shard = SumShard(row=1, column=2, columns=2, sum_RS=torch.tensor([[5.0, 6.0]]))
    row, column, values = sums_of(shard, by_row=False, dim=4)
    assert (row, column, values.tolist()) == (1, 2, [[5.0, 6.0]])


@pytest.mark.parametrize(
    ("parameter", "table"),
    [
        ("embedding_tables.item.embeddings.item.weight", "item"),
        ("embedding_tables.item.embeddings.item__brand.weight", "item.brand"),
        ("replicated.item.embedding_tables.unpooled_8.embeddings.user.weight", "user"),
        ("dense.head.item.tower.layers.0.weight", None),
    ],
)
def test_a_parameter_belongs_to_the_table_it_is_of_whatever_its_collection_is_called(parameter: str, table: str | None) -> None:
    brand = FeatureFacts(kind="categorical", rows=5, values=3, out_of_vocabulary=0, missing=0, definition="{}", continued=False)
    spec = ModelSpec.sized(TwoTowerConfig(user_id=True), num_users=3, num_items=4, facts={"item.brand": brand})
    assert table_of(parameter, spec) == table
