"""Rankings that the export stores: they are read as they were written, and rejected if the log has changed."""

from pathlib import Path

import numpy as np
import pytest

from recsys_core.errors import StageError
from recsys_core.evaluation.model_rankings import StoredRanking, ranking_file
from recsys_core.evaluation.ranking.catalogue import rank_catalogue
from recsys_core.manifests import ExportManifest
from tests.recsys_core.evaluation.ranking.sorted_scores import queries_of
from tests.recsys_core.evaluation.stage_folders import write_export_stage

QUERY_VECTORS, ITEM_VECTORS = np.random.default_rng(0).normal(size=(4, 3)), np.random.default_rng(1).normal(size=(9, 3))
QUERIES_OF_LOG = queries_of(QUERY_VECTORS, seen=[[1], [], [2, 3], [4]], targets=[[0, 1], [5], [6, 7], []])


@pytest.fixture
def export(tmp_path: Path) -> ExportManifest:
    """An export with a stored ranking of its test queries."""
    manifest = write_export_stage(tmp_path / "export", item_vectors=ITEM_VECTORS, queries={"test": (range(4), QUERY_VECTORS)})
    ranking = rank_catalogue(QUERIES_OF_LOG, item_vector_ID=QUERIES_OF_LOG.query_BD.new_tensor(ITEM_VECTORS), k=3)
    file_names = [ranking_file("test", content) for content in ("top", "positions", "cold_positions")]
    for file_name, array in zip(file_names, (ranking.top_BK, ranking.position_T, ranking.position_T), strict=True):
        np.save(manifest.folder / file_name, array)
    return manifest.model_copy(update={"files": manifest.files | dict.fromkeys(file_names, manifest.files["model.json"])})


def test_a_stored_ranking_equals_the_computed_ranking(export: ExportManifest) -> None:
    ranking = rank_catalogue(QUERIES_OF_LOG, item_vector_ID=QUERIES_OF_LOG.query_BD.new_tensor(ITEM_VECTORS), k=3)
    stored_ranking = StoredRanking(export, split="test", is_cold=False).read(QUERIES_OF_LOG, num_items=9)
    for field in ("query_T", "item_T", "position_T", "num_candidates_B", "top_BK"):
        np.testing.assert_array_equal(getattr(stored_ranking, field), getattr(ranking, field))
    assert (stored_ranking.num_seen_targets, stored_ranking.num_items) == (ranking.num_seen_targets, 9) == (1, 9)
    assert StoredRanking(export, split="test", is_cold=True).read(QUERIES_OF_LOG, num_items=9).top_BK.shape == (4, 0)


def test_a_ranking_of_another_log_is_rejected(export: ExportManifest) -> None:
    other_queries = queries_of(QUERY_VECTORS[:3], seen=[[], [], []], targets=[[0], [5], [6]])
    message = (
        r"ranking_test_positions\.npy: the ranking has 4 users and 4 targets, but the log has 3 known users with 3 targets"
    )
    with pytest.raises(StageError, match=message):
        stored_ranking = StoredRanking(export, split="test", is_cold=False)
        stored_ranking.read(other_queries, num_items=9)
        stored_ranking.check_end()


def test_a_ranking_is_read_in_chunks_but_not_beyond_its_end(export: ExportManifest) -> None:
    whole_ranking = StoredRanking(export, split="test", is_cold=False).read(QUERIES_OF_LOG, num_items=9)
    stored_ranking = StoredRanking(export, split="test", is_cold=False)
    chunks = [stored_ranking.read(QUERIES_OF_LOG.take(np.array(indices)), num_items=9) for indices in ([0, 1, 2], [3])]
    stored_ranking.check_end()
    for field in ("position_T", "top_BK", "num_candidates_B"):
        np.testing.assert_array_equal(
            np.concatenate([getattr(chunk, field) for chunk in chunks]), getattr(whole_ranking, field)
        )
    with pytest.raises(
        StageError, match="4 users and 4 targets, but the log has at least 8 known users with 8 targets; repeat"
    ):
        stored_ranking.read(QUERIES_OF_LOG, num_items=9)


def test_the_error_for_a_cold_ranking_does_not_invent_a_number_of_users(export: ExportManifest) -> None:
    cold_ranking = StoredRanking(export, split="test", is_cold=True)
    with pytest.raises(
        StageError, match=r"cold_positions\.npy: the ranking has 4 targets, but the log has 0 known users with 0"
    ):
        cold_ranking.check_end()
