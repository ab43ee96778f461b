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
    config, suggested = config_of(tmp_path, facts), suggestions(facts)
    proposal = SuggestedConfig.of(config, suggested)
    assert proposal.problem_by_setting == {} and len(proposal.changes) > 3
    reasons = {item.setting: item.reason for item in suggested if item.setting in proposal.changes}
    text = to_commented_yaml(proposal.config, note_by_setting=reasons, every_setting=False)
    assert [reason for reason in reasons.values() if reason not in text] == []
    config_path = tmp_path / "suggested.yaml"
    config_path.write_text(text)
    written = load_config(config_path)
    assert written == proposal.config and written.tuning == config.tuning
    assert SuggestedConfig.of(written, suggested).changes == {}


def test_a_suggestion_that_contradicts_the_file_is_left_out_with_the_reason(tmp_path: Path) -> None:
    config = config_of(tmp_path, DENSE_ORDERED, "model.num_members=3")
    proposal = SuggestedConfig.of(config, suggestions(DENSE_ORDERED))
    assert proposal.problem_by_setting.keys() == {"model.popularity"}
    assert "num_members is 3, but a popularity term" in proposal.problem_by_setting["model.popularity"]
    assert proposal.config.model.num_members == 3 and not proposal.config.model.has_popularity
