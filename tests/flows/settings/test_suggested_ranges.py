"""The default search space, which fits the data and the config, and the settings of the first trials."""

from pathlib import Path

import pytest

from flows.settings.config_file import load_config, with_settings
from flows.settings.suggested import default_ranges, first_trials
from tasks.tuning.config import RangeConfig
from tasks.tuning.suggestions import DataFacts, suggestions
from tests.flows.tuning_config import CONFIG
from tests.tasks.tuning.facts import DENSE, DENSE_ORDERED, SPARSE

LEARNING_RATE, TEMPERATURE, HISTORY_LENGTH, POOLING = (
    "training.table_optimizer.learning_rate",
    "model.temperature",
    "model.history.length",
    "model.history.pooling",
)
FILE_SPLIT = "interactions.split={kind: files, validation_paths: v.parquet, test_paths: t.parquet}"
NO_ORDER = ["interactions.timestamp_column=null", FILE_SPLIT, "model.history.last_item_feature=false"]
NO_HISTORY = ["model.history={length: 0, last_item_feature: false}", "model.learn_user_embedding=true", "loss.kind=bce"]


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(CONFIG)
    return config_path


@pytest.mark.parametrize(
    ("facts", "overrides", "varied_settings", "fixed_settings"),
    [
        (
            SPARSE,
            [],
            {TEMPERATURE, LEARNING_RATE, HISTORY_LENGTH, POOLING, "loss.num_negatives"},
            {"model.popularity", "loss.negatives"},
        ),
        (DENSE_ORDERED, [], {TEMPERATURE, LEARNING_RATE, POOLING, "model.popularity"}, set()),
        (DENSE_ORDERED, ["model.num_members=2"], {TEMPERATURE, LEARNING_RATE, POOLING}, {"model.popularity"}),
        (
            DENSE,
            NO_ORDER,
            {TEMPERATURE, LEARNING_RATE, "loss.user_exponent"},
            {HISTORY_LENGTH, POOLING, "loss.negatives_exponent"},
        ),
        (DENSE, [*NO_ORDER, "loss.negatives=all"], {"loss.negatives_exponent"}, {"loss.negatives"}),
        (SPARSE, NO_HISTORY, {TEMPERATURE, LEARNING_RATE}, {HISTORY_LENGTH, POOLING, "loss.negatives"}),
    ],
    ids=["sparse", "dense", "an ensemble has no popularity", "no order", "whole catalogue", "no history, bce"],
)
def test_the_varied_settings_fit_the_data_and_the_config(
    config_path: Path, facts: DataFacts, overrides: list[str], varied_settings: set[str], fixed_settings: set[str]
) -> None:
    config = load_config(config_path, overrides)
    ranges = default_ranges(config, suggestions(facts))
    assert varied_settings <= ranges.keys() and not fixed_settings & ranges.keys()
    for setting, value_range in ranges.items():
        for value in value_range.choices or (value_range.low, value_range.high):
            with_settings(config, {setting: value})  # raises InputError for an invalid value


def test_a_range_contains_the_value_of_the_file_and_the_suggested_value(config_path: Path) -> None:
    ranges = default_ranges(load_config(config_path, ["model.history.length=33"]), suggestions(SPARSE))
    assert ranges[TEMPERATURE] == RangeConfig(low=0.05, high=1.0, log=True)  # the file has 1
    assert ranges[HISTORY_LENGTH].choices == (33, 30, 10, 20, 50)


def test_the_first_trials_have_the_settings_of_the_file_and_the_suggested_settings(config_path: Path) -> None:
    config, data_suggestions = load_config(config_path), suggestions(SPARSE)
    ranges = default_ranges(config, data_suggestions)
    file_settings, suggested_settings = first_trials(config, data_suggestions, ranges)
    assert file_settings.keys() == suggested_settings.keys() == ranges.keys()
    assert (file_settings[TEMPERATURE], suggested_settings[TEMPERATURE]) == (1.0, 0.1)
    assert (file_settings[POOLING], suggested_settings[POOLING]) == ("mean", "recency")
    suggested_config = with_settings(config, suggested_settings)
    assert first_trials(suggested_config, data_suggestions, ranges) == [suggested_settings]


def test_a_temperature_that_the_training_chooses_is_searched_like_a_number(config_path: Path) -> None:
    config, data_suggestions = load_config(config_path, ["model.temperature=auto"]), suggestions(SPARSE)
    ranges = default_ranges(config, data_suggestions)
    assert ranges[TEMPERATURE] == RangeConfig(low=0.05, high=0.2, log=True)
    assert [trial[TEMPERATURE] for trial in first_trials(config, data_suggestions, ranges)] == [0.1, 0.1]


def test_a_suggested_choice_that_contradicts_the_file_is_not_tried(config_path: Path) -> None:
    config, data_suggestions = load_config(config_path, ["model.num_members=2"]), suggestions(DENSE_ORDERED)
    assert any(suggestion.setting == "model.popularity" for suggestion in data_suggestions)
    for trial in first_trials(config, data_suggestions, default_ranges(config, data_suggestions)):
        assert "model.popularity" not in trial
