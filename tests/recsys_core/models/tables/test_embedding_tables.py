"""Outputs of real TorchRec collections compared with a loop over rows and weights."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
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
LISTS = [f"{owner_kind}.{form}" for owner_kind in OWNER_KINDS for form in ("list", "weighted_list")]


def spec_of(
    *,
    tables: dict[str, Any] | None = None,
    vector_dims: dict[str, int] | None = None,
    has_distillation: bool = False,
    features: tuple[str, ...] = (),
) -> ModelSpec:
    return ModelSpec.sized(
        TwoTowerConfig(embedding_dim=4, learn_user_embedding=True),
        num_users=NUM_USERS,
        num_items=NUM_ITEMS,
        ingested_by_feature=ingested_features(*features),
        vector_dim_by_table=vector_dims,
        tables={name: TableConfig.model_validate(settings_of) for name, settings_of in (tables or {}).items()},
        has_distillation=has_distillation,
    )


def embedding_tables_of(spec: ModelSpec, *, seed: int = 0) -> EmbeddingTables:
    torch.manual_seed(seed)
    tables_module = EmbeddingTables(spec, device=torch.device("cpu"))
    for parameter in tables_module.parameters():
        nn.init.normal_(parameter)
    return tables_module


def batch_of(history: list[list[int]], store: FeatureStore, *, user_batch_key: str = UNPOOLED) -> Batch:
    """Return a batch in which query n belongs to user n and event 3 n, and has item n as its positive."""
    user = np.arange(len(history))
    return Assembler(user_batch_key=user_batch_key, features=store).batch(
        user_row_B=user,
        event_index_B=3 * user,
        history=JaggedArray.from_lengths(
            np.array([len(items) for items in history], np.int64),
            np.array([item for items in history for item in items], np.int64),
        ),
        candidate_row_C=user,
    )


def look_up(tables_module: EmbeddingTables, batch: Batch) -> dict[str, Any]:
    def sparse(name: str) -> str:
        return UNPOOLED if name.startswith(UNPOOLED) else name.removesuffix("_frozen")

    return {name: lookup(batch.sparse[sparse(name)]) for name, lookup in tables_module.items()}


def slow(spec: ModelSpec, table: str, weight_RW: Tensor, store: FeatureStore, owners: list[int]) -> Tensor:
    """Pool the rows in a loop; a mean divides by the sum of the weights."""
    outputs = torch.zeros(len(owners), weight_RW.shape[1])
    form = spec.forms.get(table)
    for place, owner in enumerate(owners):
        rows, weights = values_of(store, table, owner) if form else ([owner], None)
        weights = weights or [1.0] * len(rows)
        for row, weight in zip(rows, weights, strict=True):
            outputs[place] += weight * weight_RW[row]
        if form in ("list", "weighted_list") and spec.tables[table].settings.pooling == "mean" and rows:
            outputs[place] /= sum(weights)
    return outputs


@settings(deadline=None, max_examples=40)
@given(
    history=st.lists(st.lists(st.integers(0, NUM_ITEMS - 1), max_size=4), min_size=1, max_size=5),
    summed_lists=st.sets(st.sampled_from(LISTS)),
    frozen=st.sets(st.sampled_from([f"{owner_kind}.{form}" for owner_kind in OWNER_KINDS for form in FORMS])),
    wide=st.sets(st.sampled_from(["item", "user", "item.list", "user.number"])),
    user_lookup=st.sampled_from(["unpooled", "pooled"]),
    seed=st.integers(0, 30),
)
def test_every_table_gives_the_weighted_sum_or_mean_of_its_rows(
    history: list[list[int]], summed_lists: set[str], frozen: set[str], wide: set[str], user_lookup: str, seed: int
) -> None:
    tables = {
        name: {
            "pooling": "sum" if name in summed_lists else "mean",
            "transfer": "frozen" if name in frozen else "full",
            "dim": 8 if name in wide else 4,
        }
        for name in ("item", "user", *ingested_features())
    }
    tables["user"]["lookup"] = user_lookup
    spec = spec_of(tables=tables, vector_dims={name: tables[name]["dim"] for name in frozen})
    store = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS, seed=seed)
    batch = batch_of(history, store, user_batch_key=spec.tables["user"].batch_key)
    tables_module = embedding_tables_of(spec, seed=seed)
    embeddings, weights = look_up(tables_module, batch), dict(tables_module.named_parameters())
    owners = {"user": range(len(history)), "context": range(0, 3 * len(history), 3), "item": batch.item_row_V.tolist()}
    outputs = table_outputs(spec, embeddings, batch, side="query") | table_outputs(spec, embeddings, batch, side="item")
    assert set(outputs) == set(spec.tables)
    for name, value in outputs.items():
        expected = slow(spec, name, weights[parameter_name(spec, name)], store, list(owners[name.split(".")[0]]))
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_weights_that_are_all_zero_give_zeros_and_no_nan() -> None:
    store = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS, has_zero_weights=True)
    spec = spec_of()
    batch, tables_module = batch_of([[1, 2], [], [3]], store), embedding_tables_of(spec)
    embeddings = look_up(tables_module, batch)
    outputs = table_outputs(spec, embeddings, batch, side="query") | table_outputs(spec, embeddings, batch, side="item")
    for name in (f"{owner_kind}.{form}" for owner_kind in OWNER_KINDS for form in ("weighted_list", "number")):
        assert outputs[name].eq(0).all(), name
    sum(value.sum() for value in outputs.values()).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in tables_module.parameters())


def test_lists_without_a_value_give_zeros() -> None:
    nothing = FeatureStore(
        {
            f"{owner_kind}.{form}": Feature(np.zeros(0, np.int32), np.zeros(NUM_ITEMS + 1, np.int64), weight)
            for owner_kind in OWNER_KINDS
            for form, weight in (("list", None), ("weighted_list", np.zeros(0, np.float32)))
        }
    )
    spec = spec_of(features=tuple(nothing.feature_by_key))
    batch, tables_module = batch_of([[1], []], nothing), embedding_tables_of(spec)
    embeddings = look_up(tables_module, batch)
    outputs = table_outputs(spec, embeddings, batch, side="query") | table_outputs(spec, embeddings, batch, side="item")
    for name in nothing.feature_by_key:
        assert outputs[name].eq(0).all() and outputs[name].shape[1] == 4, name


@pytest.mark.parametrize(
    ("transfer", "has_distillation"), [("full", True), ("frozen", True), ("residual", False), ("residual", True)]
)
def test_tables_that_share_the_items_each_give_their_own_rows(transfer: str, has_distillation: bool) -> None:
    item = {"transfer": transfer, "dim": 12}
    spec = spec_of(tables={"item": item}, vector_dims={"item": 12}, has_distillation=has_distillation)
    tables_module, store = (
        embedding_tables_of(spec),
        feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS),
    )
    batch, weights = batch_of([[8, 1], [4]], store), dict(tables_module.named_parameters())
    outputs = table_outputs(spec, look_up(tables_module, batch), batch, side="item")
    shared = (
        {"item"} | ({"item_offset"} if transfer == "residual" else set()) | ({"item_teacher"} if has_distillation else set())
    )
    assert set(outputs) == shared | {f"item.{form}" for form in FORMS}
    for name in shared:
        assert torch.equal(outputs[name], weights[parameter_name(spec, name)][batch.item_row_V])


def test_each_collection_holds_tables_of_one_batch_key_width_and_state() -> None:
    spec = spec_of(tables={"user.list": {"transfer": "frozen"}}, vector_dims={"user.list": 4})
    tables_module = embedding_tables_of(spec)
    assert set(tables_module) == {"unpooled_4", POOLED, POOLED_WEIGHTED, "pooled_frozen"}
    assert {parameter_name(spec, name) for name in spec.tables} == {name for name, _ in tables_module.named_parameters()}
    assert parameter_name(spec, "item.list") == "unpooled_4.embeddings.item__list.weight"
    assert parameter_name(spec, "user") == "unpooled_4.embeddings.user.weight"
    assert parameter_name(spec, "user.list") == "pooled_frozen.embedding_bags.user__list.weight"
    assert tables_module[POOLED_WEIGHTED].is_weighted() and not tables_module[POOLED].is_weighted()


def test_the_gradient_of_a_row_is_its_weight() -> None:
    store = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS, seed=2)
    spec = spec_of()
    batch, tables_module = batch_of([[1, 2], [5, 5]], store), embedding_tables_of(spec)
    embeddings = look_up(tables_module, batch)
    outputs = table_outputs(spec, embeddings, batch, side="query") | table_outputs(spec, embeddings, batch, side="item")
    for name in ("item.list", "item.weighted_list", "user.weighted_list", "context.number"):
        (gradient,) = torch.autograd.grad(
            outputs[name].sum(), [dict(tables_module.named_parameters())[parameter_name(spec, name)]], retain_graph=True
        )
        owners = {"item": batch.item_row_V.tolist(), "user": [0, 1], "context": [0, 3]}[name.split(".")[0]]
        expected = torch.zeros_like(gradient)
        for owner in owners:
            rows, weights = values_of(store, name, owner)
            weights = weights or [1.0] * len(rows)
            total = sum(weights) if "list" in name else 1.0
            for row, weight in zip(rows, weights, strict=True):
                expected[row] += weight / total
        torch.testing.assert_close(gradient, expected)
