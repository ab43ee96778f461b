"""Settings that contradict each other are rejected with advice."""

from pathlib import Path

import pytest

from flows.settings.config_file import load_config
from recsys_core.evaluation.config import FeatureSlice
from tests.flows.settings.rejected_config import error_message

LOG_WITHOUT_ORDER = "interactions={paths: x, split: {kind: files, test_paths: y}}"
NO_LAST_ITEM = "model.history.last_item_feature=false"


@pytest.mark.parametrize(
    ("override", "expected_message"),
    [
        (
            "index={pq_m: 7, compared_kinds: [ivf_pq]}",
            "index: pq_m of the kind ivf_pq is 7, which does not divide the vector width 64",
        ),
        ("sharding.tables.user.sharding_types=[row_wise]", "sharding.tables.user: the model has no such table; it has"),
        (
            "model.history={length: 0, last_item_feature: false}",
            "the query tower has no feature: set model.learn_user_embedding to true or",
        ),
        ("tables.user.dim=8", "tables.user: the model has no such table; it has ['item']; set model.learn_user_embedding"),
        (
            "tables.item.transfer=frozen",
            "tables.item.transfer is frozen, but embeddings has no vectors of table 'item' (it has",
        ),
    ],
)
def test_contradicting_settings_are_rejected_with_advice(config_path: Path, override: str, expected_message: str) -> None:
    message = error_message(config_path, override)
    assert expected_message in message
    assert "set " in message


def test_a_model_of_user_embeddings_needs_stored_users(config_path: Path) -> None:
    message = error_message(config_path, "package.users=none", "model.learn_user_embedding=true")
    assert "package.users is none, but the model reads an embedding of each user" in message
    assert load_config(config_path, ["package={users: none, quantization: none}"]).package.quantization == "fp32"


def test_a_milvus_server_needs_an_alias_if_the_model_name_starts_with_a_digit(config_path: Path) -> None:
    name_override, store_settings = "registry.model_name=2026-model", "kind: milvus, url: 'http://milvus:19530'"
    message = error_message(config_path, name_override, f"delivery.stores=[{{{store_settings}}}]")
    assert "the alias of milvus http://milvus:19530 would start with a digit, like registry.model_name 2026-model" in message
    assert "set alias of this store, e.g. to _2026_model" in message
    assert load_config(
        config_path, [name_override, f"delivery.stores=[{{{store_settings}, alias: _2026_model}}]"]
    ).delivery.stores
    assert load_config(config_path, [name_override, "delivery.stores=[{kind: lancedb, folder: x}]"]).delivery.stores


def test_a_setting_of_an_unknown_table_lists_the_known_tables(config_path: Path) -> None:
    for table in ("item.brand", "item_offset", "item_teacher"):
        for group in ("tables", "sharding.tables"):
            message = error_message(config_path, f"{group}={{{table}: {{}}}}")
            assert f"{group}.{table}: the model has no such table; it has ['item']; name one of them, or declare" in message


def test_settings_that_need_an_order_are_rejected_for_a_log_without_order(config_path: Path) -> None:
    message = error_message(config_path, LOG_WITHOUT_ORDER)
    assert "model.history.last_item_feature is true, but interactions has neither" in message and "set " in message
    message = error_message(config_path, LOG_WITHOUT_ORDER, NO_LAST_ITEM, "model.history.pooling=recency")
    assert "model.history.pooling is recency, but interactions has neither timestamp_column nor order_column" in message


def test_the_target_can_be_in_the_history_only_if_the_log_has_no_order(config_path: Path) -> None:
    include_target = "model.history.include_target=true"
    assert not load_config(config_path, [LOG_WITHOUT_ORDER, NO_LAST_ITEM, include_target]).interactions.is_ordered
    assert "model.history.include_target is for logs without order" in error_message(config_path, include_target)


@pytest.mark.parametrize(
    ("override", "expected_message"),
    [
        ("training.validation=null", "training.validation is null; set it, or set model.temperature to a number"),
        ("loss.kind=cosine_contrastive", "loss.kind is cosine_contrastive, which has no temperature; set another kind"),
    ],
)
def test_an_automatic_temperature_needs_validation_and_a_loss_with_a_temperature(
    config_path: Path, override: str, expected_message: str
) -> None:
    assert load_config(config_path, ["model.temperature=auto"]).model.temperature == "auto"
    assert expected_message in error_message(config_path, "model.temperature=auto", override)


