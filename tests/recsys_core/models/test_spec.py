"""The tables of a model, and table settings that are rejected."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.errors import InputError
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.history_config import MeanHistory
from recsys_core.models.spec import ModelSpec, TableSpec
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer, check_width
from tests.recsys_core.ingest.random_features import FORMS, NUM_ROWS, OWNER_KINDS, ingested_features
from tests.recsys_core.models.error_messages import raises_message

DIM = 8
GRADUAL = {"transfer": "gradual", "unfreeze": [{"epoch": 1, "share": 0.5}]}
FROZEN, RESIDUAL = {"transfer": "frozen"}, {"transfer": "residual"}


def make_spec(
    *,
    tables: dict[str, Any] | None = None,
    vector_dims: dict[str, int] | None = None,
    features: tuple[str, ...] = (),
    has_distillation: bool = False,
    **model_settings: Any,
) -> ModelSpec:
    return ModelSpec.sized(
        TwoTowerConfig.model_validate({"embedding_dim": DIM, **model_settings}),
        num_users=7,
        num_items=5,
        ingested_by_feature=ingested_features(*features) if features else None,
        vector_dim_by_table=vector_dims,
        tables={table_name: TableConfig.model_validate(settings) for table_name, settings in (tables or {}).items()},
        has_distillation=has_distillation,
    )


def layout(spec: ModelSpec) -> dict[str, tuple[int, int, str]]:
    """Return (number of rows, width, collection) by table name."""
    return {table_name: (table.num_rows, table.dim, table.collection) for table_name, table in spec.tables.items()}


def test_a_plain_model_has_an_item_table_and_optionally_a_user_table() -> None:
    assert layout(make_spec()) == {"item": (5, DIM, "unpooled_8")}
    assert layout(make_spec(learn_user_embedding=True)) == {"item": (5, DIM, "unpooled_8"), "user": (7, DIM, "unpooled_8")}
    assert layout(make_spec(learn_user_embedding=True, tables={"user": {"lookup": "pooled"}}))["user"] == (7, DIM, "pooled")


def test_the_collection_of_a_feature_depends_on_its_owner_kind_and_on_its_weights() -> None:
    feature_names = tuple(ingested_features())
    spec = make_spec(features=feature_names)
    assert list(spec.tables) == ["item", *feature_names]
    for owner_kind in OWNER_KINDS:
        for form in FORMS:
            has_weights = form in ("weighted_list", "number")
            collection = "unpooled_8" if owner_kind == "item" else "pooled_weighted" if has_weights else "pooled"
            assert layout(spec)[f"{owner_kind}.{form}"] == (NUM_ROWS, DIM, collection)
            assert spec.forms[f"{owner_kind}.{form}"] == form
    assert spec.features("item") == [f"item.{form}" for form in FORMS]
    assert spec.features("query") == [f"{owner_kind}.{form}" for owner_kind in ("user", "context") for form in FORMS]
    assert list(spec.on_side("item")) == ["item", *spec.features("item")]


def test_frozen_tables_are_in_separate_collections() -> None:
    spec = make_spec(
        learn_user_embedding=True,
        features=("item.single", "user.weighted_list"),
        tables=dict.fromkeys(("item", "user", "item.single", "user.weighted_list"), FROZEN),
        vector_dims={"item": DIM, "user": DIM, "item.single": DIM, "user.weighted_list": DIM},
    )
    assert [table.collection for table in spec.tables.values()] == [
        "unpooled_8_frozen", "unpooled_8_frozen", "unpooled_8_frozen", "pooled_weighted_frozen",
    ]  # fmt: skip
    assert all(table.is_frozen and table.pretrained for table in spec.tables.values())


def test_unpooled_tables_of_different_widths_are_in_different_collections() -> None:
    features = ("item.single", "user.single", "user.list")
    spec = make_spec(
        learn_user_embedding=True, features=features, tables={name: {"dim": 12} for name in ("item", "user", "user.list")}
    )
    assert [table.collection for table in spec.tables.values()] == [
        "unpooled_12",
        "unpooled_12",
        "unpooled_8",
        "pooled",
        "pooled",
    ]


def test_a_gradual_table_is_not_frozen() -> None:
    spec = make_spec(tables={"item": GRADUAL}, vector_dims={"item": DIM})
    assert not spec.tables["item"].is_frozen and spec.tables["item"].collection == "unpooled_8"


def test_residual_items_are_frozen_and_have_offsets_that_start_at_zero() -> None:
    optimizer = TableOptimizer(learning_rate=0.5)
    spec = make_spec(
        tables={"item": RESIDUAL | {"dim": 12}, "item_offset": {"optimizer": optimizer.model_dump()}},
        vector_dims={"item": 12},
    )
    assert layout(spec) == {"item": (5, 12, "unpooled_12_frozen"), "item_offset": (5, DIM, "unpooled_8")}
    offset_table = spec.tables["item_offset"]
    offset_settings = offset_table.settings
    assert (offset_settings.missing_vector_init, offset_settings.optimizer, offset_settings.dim) == ("zero", optimizer, DIM)
    assert not offset_table.is_frozen and not offset_table.pretrained and offset_table.feature == "item"


def test_the_teacher_table_is_frozen_and_unscaled_and_has_zeros_for_an_item_without_a_vector() -> None:
    spec = make_spec(tables={"item": {"dim": 12}}, vector_dims={"item": 12}, has_distillation=True)
    assert layout(spec) == {"item": (5, 12, "unpooled_12"), "item_teacher": (5, 12, "unpooled_12_frozen")}
    teacher_table = spec.tables["item_teacher"]
    assert teacher_table.pretrained and not teacher_table.settings.rescale
    assert teacher_table.settings.missing_vector_init == "zero"


def test_output_names_contain_the_table_if_two_tables_of_a_collection_share_a_feature() -> None:
    vector_dims, item_tables = {"item": DIM}, ("item", "item_teacher")
    spec_of_separate_collections = make_spec(vector_dims=vector_dims, has_distillation=True)
    assert [spec_of_separate_collections.output_name(table_name) for table_name in item_tables] == ["item", "item"]
    spec_of_one_collection = make_spec(vector_dims=vector_dims, has_distillation=True, tables={"item": FROZEN})
    assert [spec_of_one_collection.output_name(table_name) for table_name in item_tables] == ["item@item", "item@item_teacher"]
    spec_with_offsets = make_spec(vector_dims=vector_dims, has_distillation=True, tables={"item": RESIDUAL})
    output_names = [spec_with_offsets.output_name(table_name) for table_name in (*item_tables, "item_offset")]
    assert output_names == ["item@item", "item@item_teacher", "item"]
    assert make_spec(features=("item.single",)).output_name("item.single") == "item.single"


def test_the_default_width_of_a_table_is_embedding_dim() -> None:
    tables = {"user": {"dim": 16}, "item.single": {"dim": 4}}
    spec = make_spec(learn_user_embedding=True, features=("item.single",), tables=tables)
    assert {name: table.dim for name, table in spec.tables.items()} == {"item": DIM, "user": 16, "item.single": 4}


@pytest.mark.parametrize("table_name", ["item", "user", "item.single"])
@pytest.mark.parametrize("transfer", ["frozen", "gradual", "residual"])
def test_every_transfer_except_full_needs_vectors(table_name: str, transfer: str) -> None:
    table_settings = GRADUAL if transfer == "gradual" else {"transfer": transfer}
    with raises_message(
        f"tables.{table_name}.transfer is {transfer}, but embeddings has no vectors of table {table_name!r} "
        "(it has vectors of no table)"
    ):
        make_spec(learn_user_embedding=True, features=("item.single",), tables={table_name: table_settings})


def test_rows_cannot_start_at_the_mean_of_the_vectors_if_the_table_has_no_vectors() -> None:
    mean_settings = {"missing_vector_init": "mean"}
    spec = make_spec(learn_user_embedding=True, tables={"user": mean_settings}, vector_dims={"user": DIM})
    assert spec.tables["user"].settings.missing_vector_init == "mean"
    with raises_message(
        "tables.user.missing_vector_init is mean, the mean of the pretrained vectors, but embeddings has no vectors of table "
        "'user' (it has vectors of ['item']); add them, or set missing_vector_init to random"
    ):
        make_spec(learn_user_embedding=True, tables={"user": mean_settings}, vector_dims={"item": DIM})


def test_only_id_tables_can_be_gradual() -> None:
    assert make_spec(learn_user_embedding=True, tables={"user": GRADUAL}, vector_dims={"user": DIM}).tables["user"].pretrained
    with raises_message("tables.user.list: transfer gradual is only for the tables ['item', 'user']; leave it out"):
        make_spec(features=("user.list",), tables={"user.list": GRADUAL}, vector_dims={"user.list": DIM})


@pytest.mark.parametrize("table_name", ["user", "item.single"])
def test_only_the_item_table_can_be_residual(table_name: str) -> None:
    with raises_message(f"tables.{table_name}: transfer residual is only for the tables ['item']; leave it out"):
        make_spec(
            learn_user_embedding=True, features=("item.single",), tables={table_name: RESIDUAL}, vector_dims={table_name: DIM}
        )


def test_weight_decay_is_only_for_id_tables_and_offsets() -> None:
    decay_settings = {"optimizer": {"weight_decay": 0.1}}
    make_spec(learn_user_embedding=True, tables={"item": decay_settings, "user": decay_settings})
    make_spec(tables={"item": RESIDUAL, "item_offset": decay_settings}, vector_dims={"item": DIM})
    with raises_message(
        "tables.item.single: optimizer.weight_decay is only for the tables "
        "['item', 'item_offset', 'history_offset', 'user']; leave it out"
    ):
        make_spec(features=("item.single",), tables={"item.single": decay_settings})


@pytest.mark.parametrize("table_name", ["item", "user", "item.single"])
def test_a_table_has_the_width_of_its_vectors_by_default(table_name: str) -> None:
    spec = make_spec(learn_user_embedding=True, features=("item.single",), vector_dims={table_name: 12})
    expected_dims = {"item": DIM, "user": DIM, "item.single": DIM} | {table_name: 12}
    assert {name: table_spec.dim for name, table_spec in spec.tables.items()} == expected_dims


def test_vectors_whose_width_the_table_cannot_have_are_rejected() -> None:
    with raises_message(
        "embeddings: the vectors of table 'item' have 12 numbers, but tables.item.dim is 8; leave it out, and the table takes "
        "the width of its vectors, or set embeddings.pca_dim to 8"
    ):
        make_spec(vector_dims={"item": 12}, tables={"item": {"dim": 8}})
    with raises_message("the width of a table is a multiple of 4; set embeddings.pca_dim to 48"):
        make_spec(vector_dims={"item": 50})


@given(vector_dim=st.integers(1, 99), configured_dim=st.none() | st.integers(1, 99))
def test_check_width_accepts_the_configured_width_or_by_default_a_multiple_of_4(
    vector_dim: int, configured_dim: int | None
) -> None:
    try:
        check_width(vector_dim, configured_dim, table="item")
    except InputError as error:
        # pca_dim is suggested only if the vectors are wider than the table: PCA cannot widen them.
        assert ("pca_dim" in str(error)) == (vector_dim > (4 if configured_dim is None else configured_dim))
        assert vector_dim != configured_dim if configured_dim is not None else vector_dim % 4
    else:
        assert vector_dim == configured_dim if configured_dim is not None else vector_dim % 4 == 0


@pytest.mark.parametrize("table_name", ["user", "item_offset", "item.brand"])
def test_a_setting_for_an_unknown_table_lists_the_known_tables(table_name: str) -> None:
    with raises_message(f"tables.{table_name}: the model has no such table; it has ['item', 'item.single']"):
        make_spec(features=("item.single",), tables={table_name: {}})


def test_the_offset_table_cannot_be_frozen() -> None:
    with raises_message("tables.item_offset.transfer is frozen, but embeddings has no vectors of table 'item_offset'"):
        make_spec(tables={"item": RESIDUAL, "item_offset": FROZEN}, vector_dims={"item": DIM})


def test_the_offset_table_has_the_width_embedding_dim() -> None:
    make_spec(tables={"item": RESIDUAL, "item_offset": {"dim": DIM}}, vector_dims={"item": DIM})
    with raises_message("tables.item_offset.dim is 16, but the offsets are added to vectors with 8 numbers; leave"):
        make_spec(tables={"item": RESIDUAL, "item_offset": {"dim": 16}}, vector_dims={"item": DIM})


def test_distillation_needs_item_vectors() -> None:
    with raises_message(
        "loss.distillation keeps the similarities of the pretrained item vectors, but embeddings has no vectors of table"
    ):
        make_spec(has_distillation=True, learn_user_embedding=True, vector_dims={"user": DIM})


def test_a_spec_is_read_back_from_its_json() -> None:
    spec = make_spec(
        features=tuple(ingested_features()),
        tables={"item": RESIDUAL | {"dim": 12, "id_dropout": 0.1}},
        vector_dims={"item": 12},
        has_distillation=True,
    )
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
    assert isinstance(spec.tables["item"], TableSpec)


@pytest.mark.parametrize(
    ("settings", "forms", "expected_is_known"),
    [
        ({}, {}, [True, False, True, False]),
        (
            {"history": MeanHistory(length=0, last_item_feature=False), "learn_user_embedding": True},
            {},
            [True, True, False, False],
        ),
        ({}, {"user.country": "single"}, [True, True, True, False]),
        ({}, {"context.hour": "single"}, [True, False, True, False]),
    ],
    ids=["histories", "user table", "histories and a user feature", "histories and a context feature"],
)
def test_a_user_is_known_with_a_history_a_row_or_a_context_that_the_model_reads(settings, forms, expected_is_known) -> None:
    spec = ModelSpec(config=TwoTowerConfig(**settings), num_users=2, num_items=3, tables={}, forms=forms)
    # Users with a history and a row, with only a row, with only a history, and with neither.
    history_length_B, user_row_B = np.array([2, 0, 2, 0]), np.array([0, 1, -1, -1])
    lengths_and_rows = {"history_length_B": history_length_B, "user_row_B": user_row_B}
    assert spec.is_known(**lengths_and_rows, has_context=False).tolist() == expected_is_known
    if "context.hour" in forms:
        expected_is_known = [True] * 4
    assert spec.is_known(**lengths_and_rows, has_context=True).tolist() == expected_is_known
