"""Suggested settings for several kinds of logs, and the facts of a log."""

from pathlib import Path
from typing import Any

import pytest

from recsys_core.ingest.log.split_config import TimeSplit
from recsys_core.manifests import Dataset
from tasks.tuning.suggestions import DataFacts, suggestions
from tests.recsys_core.ingest.interactions_with_context import write_interactions
from tests.recsys_core.ingest.interactions_with_times import interactions_of
from tests.tasks.tuning.facts import DENSE, DENSE_ORDERED, SPARSE, SPARSE_IDS, SPARSE_UNORDERED


def suggested_settings(facts: DataFacts, **changes: Any) -> dict[str, Any]:
    """Return the suggested value by setting, for `facts` with `changes`."""
    return {suggestion.setting: suggestion.value for suggestion in suggestions(facts.model_copy(update=changes))}


def test_a_sparse_ordered_log_with_features_gets_recency_pooling_offsets_and_three_members() -> None:
    expected_settings = {
        "model.temperature": 0.1,
        "model.history.length": 30,
        "model.history.pooling": "recency",
        "model.history.item_representation": "candidate_tower",
        "model.embedding_dim": 128,
        "model.candidate": {"layers": [512, 128], "skip_connection": True},
        "model.history.learn_offsets": True,
        "model.num_members": 3,
        "training.batch_size": 512,
        "training.table_optimizer.lr_decay": "cosine",
        "training.dense_optimizer.lr_decay": "cosine",
    }
    assert suggested_settings(SPARSE) == expected_settings


def test_a_sparse_unordered_log_gets_an_embedding_per_user_and_keeps_item_vectors() -> None:
    expected_settings = {
        "model.temperature": 0.1,
        "model.learn_user_embedding": True,
        "model.query.layers": [],
        "model.embedding_dim": 128,
        "model.candidate": {"layers": [512, 128], "skip_connection": True},
        "tables.item.transfer": "residual",
        "tables.item.init_std": 0.088,
    }
    settings = suggested_settings(SPARSE_UNORDERED)
    assert expected_settings.items() <= settings.items() and "model.num_members" not in settings
    assert suggested_settings(SPARSE_UNORDERED, vector_dim=2)["model.embedding_dim"] == 4  # the smallest allowed width


def test_a_sparse_log_with_neither_order_nor_vectors_gets_wide_vectors_and_no_embedding_per_user() -> None:
    assert suggested_settings(SPARSE_IDS, is_ordered=False) == {
        "model.temperature": 0.15,
        "model.popularity": {"kind": "validated"},
        "model.history.pooling": "mean",
        "model.history.last_item_feature": False,
        "model.history.length": 50,
        "model.embedding_dim": 128,
        "model.candidate": {"layers": [512, 128], "skip_connection": True},
        "loss.mask_negatives": "seen",
        "training.batch_size": 1024,
        "training.table_optimizer.lr_decay": "cosine",
        "training.dense_optimizer.lr_decay": "cosine",
    }


def test_a_dense_log_with_order_gets_a_higher_temperature_and_a_popularity_term() -> None:
    settings = suggested_settings(DENSE_ORDERED)
    assert (settings["model.temperature"], settings["model.popularity"]["kind"]) == (0.2, "learned")
    assert (settings["loss.num_negatives"], settings["loss.mask_negatives"]) == (2048, "seen")
    assert "model.num_members" not in settings and "loss.negatives" not in settings
    assert "model.popularity" not in suggested_settings(SPARSE)
    assert suggested_settings(SPARSE, is_ordered=False)["model.popularity"] == {"kind": "validated"}


def test_a_dense_log_without_order_gets_a_matrix_factorisation_over_the_whole_catalogue() -> None:
    expected_settings = {
        "model.learn_user_embedding": True,
        "model.history.length": 0,
        "model.query.layers": [],
        "loss.negatives": "all",
        "loss.negatives_exponent": 1.1,
        "loss.user_exponent": -0.5,
        "model.temperature": 0.18,
        "model.spectral_block": {"output_dim": 64},
        "training.table_optimizer.kind": "adam",
    }
    assert expected_settings.items() <= suggested_settings(DENSE).items()
    assert "loss.negatives" not in suggested_settings(DENSE, num_items=10**6)
    assert "model.spectral_block" not in suggested_settings(DENSE, num_items=150)


def test_a_sparse_ordered_log_of_ids_alone_gets_recency_pooling_and_three_members() -> None:
    expected_settings = {
        "model.temperature": 0.1,
        "model.history.length": 30,
        "model.history.pooling": "recency",
        "model.embedding_dim": 128,
        "model.candidate": {"layers": [512, 128], "skip_connection": True},
        "model.num_members": 3,
        "training.batch_size": 512,
    }
    assert suggested_settings(SPARSE_IDS) == expected_settings
    for facts in (SPARSE_IDS.model_copy(update={"is_ordered": False}), SPARSE_UNORDERED, DENSE, DENSE_ORDERED):
        assert "model.num_members" not in suggested_settings(facts)


