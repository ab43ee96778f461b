"""Outputs of TorchRec collections, compared with a loop over rows and weights."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from recsys_core.dataset.batch import Assembler, Batch
from recsys_core.dataset.feature_store import POOLED, POOLED_WEIGHTED, UNPOOLED, Feature, FeatureStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import EmbeddingTables, parameter_name, table_outputs
from recsys_core.models.tables.table_config import TableConfig
from tests.recsys_core.ingest.random_features import FORMS, OWNER_KINDS, feature_store, ingested_features, values_of

NUM_USERS, NUM_ITEMS, NUM_EVENTS = 5, 9, 20
LIST_KEYS = [f"{owner_kind}.{form}" for owner_kind in OWNER_KINDS for form in ("list", "weighted_list")]


def spec_of(
    *,
    settings_by_table: dict[str, Any] | None = None,
    vector_dim_by_table: dict[str, int] | None = None,
    has_distillation: bool = False,
    features: tuple[str, ...] = (),
) -> ModelSpec:
    return ModelSpec.sized(
        TwoTowerConfig(embedding_dim=4, learn_user_embedding=True),
        num_users=NUM_USERS,
        num_items=NUM_ITEMS,
        ingested_by_feature=ingested_features(*features),
        vector_dim_by_table=vector_dim_by_table,
        tables={table_name: TableConfig.model_validate(settings) for table_name, settings in (settings_by_table or {}).items()},
        has_distillation=has_distillation,
    )


def embedding_tables_of(spec: ModelSpec, *, seed: int = 0) -> EmbeddingTables:
    """Return embedding tables with normally distributed values."""
    torch.manual_seed(seed)
    embedding_tables = EmbeddingTables(spec, device=torch.device("cpu"))
    for parameter in embedding_tables.parameters():
        nn.init.normal_(parameter)
    return embedding_tables


def batch_of(histories: list[list[int]], store: FeatureStore, *, user_batch_key: str = UNPOOLED) -> Batch:
    """Return a batch. Query n belongs to user n and event 3 n, and its positive is item n."""
    user_row_B = np.arange(len(histories))
    return Assembler(user_batch_key=user_batch_key, features=store).batch(
        user_row_B=user_row_B,
        event_index_B=3 * user_row_B,
        history=JaggedArray.from_lengths(
            np.array([len(items) for items in histories], np.int64),
            np.array([item for items in histories for item in items], np.int64),
        ),
        candidate_row_C=user_row_B,
    )


def table_outputs_of(embedding_tables: EmbeddingTables, batch: Batch, spec: ModelSpec) -> dict[str, Tensor]:
    """Look up the rows of the batch, and return the output of each table by name."""

    def batch_key(collection: str) -> str:
        return UNPOOLED if collection.startswith(UNPOOLED) else collection.removesuffix("_frozen")

    embeddings = {
        collection_name: collection(batch.sparse[batch_key(collection_name)])
        for collection_name, collection in embedding_tables.items()
    }
    return table_outputs(spec, embeddings, batch, side="query") | table_outputs(spec, embeddings, batch, side="item")


def loop_output(spec: ModelSpec, table_name: str, weight_RD: Tensor, store: FeatureStore, owner_rows: list[int]) -> Tensor:
    """Return the output of a table for some users, items or events. A mean divides by the sum of the weights."""
    output_BD = torch.zeros(len(owner_rows), weight_RD.shape[1])
    form = spec.forms.get(table_name)
    for output_index, owner_row in enumerate(owner_rows):
        rows, weights = values_of(store, table_name, owner_row) if form else ([owner_row], None)
        weights = weights or [1.0] * len(rows)
        for row, weight in zip(rows, weights, strict=True):
            output_BD[output_index] += weight * weight_RD[row]
        if form in ("list", "weighted_list") and spec.tables[table_name].settings.pooling == "mean" and rows:
            output_BD[output_index] /= sum(weights)
    return output_BD


@given(
    histories=st.lists(st.lists(st.integers(0, NUM_ITEMS - 1), max_size=4), min_size=1, max_size=5),
    summed_lists=st.sets(st.sampled_from(LIST_KEYS)),
    frozen_tables=st.sets(st.sampled_from([f"{owner_kind}.{form}" for owner_kind in OWNER_KINDS for form in FORMS])),
    wide_tables=st.sets(st.sampled_from(["item", "user", "item.list", "user.number"])),
    user_lookup=st.sampled_from(["unpooled", "pooled"]),
    seed=st.integers(0, 30),
)
def test_every_table_returns_the_weighted_sum_or_mean_of_its_rows(
    histories: list[list[int]],
    summed_lists: set[str],
    frozen_tables: set[str],
    wide_tables: set[str],
    user_lookup: str,
    seed: int,
) -> None:
    settings_by_table = {
        table_name: {
            "pooling": "sum" if table_name in summed_lists else "mean",
            "transfer": "frozen" if table_name in frozen_tables else "full",
            "dim": 8 if table_name in wide_tables else 4,
        }
        for table_name in ("item", "user", *ingested_features())
    }
    settings_by_table["user"]["lookup"] = user_lookup
    spec = spec_of(
        settings_by_table=settings_by_table,
        vector_dim_by_table={table_name: settings_by_table[table_name]["dim"] for table_name in frozen_tables},
    )
    store = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS, seed=seed)
    batch = batch_of(histories, store, user_batch_key=spec.tables["user"].batch_key)
    embedding_tables = embedding_tables_of(spec, seed=seed)
    output_by_table = table_outputs_of(embedding_tables, batch, spec)
    parameter_by_name = dict(embedding_tables.named_parameters())
    num_queries = len(histories)
    owner_rows_by_kind = {
        "user": range(num_queries),
        "context": range(0, 3 * num_queries, 3),
        "item": batch.item_row_V.tolist(),
    }
    assert set(output_by_table) == set(spec.tables)
    for table_name, output_BD in output_by_table.items():
        weight_RD = parameter_by_name[parameter_name(spec, table_name)]
        owner_rows = list(owner_rows_by_kind[table_name.split(".")[0]])
        expected_output_BD = loop_output(spec, table_name, weight_RD, store, owner_rows)
        torch.testing.assert_close(
            output_BD, expected_output_BD, rtol=1e-4, atol=1e-5, msg=lambda text, table_name=table_name: f"{table_name}: {text}"
        )


def test_an_output_is_zero_and_not_nan_if_all_weights_are_zero() -> None:
    store = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS, has_zero_weights=True)
    spec = spec_of()
    embedding_tables = embedding_tables_of(spec)
    output_by_table = table_outputs_of(embedding_tables, batch_of([[1, 2], [], [3]], store), spec)
    for table_name in (f"{owner_kind}.{form}" for owner_kind in OWNER_KINDS for form in ("weighted_list", "number")):
        assert output_by_table[table_name].eq(0).all(), table_name
    sum(output_BD.sum() for output_BD in output_by_table.values()).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in embedding_tables.parameters())


def test_the_output_of_empty_lists_is_zero() -> None:
    empty_store = FeatureStore(
        {
            f"{owner_kind}.{form}": Feature(np.zeros(0, np.int32), np.zeros(NUM_ITEMS + 1, np.int64), weights)
            for owner_kind in OWNER_KINDS
            for form, weights in (("list", None), ("weighted_list", np.zeros(0, np.float32)))
        }
    )
    spec = spec_of(features=tuple(empty_store.feature_by_key))
    output_by_table = table_outputs_of(embedding_tables_of(spec), batch_of([[1], []], empty_store), spec)
    for table_name in empty_store.feature_by_key:
        assert output_by_table[table_name].eq(0).all() and output_by_table[table_name].shape[1] == 4, table_name


@pytest.mark.parametrize(
    ("transfer", "has_distillation"), [("full", True), ("frozen", True), ("residual", False), ("residual", True)]
)
def test_each_table_that_is_looked_up_by_item_returns_its_own_rows(transfer: str, has_distillation: bool) -> None:
    item_settings = {"transfer": transfer, "dim": 12}
    spec = spec_of(
        settings_by_table={"item": item_settings}, vector_dim_by_table={"item": 12}, has_distillation=has_distillation
    )
    embedding_tables = embedding_tables_of(spec)
    store = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS)
    batch, parameter_by_name = batch_of([[8, 1], [4]], store), dict(embedding_tables.named_parameters())
    output_by_table = table_outputs_of(embedding_tables, batch, spec)
    item_tables = {
        "item",
        *(["item_offset"] if transfer == "residual" else []),
        *(["item_teacher"] if has_distillation else []),
    }
    assert set(output_by_table) == item_tables | {"user", *ingested_features()}
    for table_name in item_tables:
        assert torch.equal(output_by_table[table_name], parameter_by_name[parameter_name(spec, table_name)][batch.item_row_V])


def test_tables_are_in_one_collection_if_batch_key_width_and_frozen_state_are_equal() -> None:
    spec = spec_of(settings_by_table={"user.list": {"transfer": "frozen"}}, vector_dim_by_table={"user.list": 4})
    embedding_tables = embedding_tables_of(spec)
    assert set(embedding_tables) == {"unpooled_4", POOLED, POOLED_WEIGHTED, "pooled_frozen"}
    assert {parameter_name(spec, name) for name in spec.tables} == {name for name, _ in embedding_tables.named_parameters()}
    assert parameter_name(spec, "item.list") == "unpooled_4.embeddings.item__list.weight"
    assert parameter_name(spec, "user") == "unpooled_4.embeddings.user.weight"
    assert parameter_name(spec, "user.list") == "pooled_frozen.embedding_bags.user__list.weight"
    assert embedding_tables[POOLED_WEIGHTED].is_weighted() and not embedding_tables[POOLED].is_weighted()


def test_the_gradient_of_a_row_is_the_sum_of_its_weights() -> None:
    store = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS, seed=2)
    spec = spec_of()
    batch, embedding_tables = batch_of([[1, 2], [5, 5]], store), embedding_tables_of(spec)
    output_by_table = table_outputs_of(embedding_tables, batch, spec)
    parameter_by_name = dict(embedding_tables.named_parameters())
    for table_name in ("item.list", "item.weighted_list", "user.weighted_list", "context.number"):
        parameter = parameter_by_name[parameter_name(spec, table_name)]
        (gradient_RD,) = torch.autograd.grad(output_by_table[table_name].sum(), [parameter], retain_graph=True)
        owner_rows = {"item": batch.item_row_V.tolist(), "user": [0, 1], "context": [0, 3]}[table_name.split(".")[0]]
        expected_gradient_RD = torch.zeros_like(gradient_RD)
        for owner_row in owner_rows:
            rows, weights = values_of(store, table_name, owner_row)
            weights = weights or [1.0] * len(rows)
            divisor = sum(weights) if "list" in table_name else 1.0
            for row, weight in zip(rows, weights, strict=True):
                expected_gradient_RD[row] += weight / divisor
        torch.testing.assert_close(gradient_RD, expected_gradient_RD)
