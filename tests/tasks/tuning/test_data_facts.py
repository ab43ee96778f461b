"""Facts about an ingested log."""

from pathlib import Path

import pytest

from recsys_core.manifests import Dataset
from tasks.tuning.data_facts import DataFacts
from tests.recsys_core.ingest.interactions_with_context import write_interactions


def test_facts_of_a_log(tmp_path: Path) -> None:
    log = [([0, 1], [2], [0]), ([0], [], [3]), ([], [], [])]
    facts = DataFacts.of(Dataset(write_interactions(tmp_path / "log", users=[1, 2, 3], items=[5, 6, 7, 8], log=log)))
    assert (facts.num_users, facts.num_items, facts.num_train_events, facts.density) == (2, 2, 3, 3 / 4)
    assert (facts.history_median, facts.vector_share, facts.has_item_features) == (1.5, 0.0, False)
    assert facts.is_dense and not facts.describes_items
    assert facts.cold_share == pytest.approx(2 / 3)