def test_a_sparse_log_with_order_and_described_items_gets_offsets_in_histories() -> None:
    assert suggested_settings(SPARSE)["model.history.learn_offsets"] is True
    for facts in (SPARSE_IDS, SPARSE_UNORDERED, DENSE_ORDERED):
        assert "model.history.learn_offsets" not in suggested_settings(facts)


def test_cold_items_with_vectors_keep_their_vectors() -> None:
    settings = suggested_settings(SPARSE, cold_share=0.5)
    assert settings["tables.item.transfer"] == "residual" and "model.candidate" not in settings
    assert "tables.item.transfer" not in suggested_settings(SPARSE_IDS, cold_share=0.5)
    assert "tables.item.transfer" not in suggested_settings(SPARSE)


def test_the_id_dropout_rises_with_the_share_of_cold_items() -> None:
    settings = suggested_settings(SPARSE_UNORDERED, cold_share=0.3, cold_validation_share=0.3, cold_test_share=0.3)
    assert settings["tables.item.id_dropout"] == 0.1 and "training.validation.candidates" not in settings
    settings = suggested_settings(SPARSE_UNORDERED, cold_share=1.0, cold_validation_share=1.0, cold_test_share=1.0)
    assert (settings["tables.item.id_dropout"], settings["training.validation.candidates"]) == (0.5, "cold")
    assert "interactions.split.validation_unit" not in settings


def test_if_only_the_test_items_are_cold_the_validation_holds_out_items() -> None:
    shares = {"cold_share": 0.6, "cold_validation_share": 0.01, "cold_test_share": 1.0}
    settings = suggested_settings(SPARSE_UNORDERED, **shares, is_validation_sampled=True)
    assert settings["interactions.split.validation_unit"] == "item"
    assert settings["training.validation.candidates"] == "cold"
    # Other splits cannot hold out items, and a validation on cold items would fail without a cold validation event.
    settings = suggested_settings(SPARSE_UNORDERED, **shares)
    assert not {"interactions.split.validation_unit", "training.validation.candidates"} & settings.keys()


def test_a_small_dense_log_gets_smaller_batches_and_a_higher_temperature() -> None:
    for num_events, batch_size, temperature in ((65_000, 1024, 0.25), (717_000, 8192, 0.18)):
        settings = suggested_settings(DENSE, num_train_events=num_events)
        assert (settings["training.batch_size"], settings["model.temperature"]) == (batch_size, temperature)


@pytest.mark.parametrize(
    "facts",
    [SPARSE, SPARSE_IDS, SPARSE_UNORDERED, DENSE, DENSE_ORDERED],
    ids=["sparse", "sparse ids", "sparse unordered", "dense", "dense ordered"],
)
def test_every_setting_is_suggested_once_and_its_value_is_in_the_search_range(facts: DataFacts) -> None:
    all_suggestions = suggestions(facts)
    assert len({suggestion.setting for suggestion in all_suggestions}) == len(all_suggestions)
    for suggestion in all_suggestions:
        if suggestion.search is not None and suggestion.search.low is not None and suggestion.search.high is not None:
            assert suggestion.search.low <= suggestion.value <= suggestion.search.high


@pytest.mark.parametrize("num_events", [1, 10**10])
def test_the_batch_size_is_from_256_to_8192(num_events: int) -> None:
    assert 256 <= suggested_settings(SPARSE, num_train_events=num_events)["training.batch_size"] <= 8192


def test_the_facts_of_a_small_log_equal_facts_counted_by_hand(tmp_path: Path) -> None:
    # For each user, the item rows of the training, validation and test events.
    log = [([0, 1], [2], [0]), ([0], [], [3]), ([], [], [])]
    facts = DataFacts.of(
        Dataset(write_interactions(tmp_path / "log", user_ids=[1, 2, 3], item_ids=[5, 6, 7, 8], log=log)), TimeSplit()
    )
    assert (facts.num_users, facts.num_items, facts.num_train_events, facts.density) == (2, 2, 3, 3 / 4)
    assert (facts.history_median, facts.history_p95) == (1.5, pytest.approx(1.95))
    assert (facts.vector_share, facts.has_item_features) == (0.0, False)
    assert facts.is_dense and not facts.describes_items
    assert facts.model_copy(update={"density": 0.01}).is_dense and not facts.model_copy(update={"density": 0.0099}).is_dense
    assert (facts.cold_share, facts.cold_validation_share, facts.cold_test_share) == (pytest.approx(2 / 3), 1.0, 0.5)


def test_the_vector_share_is_a_share_of_the_training_events_and_not_of_the_items(tmp_path: Path) -> None:
    # For each user, (item row, time) of the training, validation and test events. Only item row 0 has a vector.
    log = [([(0, 1), (0, 2), (1, 3)], [], [(2, 9)]), ([(0, 4)], [], [(1, 9)])]
    interactions = interactions_of(tmp_path / "log", log, item_ids=[5, 6, 7], vector_row=[0, -1, -1])
    facts = DataFacts.of(Dataset(interactions), TimeSplit())
    assert (facts.vector_share, facts.describes_items) == (0.75, True)
