"""Rejection of invalid feature tables: the message has file, column, row and value, and no file of the stage is left."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from recsys_core.errors import InputError
from recsys_core.ingest.features.config import FeatureConfig, FeaturesConfig
from recsys_core.ingest.features.feature_schema import open_feature_tables
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.manifests import Dataset
from tests.recsys_core.ingest.interactions_with_context import write_interactions
from tests.recsys_core.ingest.parquet_files import assert_rejects, damage_data, write_parquet

LOG = [([0, 1, 2], [], [1]), ([1], [], [0])]
"""For each user, the rows of the training, validation and test items."""
TEXT_LIST, NUMBER_LIST = pa.list_(pa.string()), pa.list_(pa.float64())


def assert_item_table_is_rejected(
    folder: Path, *message_parts: str, features: list[dict[str, Any]], path: str | None = None, **columns: Any
) -> None:
    """Assert that an item table is rejected with a message that has `message_parts` in this order.

    Args:
        features: the features that the config declares.
        path: the table; None for a new table with `columns`. If `columns` has no `id`, the table has the ids 10, 11 and 12.
    """
    interactions = write_interactions(folder / "log", user_ids=["ann", "bob"], item_ids=[10, 11, 12], log=LOG)
    path = path or write_parquet(folder / "items.parquet", **({"id": [10, 11, 12]} | columns))
    config = FeaturesConfig.model_validate({"items": {"paths": path, "id_column": "id", "features": features}})
    assert_rejects(
        lambda output_folder: ingest_features(
            config, dataset=Dataset(interactions), previous=None, memory_limit="200MB", threads=1, folder=output_folder
        ),
        folder,
        *message_parts,
    )


BRAND_FEATURES = [{"name": "brand"}]


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    assert_item_table_is_rejected(
        tmp_path, "features.items.paths", "no such file", features=BRAND_FEATURES, path=str(tmp_path / "none.parquet")
    )


def test_the_error_of_a_missing_column_names_the_feature_and_the_nearest_column(tmp_path: Path) -> None:
    assert_item_table_is_rejected(
        tmp_path,
        "items.parquet",
        "'brand'",
        "features.items, feature 'brand'",
        "did you mean 'brandt'",
        features=BRAND_FEATURES,
        brandt=["a"] * 3,
    )


def test_the_error_names_a_missing_id_column(tmp_path: Path) -> None:
    assert_item_table_is_rejected(
        tmp_path,
        "'id'",
        "features.items.id_column",
        features=BRAND_FEATURES,
        path=write_parquet(tmp_path / "items.parquet", brand=["a"]),
    )


@pytest.mark.parametrize(
    ("kind", "values", "message_parts"),
    [
        ("categorical", [1.5, 2.0, 3.0], ("'brand' is double", "categorical needs")),
        ("categorical", [["a"], ["b"], []], ("'brand' is list", "categorical needs")),
        ("list", ["a", "b", "c"], ("'brand' is string", "list needs a list", "categorical")),
        ("list", [[1.5], [], []], ("'brand' is list", "list needs")),
        ("numeric", ["1", "2", "3"], ("'brand' is string", "numeric needs a number; cast it, or set kind to categorical")),
    ],
)
def test_a_column_type_that_does_not_fit_the_feature_kind_is_rejected(
    tmp_path: Path, kind: str, values: list[Any], message_parts: tuple[str, ...]
) -> None:
    feature = {"name": "brand", "kind": kind} | ({"buckets": 4} if kind == "numeric" else {})
    assert_item_table_is_rejected(tmp_path, "items.parquet", *message_parts, features=[feature], brand=values)


@pytest.mark.parametrize(("kind", "message_end"), [("numeric", "needs a number; cast it"), ("list", "needs a list; write one")])
def test_the_kind_categorical_is_not_proposed_for_a_type_that_it_rejects_too(
    tmp_path: Path, kind: str, message_end: str
) -> None:
    feature = {"name": "brand", "kind": kind} | ({"buckets": 4} if kind == "numeric" else {})
    path = write_parquet(tmp_path / "items.parquet", id=[10], brand=[datetime(2025, 1, 1)])
    config = FeaturesConfig.model_validate({"items": {"paths": path, "id_column": "id", "features": [feature]}})
    with pytest.raises(InputError, match=f"{message_end}$"):
        open_feature_tables(config, user_id_type="string", item_id_type="int64", context_sources=(), allowed_data_root=None)


def test_files_with_different_types_are_rejected(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "a.parquet", id=[10], brand=[1])
    write_parquet(tmp_path / "data" / "b.parquet", id=[11], brand=["x"])
    path = str(tmp_path / "data" / "*.parquet")
    assert_item_table_is_rejected(
        tmp_path,
        "b.parquet: column 'brand' is string, but column 'brand' of",
        "a.parquet is int64; write both as one type",
        features=BRAND_FEATURES,
        path=path,
    )


def test_ids_of_another_type_than_the_item_ids_of_the_log_are_rejected(tmp_path: Path) -> None:
    assert_item_table_is_rejected(
        tmp_path,
        "items.parquet",
        "'id' is string, but the item id of the log is int64",
        features=BRAND_FEATURES,
        id=["10", "11", "12"],
        brand=["a"] * 3,
    )


def test_a_null_id_is_rejected(tmp_path: Path) -> None:
    assert_item_table_is_rejected(
        tmp_path,
        "items.parquet: column 'id', row 1: null (2 of 3 rows); drop these rows",
        features=BRAND_FEATURES,
        id=[10, None, None],
        brand=["a"] * 3,
    )


def test_an_id_that_occurs_twice_is_rejected_even_in_two_files(tmp_path: Path) -> None:
    assert_item_table_is_rejected(
        tmp_path,
        "items.parquet: column 'id', row 0: 11 is the id of more than one row",
        "(2 of 3 rows); keep one row for each id",
        features=BRAND_FEATURES,
        id=[11, 10, 11],
        brand=["a"] * 3,
    )
    write_parquet(tmp_path / "data" / "a.parquet", id=["10", "it's"], brand=[1, 2])
    write_parquet(tmp_path / "data" / "b.parquet", id=["it's"], brand=[3])
    interactions = write_interactions(tmp_path / "log2", user_ids=[1], item_ids=["10", "it's"], log=[([0, 1], [], [1])])
    config = {"items": {"paths": str(tmp_path / "data" / "*.parquet"), "id_column": "id", "features": BRAND_FEATURES}}
    assert_rejects(
        lambda output_folder: ingest_features(
            FeaturesConfig.model_validate(config),
            dataset=Dataset(interactions), previous=None, memory_limit="200MB", threads=1, folder=output_folder,
        ),
        tmp_path, "a.parquet: column 'id', row 1: ", "it's",
    )  # fmt: skip


def test_a_table_without_an_id_of_the_log_is_rejected(tmp_path: Path) -> None:
    assert_item_table_is_rejected(
        tmp_path,
        "items.parquet",
        "'id'",
        "none of the 3 ids is an id of the items of the log",
        features=BRAND_FEATURES,
        id=[1, 2, 3],
        brand=["a"] * 3,
    )


def test_values_too_large_for_int64_are_rejected(tmp_path: Path) -> None:
    brands = pa.array([1, 2**64 - 1, 3], pa.uint64())
    assert_item_table_is_rejected(
        tmp_path,
        "column 'brand', row 1: 18446744073709551615 is too large for int64 (1 of 3 rows); write the values as strings",
        features=BRAND_FEATURES,
        brand=brands,
    )


def test_ids_too_large_for_int64_are_rejected(tmp_path: Path) -> None:
    ids = pa.array([1, 2**64 - 1, 3], pa.uint64())
    assert_item_table_is_rejected(
        tmp_path,
        "column 'id', row 1",
        "too large for int64",
        "write the ids as strings",
        features=BRAND_FEATURES,
        id=ids,
        brand=["a"] * 3,
    )


LIKES_FEATURES = [{"name": "likes", "kind": "weighted_list", "weight_column": "like_weights"}]


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, None, 1e300])
def test_a_weight_that_is_negative_or_not_finite_is_rejected(tmp_path: Path, weight: float | None) -> None:
    assert_item_table_is_rejected(
        tmp_path, "items.parquet: column 'like_weights', row 2",
        "is a list with a weight that is null, negative, or not finite", "(2 of 4 rows)",
        features=LIKES_FEATURES, id=[10, 11, 12, 13], likes=pa.array([["a"], [], ["a", "b"], ["c"]], TEXT_LIST),
        like_weights=pa.array([[1.0], [], [2.0, weight], [weight]], NUMBER_LIST),
    )  # fmt: skip


def test_more_weights_than_values_are_rejected(tmp_path: Path) -> None:
    assert_item_table_is_rejected(
        tmp_path, "items.parquet: column 'like_weights', row 1: [1.0, 2.0] is", "not as long as the list in 'likes'",
        features=LIKES_FEATURES,
        likes=pa.array([["a"], ["b"], None], TEXT_LIST), like_weights=pa.array([[1.0], [1.0, 2.0], None], NUMBER_LIST),
    )  # fmt: skip


def test_weights_that_are_not_a_list_of_numbers_are_rejected(tmp_path: Path) -> None:
    assert_item_table_is_rejected(
        tmp_path,
        "'like_weights' is string",
        "weights are a list of numbers",
        features=LIKES_FEATURES,
        likes=pa.array([["a"]] * 3, TEXT_LIST),
        like_weights=["1"] * 3,
    )


def test_a_damaged_file_is_rejected(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "items.parquet", id=list(range(1000)), brand=[f"b{row}" for row in range(1000)])
    damage_data(path)
    assert_item_table_is_rejected(tmp_path, "the features: ", features=BRAND_FEATURES, path=path)


def test_columns_whose_names_differ_only_in_case_are_rejected(tmp_path: Path) -> None:
    assert_item_table_is_rejected(
        tmp_path, "columns ['brand', 'Brand'] differ by case alone", features=BRAND_FEATURES, brand=["a"] * 3, Brand=["b"] * 3
    )


def test_messages_quote_column_names_and_shorten_long_values(tmp_path: Path) -> None:
    weight_column = 'much" FROM x; DROP TABLE joined; --'
    features = [{"name": "likes", "kind": "weighted_list", "weight_column": weight_column}]
    likes, weights = pa.array([["\u202e" + "x" * 10_000], ["b"] * 5_000, None], TEXT_LIST), [[1.0], [-1.0] * 5_000, None]
    assert_item_table_is_rejected(
        tmp_path,
        "DROP TABLE",
        "row 1: [-1.0, -1.0",
        "... is a list with a weight",
        features=features,
        likes=likes,
        **{weight_column: pa.array(weights, NUMBER_LIST)},
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "numeric"}, "set exactly one of buckets (a number), boundaries (a list) and standardise (true)"),
        ({"kind": "numeric", "standardise": True, "buckets": 3}, "set exactly one of buckets"),
        ({"kind": "numeric", "standardise": True, "min_count": 2}, "needs a vocabulary"),
        ({"standardise": True}, "standardise is True, but is only for kind numeric, not categorical"),
        ({"kind": "numeric", "buckets": 3, "boundaries": [1.0]}, "set exactly one of buckets"),
        ({"kind": "numeric", "boundaries": [1.0, 5.0, 5.0]}, "boundaries have to increase, but 5 comes after 5"),
        ({"kind": "numeric", "boundaries": [1.0, float("inf")]}, "should be a finite number"),
        ({"kind": "numeric", "buckets": 3, "min_count": 2}, "needs a vocabulary"),
        ({"hash_rows": 10, "min_count": 2}, "remove hash_rows"),
        ({"hash_rows": 10, "max_rows": 5}, "max_rows is 5 and hash_rows is 10"),
        ({"kind": "numeric", "buckets": 3, "max_rows": 5}, "max_rows is 5, but is only for kind categorical"),
        ({"weight_column": "w"}, "weight_column is 'w', but is only for kind weighted_list, not categorical"),
        ({"kind": "list", "buckets": 2}, "buckets is 2, but is only for kind numeric, not list"),
        ({"max_values": 3}, "max_values is 3, but is only for kind list or weighted_list"),
        ({"kind": "weighted_list"}, "has no weight_column"),
        ({"kind": "weighted_list", "weight_column": "x"}, "is both the column of the values and weight_column"),
        ({"name": "../x"}, "should match pattern"),
    ],
)
def test_contradicting_settings_of_a_feature_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error_info:
        FeatureConfig.model_validate({"name": "x"} | settings)
    assert message in str(error_info.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no feature is declared"),
        ({"items": {"paths": "i", "id_column": "id"}}, "neither features nor title_column"),
        ({"context": [{"name": "a"}, {"name": "a"}]}, "2 features are named 'a'; rename all but one"),
        ({"users": {"paths": "u", "id_column": "id", "features": [{"name": "a"}] * 3}}, "3 features are named 'a'"),
    ],
)
def test_a_config_without_features_or_with_two_features_of_one_name_is_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error_info:
        FeaturesConfig.model_validate(config)
    assert message in str(error_info.value)


def test_titles_that_are_not_text_are_rejected(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path / "log", user_ids=["ann", "bob"], item_ids=[10, 11, 12], log=LOG)
    path = write_parquet(tmp_path / "items.parquet", id=[10, 11, 12], title=[1.5, 2.5, 3.5])
    config = FeaturesConfig.model_validate({"items": {"paths": path, "id_column": "id", "title_column": "title"}})
    assert_rejects(
        lambda output_folder: ingest_features(
            config, dataset=Dataset(interactions), previous=None, memory_limit="200MB", threads=1, folder=output_folder
        ),
        tmp_path,
        "items.parquet",
        "'title' is double",
        "features.items.title_column",
        "titles are strings",
    )


@pytest.mark.parametrize(
    ("columns", "message"), [(["vector"], "'vector' is a reserved name"), (["price", "price"], "'price' occurs twice")]
)
def test_a_filter_column_with_a_reserved_or_repeated_name_is_rejected(columns: list[str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FeaturesConfig.model_validate({"items": {"paths": "i.parquet", "id_column": "id", "filter_columns": columns}})


@pytest.mark.parametrize(
    ("first_sizes", "second_sizes", "message_parts"),
    [
        (pa.array([[1], []], pa.list_(pa.int64())), pa.array([[5]]), ("items-1.parquet", "'size' is list")),
        (pa.array([1, 2]), pa.array([2**64 - 1], pa.uint64()), ("items-2.parquet", "'size' is uint64")),
    ],
    ids=["list", "uint64"],
)
def test_a_filter_column_of_lists_or_of_uint64_is_rejected(
    tmp_path: Path, first_sizes: pa.Array, second_sizes: pa.Array, message_parts: tuple[str, ...]
) -> None:
    interactions = write_interactions(tmp_path / "log", user_ids=["ann", "bob"], item_ids=[10, 11, 12], log=LOG)
    paths = [
        write_parquet(tmp_path / "items-1.parquet", id=[10, 11], size=first_sizes),
        write_parquet(tmp_path / "items-2.parquet", id=[12], size=second_sizes),
    ]
    config = FeaturesConfig.model_validate({"items": {"paths": paths, "id_column": "id", "filter_columns": ["size"]}})
    assert_rejects(
        lambda output_folder: ingest_features(
            config, dataset=Dataset(interactions), previous=None, memory_limit="200MB", threads=1, folder=output_folder
        ),
        tmp_path,
        *message_parts,
        "features.items.filter_columns",
        "cast it",
    )