def test_a_temperature_is_learned_only_if_the_loss_has_one(config_path: Path) -> None:
    assert load_config(config_path, ["model.learn_temperature=true"]).model.learn_temperature
    message = error_message(config_path, "model.learn_temperature=true", "loss.kind=cosine_contrastive")
    assert "model.learn_temperature is true, but loss.kind is cosine_contrastive, which has no temperature" in message


def test_a_loss_with_known_negatives_needs_a_log_with_known_negatives(config_path: Path) -> None:
    message = error_message(config_path, "loss.explicit_negatives=4")
    assert (
        "loss.explicit_negatives is 4, but interactions.explicit_negatives is false" in message
        and "set interactions.explicit_negatives to true" in message
    )


def test_a_cosine_loss_needs_cosine_similarity(config_path: Path) -> None:
    message = error_message(config_path, "loss.kind=cosine_contrastive", "model.similarity=dot")
    assert (
        "loss.kind is cosine_contrastive, whose margin is a cosine, but model.similarity is dot; set model.similarity to cosine"
        in message
    )


@pytest.mark.parametrize(
    ("feature_overrides", "expected_message"),
    [
        ([], "item.brand is not a declared feature; declare it under features, or set one of the features that you declare"),
        (["features={context: [{name: device}]}"], "or set one of context.device"),
        (
            ["features={items: {paths: p, id_column: id, features: [{name: brand, kind: numeric, standardise: true}]}}"],
            "item.brand is standardised",
        ),
    ],
)
def test_a_slice_needs_a_declared_feature_with_values(
    feature_overrides: list[str], expected_message: str, config_path: Path
) -> None:
    assert expected_message in error_message(config_path, "evaluation.slices=[{feature: item.brand}]", *feature_overrides)


@pytest.mark.parametrize(
    ("feature_overrides", "feature", "expected_message"),
    [
        ([], "user.country", "set one of those that you declare under features"),
        (["features={context: [{name: device}, {name: hour, kind: numeric, buckets: 4}]}"], "context.hour", "context.device"),
        (["features={context: [{name: device, hash_rows: 9}]}"], "context.device", "those that you declare"),
        (["features={items: {paths: p, id_column: id, features: [{name: brand}]}}"], "item.brand", "those that you declare"),
    ],
)
def test_popular_items_need_a_feature_with_a_vocabulary_of_single_values(
    feature_overrides: list[str], feature: str, expected_message: str, config_path: Path
) -> None:
    message = error_message(config_path, f"package.popularity_by={feature}", *feature_overrides)
    assert f"package.popularity_by: {feature} is not a categorical user or context feature with a vocabulary" in message
    assert expected_message in message


@pytest.mark.parametrize("index_kind", ["auto", "ivf_pq"])
def test_a_package_without_item_vectors_needs_an_index_with_vectors(index_kind: str, config_path: Path) -> None:
    message = error_message(config_path, "package.item_vectors=none", f"index.served={index_kind}")
    assert f"package.item_vectors is none, but the vectors of an index of kind {index_kind} may be unreadable; set" in message
    assert (
        load_config(config_path, overrides=["package.item_vectors=none", "index.served=ivf_sq8"]).package.item_vectors == "none"
    )


def test_a_feature_of_the_guardrails_must_be_a_slice_of_the_evaluation(config_path: Path) -> None:
    overrides = ["features={context: [{name: device}]}", "evaluation.slices=[{feature: context.device, min_users: 40}]"]
    assert (
        "registry.guardrails.features: item.brand is not a feature of evaluation.slices (its features: context.device); add "
        "{feature: item.brand} to evaluation.slices"
    ) in error_message(config_path, "registry.guardrails.features=[item.brand]", *overrides)
    config = load_config(config_path, overrides=["registry.guardrails.features=[context.device]", *overrides])
    assert config.guarded_slices == (FeatureSlice(feature="context.device", min_users=40),)
    assert load_config(config_path, overrides=overrides).guarded_slices == ()


def test_distillation_needs_pretrained_item_vectors(config_path: Path) -> None:
    vectors_override, distillation_override = "embeddings={paths: a, vector_column: v}", "loss.distillation={weight: 0.5}"
    assert load_config(config_path, [vectors_override, distillation_override]).loss.distillation is not None
    assert (
        "loss.distillation keeps the similarities of the pretrained item vectors, but embeddings has no vectors"
        in error_message(config_path, distillation_override)
    )
