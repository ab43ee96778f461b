"""Rules for combinations of settings from different groups of a pipeline's config."""

from typing import TYPE_CHECKING

from recsys_core.models.history_config import ORDER_FREE_POOLINGS
from recsys_core.models.tables.table_config import check_table_names, check_tables
from recsys_core.retrieval.auto import Auto

if TYPE_CHECKING:
    from flows.settings.pipeline import PipelineConfig


def check_rules(config: "PipelineConfig") -> None:
    """Raise ValueError for the first rule that the config violates."""
    for rule in RULES:
        rule(config)


def _last_items_need_an_order(config: "PipelineConfig") -> None:
    history = config.model.history
    if not config.interactions.is_ordered and (history.last_item_feature or history.needs_order):
        problem = "last_item_feature is true" if history.last_item_feature else f"pooling is {history.pooling}"
        raise ValueError(
            f"model.history.{problem}, but interactions has neither timestamp_column nor order_column, so no item is the "
            "last; set one of the columns, or set model.history.last_item_feature to false and pooling to one of "
            f"{', '.join(ORDER_FREE_POOLINGS)}"
        )


def _weights_need_validation(config: "PipelineConfig") -> None:
    model = config.model
    weights_by_setting = {
        "spectral_block": () if model.spectral_block is None else model.spectral_block.weights,
        "popularity": model.popularity.weights if model.popularity.kind == "validated" else (),
    }
    for setting, weights in weights_by_setting.items():
        if len(weights) > 1 and config.training.validation is None:
            raise ValueError(
                f"model.{setting}.weights has {len(weights)} values, but training.validation is null, so nothing chooses "
                "one of them; give one weight, or set training.validation"
            )


def _include_target_is_without_order(config: "PipelineConfig") -> None:
    if config.interactions.is_ordered and config.model.history.include_target:
        raise ValueError(
            "model.history.include_target is for logs without order, but interactions has an order; set include_target to false"
        )


def _query_tower_has_a_feature(config: "PipelineConfig") -> None:
    features = config.features
    has_query_features = features is not None and (features.users is not None or features.context)
    if not config.model.learn_user_embedding and config.model.history.length == 0 and not has_query_features:
        raise ValueError(
            "the query tower has no feature: set model.learn_user_embedding to true or model.history.length above 0, or "
            "declare features of users or of the context"
        )


def _user_embeddings_need_stored_users(config: "PipelineConfig") -> None:
    if config.package.users == "none" and config.model.learn_user_embedding:
        raise ValueError(
            "package.users is none, but the model reads an embedding of each user, which a request cannot contain; set "
            "model.learn_user_embedding to false, or package.users to stored"
        )


def _refit_keeps_the_order_of_events(config: "PipelineConfig") -> None:
    if config.training.refit and config.interactions.split.kind == "files":
        raise ValueError(
            "training.refit needs test events that are later than the training events of the same user, which "
            "interactions.split.kind: files does not ensure; set training.refit to false, or set another split kind"
        )


def _recommendations_have_users(config: "PipelineConfig") -> None:
    recommendations = config.delivery.recommendations
    if config.package.users == "none" and recommendations.folder is not None and not recommendations.user_paths:
        raise ValueError(
            "package.users is none, so the model has no users to write to delivery.recommendations.folder; set "
            "delivery.recommendations.user_paths to files with the histories, or package.users to stored"
        )


def _milvus_accepts_the_alias(config: "PipelineConfig") -> None:
    model_name = config.registry.model_name
    for store in config.delivery.stores:
        if store.kind == "milvus" and store.url is not None and store.alias is None and model_name[0].isdigit():
            raise ValueError(
                f"delivery.stores: the alias of {store.location} would start with a digit, like registry.model_name "
                f"{model_name}, but Milvus accepts only names that start with a letter or _; set alias of this store, e.g. to "
                f"_{model_name.replace('-', '_')}"
            )


def _indexes_fit_vector_width(config: "PipelineConfig") -> None:
    if (problem := config.index.problem(config.model.output_dim)) is not None:
        raise ValueError(f"index: {problem}")


def _exports_support_the_history(config: "PipelineConfig") -> None:
    history = config.model.history
    if config.package.exports and not history.has_padded_form:
        raise ValueError(
            f"package.exports is {', '.join(config.package.exports)}, but model.history.pooling {history.pooling} cannot be "
            "exported; leave package.exports out, or set another pooling"
        )


def _cosine_loss_needs_cosine_similarity(config: "PipelineConfig") -> None:
    if config.loss.kind == "cosine_contrastive" and config.model.similarity != "cosine":
        raise ValueError(
            f"loss.kind is cosine_contrastive, whose margin is a cosine, but model.similarity is {config.model.similarity}; "
            "set model.similarity to cosine"
        )


def _temperature_can_be_chosen(config: "PipelineConfig") -> None:
    if config.model.temperature != "auto":
        return
    for is_unsupported, problem, advice in (
        (config.training.validation is None, "training.validation is null", "set it"),
        (
            config.loss.kind == "cosine_contrastive",
            "loss.kind is cosine_contrastive, which has no temperature",
            "set another kind",
        ),
    ):
        if is_unsupported:
            raise ValueError(
                f"model.temperature is auto, which compares temperatures by the validation metric, but {problem}; "
                f"{advice}, or set model.temperature to a number"
            )


def _learned_temperature_is_in_the_loss(config: "PipelineConfig") -> None:
    if config.model.learn_temperature and config.loss.kind == "cosine_contrastive":
        raise ValueError(
            "model.learn_temperature is true, but loss.kind is cosine_contrastive, which has no temperature; set "
            "learn_temperature to false, or set another kind"
        )


