"""Suggested settings in a config: changes, and suggestions that contradict the file."""

from pathlib import Path

import pytest

from flows.settings.config_file import load_config
from flows.settings.pipeline import PipelineConfig
from flows.settings.suggested import SuggestedConfig
from flows.settings.template import to_commented_yaml
from tasks.tuning.suggestions import DataFacts, suggestions
from tests.tasks.tuning.facts import DENSE, DENSE_ORDERED, SPARSE, SPARSE_IDS, SPARSE_UNORDERED

ORDERED_LOG = "interactions: {paths: log.parquet, order_column: t, split: {kind: leave_last_out}}\n"
UNORDERED_LOG = "interactions: {paths: log.parquet, split: {kind: files, test_paths: t.parquet}}\n"
VECTORS = "embeddings: {paths: vectors.parquet, vector_column: v}\n"
OTHER_SETTINGS = "model: {history: {last_item_feature: false}}\ntuning: {trials: 3}\n"


def config_of(folder: Path, facts: DataFacts, *overrides: str) -> PipelineConfig:
    """Return a config for data with these facts."""
    config_path = folder / "nightly.yaml"
    log_settings = ORDERED_LOG if facts.is_ordered else UNORDERED_LOG
    config_path.write_text(log_settings + (VECTORS if facts.vector_share else "") + OTHER_SETTINGS)
    return load_config(config_path, overrides)


@pytest.mark.parametrize("facts", [SPARSE, SPARSE_IDS, SPARSE_UNORDERED, DENSE, DENSE_ORDERED])
def test_the_written_file_has_every_suggestion_and_gets_no_more(tmp_path: Path, facts: DataFacts) -> None:
    config, data_suggestions = config_of(tmp_path, facts), suggestions(facts)
    proposal = SuggestedConfig.of(config, data_suggestions)
    assert proposal.problem_by_setting == {} and len(proposal.changes) > 3
    reason_by_setting = {
        suggestion.setting: suggestion.reason for suggestion in data_suggestions if suggestion.setting in proposal.changes
    }
    text = to_commented_yaml(proposal.config, note_by_setting=reason_by_setting, every_setting=False)
    assert [reason for reason in reason_by_setting.values() if reason not in text] == []
    config_path = tmp_path / "suggested.yaml"
    config_path.write_text(text)
    written_config = load_config(config_path)
    assert written_config == proposal.config and written_config.tuning == config.tuning
    assert SuggestedConfig.of(written_config, data_suggestions).changes == {}


def test_a_suggestion_that_contradicts_the_file_is_left_out_with_the_reason(tmp_path: Path) -> None:
    config = config_of(tmp_path, DENSE_ORDERED, "model.num_members=3")
    proposal = SuggestedConfig.of(config, suggestions(DENSE_ORDERED))
    assert proposal.problem_by_setting.keys() == {"model.popularity"}
    assert "num_members is 3, but a popularity term" in proposal.problem_by_setting["model.popularity"]
    assert proposal.config.model.num_members == 3 and not proposal.config.model.has_popularity