def _explicit_negatives_are_ingested(config: "PipelineConfig") -> None:
    if config.loss.explicit_negatives and not config.interactions.explicit_negatives:
        raise ValueError(
            f"loss.explicit_negatives is {config.loss.explicit_negatives}, but interactions.explicit_negatives is false, so "
            "no negative is known; set interactions.explicit_negatives to true, with label_column and label_threshold, or set "
            "loss.explicit_negatives to 0"
        )


def _torchx_needs_device_and_rank_count(config: "PipelineConfig") -> None:
    cluster = config.sharding.cluster
    if config.launcher.kind == "torchx" and (cluster.device == "auto" or cluster.processes_per_node is None):
        raise ValueError(
            f"launcher.kind is torchx, but sharding.cluster.device is {cluster.device} and processes_per_node is "
            f"{cluster.processes_per_node or 'empty'}; this host cannot detect the devices of other hosts: set device to "
            "cpu or cuda, and processes_per_node to the number of ranks on one host"
        )


def _tables_support_their_settings(config: "PipelineConfig") -> None:
    tables_with_vectors = {vectors_config.table for vectors_config in config.embeddings}
    if "user" in tables_with_vectors and not config.model.learn_user_embedding:
        raise ValueError(
            "embeddings has vectors of users, but the model has no user table; set model.learn_user_embedding to true"
        )
    check_tables(
        config.tables,
        tables=config.table_names,
        tables_with_vectors=tables_with_vectors,
        has_distillation=config.loss.distillation is not None,
    )
    check_table_names("sharding.tables", config.sharding.tables, tables=config.table_names)


def _item_vectors_have_one_source(config: "PipelineConfig") -> None:
    log_vectors = config.input_config.log_vectors
    if log_vectors is None:
        return
    if sum(vectors_config.table == "item" for vectors_config in config.embeddings) > 1:
        raise ValueError(
            "embeddings has several entries for the table item, and one of them has `source: log`, but each item row starts "
            "from one vector; keep one of the entries"
        )
    table_dim = config.tables["item"].dim if "item" in config.tables else None
    if table_dim not in (None, log_vectors.dim):
        raise ValueError(
            f"tables.item.dim is {table_dim}, but embeddings.dim is {log_vectors.dim}; leave tables.item.dim out, or set "
            "both to the same value"
        )


def _slices_are_features_with_values(config: "PipelineConfig") -> None:
    feature_by_key = {} if config.features is None else config.features.by_key
    for feature_slice in config.evaluation.slices:
        feature = feature_by_key.get(feature_slice.feature)
        if feature is None:
            raise ValueError(
                f"evaluation.slices: {feature_slice.feature} is not a declared feature; declare it under features, or set "
                f"one of {', '.join(sorted(feature_by_key)) or 'the features that you declare'}"
            )
        if feature.standardise:
            raise ValueError(
                f"evaluation.slices: {feature_slice.feature} is standardised, so it has no values to slice by; declare "
                "another feature of the same column with buckets"
            )


def _segments_are_values_of_a_feature(config: "PipelineConfig") -> None:
    segment_key = config.package.popularity_by
    feature_by_key = {} if config.features is None else config.features.by_key
    allowed_keys = [
        feature_key
        for feature_key, feature in sorted(feature_by_key.items())
        if not feature_key.startswith("item.") and feature.kind == "categorical" and feature.hash_rows is None
    ]
    if segment_key is not None and segment_key not in allowed_keys:
        raise ValueError(
            f"package.popularity_by: {segment_key} is not a categorical user or context feature with a vocabulary; set one of "
            f"{', '.join(allowed_keys) or 'those that you declare under features'}"
        )


def _item_vectors_are_stored(config: "PipelineConfig") -> None:
    served_index = config.index.served
    if config.package.item_vectors == "none" and (isinstance(served_index, Auto) or not served_index.has_readable_vectors):
        raise ValueError(
            f"package.item_vectors is none, but the vectors of an index of kind {served_index.kind} may be unreadable; set "
            "package.item_vectors to fp16 or fp32, or set index.served to flat, hnsw, ivf_flat or ivf_sq8"
        )


def _guarded_features_are_slices(config: "PipelineConfig") -> None:
    sliced_feature_keys = sorted(feature_slice.feature for feature_slice in config.evaluation.slices)
    for feature_key in config.registry.guardrails.features:
        if feature_key not in sliced_feature_keys:
            raise ValueError(
                f"registry.guardrails.features: {feature_key} is not a feature of evaluation.slices (its features: "
                f"{', '.join(sliced_feature_keys) or 'none'}); add {{feature: {feature_key}}} to evaluation.slices"
            )


RULES = (
    _last_items_need_an_order,
    _weights_need_validation,
    _include_target_is_without_order,
    _query_tower_has_a_feature,
    _user_embeddings_need_stored_users,
    _refit_keeps_the_order_of_events,
    _recommendations_have_users,
    _milvus_accepts_the_alias,
    _indexes_fit_vector_width,
    _exports_support_the_history,
    _cosine_loss_needs_cosine_similarity,
    _temperature_can_be_chosen,
    _learned_temperature_is_in_the_loss,
    _explicit_negatives_are_ingested,
    _torchx_needs_device_and_rank_count,
    _tables_support_their_settings,
    _item_vectors_have_one_source,
    _slices_are_features_with_values,
    _segments_are_values_of_a_feature,
    _item_vectors_are_stored,
    _guarded_features_are_slices,
)
