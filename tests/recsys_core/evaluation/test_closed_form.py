"""Closed-form baselines, compared with dense computations of their definitions and with results on MovieLens."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.sparse import csr_array

from recsys_core.closed_form.linear_models import ease_weights, log_matrix, user_item_matrix
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation import closed_form
from recsys_core.evaluation.closed_form import MAX_EVENTS, cooccurrence_model, linear_model, neighbour_weights, spectral_vectors
from recsys_core.evaluation.config import ClosedFormConfig
from recsys_core.evaluation.metrics import ndcg, recall
from recsys_core.evaluation.ranking.catalogue import rank_by_scores
from recsys_core.evaluation.ranking.chunks import ScoreTile
from recsys_core.evaluation.ranking.queries import Queries
from tests.recsys_core.closed_form.random_log import NUM_ITEMS, dense_matrix
from tests.recsys_core.evaluation.stage_folders import write_interactions_stage

ML1M = Path(__file__).resolve().parents[4] / "shared" / "data" / "ml1m"


@pytest.fixture(scope="module")
def dense_UI() -> np.ndarray:
    return dense_matrix()


@pytest.mark.parametrize(("user_exponent", "item_exponent"), [(0.5, 0.5), (0.4, 0.2), (1.0, 0.0)])
def test_spectral_scores_are_a_projection_on_the_first_singular_vectors(
    user_exponent: float, item_exponent: float, dense_UI: np.ndarray
) -> None:
    matrix_UI = csr_array(dense_UI)
    query_BD, vector_ID = spectral_vectors(
        matrix_UI, rank=5, history_BI=matrix_UI, user_exponent=user_exponent, item_exponent=item_exponent
    )
    item_power = np.maximum(dense_UI.sum(axis=0), 1) ** item_exponent
    normalised_UI = dense_UI / item_power / np.maximum(dense_UI.sum(axis=1, keepdims=True), 1) ** user_exponent
    singular_vector_ID = np.linalg.svd(normalised_UI, full_matrices=False)[2][:5].T
    expected_score_UI = (dense_UI / item_power) @ singular_vector_ID @ singular_vector_ID.T * item_power
    np.testing.assert_allclose(query_BD @ vector_ID.T, expected_score_UI, atol=1e-4)


def test_the_spectral_model_of_one_user_has_equal_scores() -> None:
    matrix_UI = csr_array(np.ones((1, 3), np.float32))
    query_BD, vector_ID = spectral_vectors(matrix_UI, rank=5, history_BI=matrix_UI, user_exponent=0.5, item_exponent=0.5)
    assert not (query_BD @ vector_ID.T).any()


@pytest.mark.parametrize("block_pairs", [1, 1 << 24])
def test_neighbours_are_the_nearest_items_by_cosine(
    block_pairs: int, dense_UI: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_form, "BLOCK_PAIRS", block_pairs)
    monkeypatch.setattr(closed_form, "MAX_NEIGHBOURS", 4)
    weight_II = neighbour_weights(csr_array(dense_UI)).toarray()
    norm_I = np.linalg.norm(dense_UI, axis=0)
    cosine_II = dense_UI.T @ dense_UI / np.maximum(np.outer(norm_I, norm_I), 1e-9)
    np.fill_diagonal(cosine_II, 0)
    for item in range(NUM_ITEMS):
        expected_weights = np.sort(cosine_II[item])[::-1][:4]
        np.testing.assert_allclose(np.sort(weight_II[item])[::-1][:4], expected_weights, atol=1e-5)
        assert np.count_nonzero(weight_II[item]) == np.count_nonzero(expected_weights)


def test_a_block_of_neighbours_has_at_most_the_pairs_of_the_limit_and_of_one_item(
    dense_UI: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_pairs_I = dense_UI.T @ dense_UI.sum(axis=1)
    limit = int(num_pairs_I.sum() / 5)
    monkeypatch.setattr(closed_form, "BLOCK_PAIRS", limit)
    num_pairs_of_blocks = []

    def record_block(weight_RI: csr_array, *, first_row: int) -> csr_array:
        num_pairs_of_blocks.append(num_pairs_I[first_row : first_row + weight_RI.shape[0]].sum())
        return weight_RI

    monkeypatch.setattr(closed_form, "_nearest_neighbours", record_block)
    neighbour_weights(csr_array(dense_UI))
    assert sum(num_pairs_of_blocks) == num_pairs_I.sum()
    assert max(num_pairs_of_blocks) <= limit + num_pairs_I.max()


@pytest.mark.parametrize("model", ["ease", "spectral", "cooccurrence"])
def test_rankings_follow_the_scores_and_without_a_history_the_popularity(model: str, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    train = [random.integers(0, 12, random.integers(0, 9)).tolist() for _ in range(30)]
    manifest = write_interactions_stage(
        tmp_path / "interactions",
        train=train,
        validation=[[]] * 30,
        test=[[int(item)] for item in random.integers(0, 14, 30)],
        num_items=14,
    )
    store = EventStore.open(manifest)
    histories, order_I = store.items_before(np.arange(30), "test"), random.permutation(14)
    matrix_UI, history_UI = log_matrix(store, before="test", max_events=MAX_EVENTS), user_item_matrix(histories, num_items=14)
    if model == "ease":
        scores = linear_model(ClosedFormConfig(l2=2), store=store, order_I=order_I)(histories)
        expected_score_UI = history_UI @ ease_weights(matrix_UI, l2=2)
    elif model == "spectral":
        config = ClosedFormConfig(ease_max_items=0, rank=3, user_exponent=0.3, item_exponents=(0.2, 2.0))
        scores = linear_model(config, store=store, order_I=order_I)(histories)
        query_BD, vector_ID = spectral_vectors(matrix_UI, rank=3, history_BI=history_UI, user_exponent=0.3, item_exponent=0.2)
        expected_score_UI = query_BD @ vector_ID.T
    else:
        scores = cooccurrence_model(store=store, order_I=order_I)(histories)
        expected_score_UI = (history_UI @ neighbour_weights(matrix_UI)).toarray()
    targets = store.targets(np.arange(30), "test")
    known_queries = Queries(None, is_known_B=np.ones(30, bool), seen=histories, targets=targets)
    ranking = rank_by_scores(known_queries, **scores._asdict(), row_C=order_I, k=14)
    for user, top in enumerate(ranking.top_BK.tolist()):
        unseen_items = [item for item in order_I.tolist() if item not in train[user]]
        sorted_items = sorted(unseen_items, key=lambda item: -expected_score_UI[user, item])
        np.testing.assert_allclose(
            expected_score_UI[user, [item for item in top if item >= 0]], expected_score_UI[user, sorted_items], atol=1e-5
        )
        if not train[user]:
            assert top == order_I.tolist()


def test_the_item_exponent_with_the_best_ndcg_on_validation_is_used(tmp_path: Path) -> None:
    random, exponents = np.random.default_rng(3), (0.0, 0.5, 1.0)
    probability_I = np.arange(1, 31) / np.arange(1, 31).sum()
    items_of_users = [random.choice(30, 9, replace=False, p=probability_I).tolist() for _ in range(80)]
    manifest = write_interactions_stage(
        tmp_path / "interactions",
        train=[items[:6] for items in items_of_users],
        validation=[items[6:8] for items in items_of_users],
        test=[items[8:] for items in items_of_users],
        num_items=30,
    )
    store = EventStore.open(manifest)
    users, order_I = np.arange(80), np.arange(30)
    histories, targets = store.items_before(users, "validation"), store.targets(users, "validation")
    history_UI = user_item_matrix(histories, num_items=30)
    queries = Queries(None, is_known_B=np.ones(80, bool), seen=histories, targets=targets)
    ndcg_by_exponent, test_histories = {}, store.items_before(users, "test")
    for exponent in exponents:
        query_UD, vector_ID = spectral_vectors(
            history_UI, rank=4, history_BI=history_UI, user_exponent=0.5, item_exponent=exponent
        )
        score_UI = query_UD @ vector_ID.T
        ranking = rank_by_scores(queries, score_tile=_tile_function(score_UI), row_C=order_I, k=0)
        ndcg_by_exponent[exponent] = ndcg(ranking.target_positions(), k=20).mean()
    best_exponent = max(exponents, key=lambda exponent: ndcg_by_exponent[exponent])
    assert best_exponent != exponents[0] and len({*ndcg_by_exponent.values()}) == 3

    config = ClosedFormConfig(ease_max_items=0, rank=4, item_exponents=exponents)
    chosen_scores = linear_model(config, store=store, order_I=order_I)(test_histories)
    best_config = config.model_copy(update={"item_exponents": (best_exponent,)})
    best_scores = linear_model(best_config, store=store, order_I=order_I)(test_histories)
    chosen_score_UI, best_score_UI = np.empty((80, 30), np.float32), np.empty((80, 30), np.float32)
    for scores, score_UI in ((chosen_scores, chosen_score_UI), (best_scores, best_score_UI)):
        scores.score_tile(slice(0, 80), slice(0, 30), score_UI)
    np.testing.assert_array_equal(chosen_score_UI, best_score_UI)


@pytest.mark.filterwarnings("error")
def test_the_first_item_exponent_is_used_if_all_validation_targets_were_seen(tmp_path: Path) -> None:
    train = [[0, 1, 2], [0, 2], [1, 3], [0, 3]]
    manifest = write_interactions_stage(
        tmp_path / "interactions", train=train, validation=[[items[0]] for items in train], test=[[3]] * 4, num_items=4
    )
    store = EventStore.open(manifest)
    score_matrices = []
    for exponents in ((0.2, 2.0), (0.2,)):
        config = ClosedFormConfig(ease_max_items=0, rank=2, item_exponents=exponents)
        score_UI = np.empty((4, 4), np.float32)
        scores = linear_model(config, store=store, order_I=np.arange(4))(store.items_before(np.arange(4), "test"))
        scores.score_tile(slice(0, 4), slice(0, 4), score_UI)
        score_matrices.append(score_UI)
    np.testing.assert_array_equal(*score_matrices)


def _tile_function(score_BC: np.ndarray) -> ScoreTile:
    """Return a function that copies tiles from a score matrix."""

    def score_tile(queries: slice, columns: slice, tile_BC: np.ndarray) -> None:
        tile_BC[:] = score_BC[queries, columns]

    return score_tile


@pytest.mark.skipif(not ML1M.is_dir(), reason="the public MovieLens data is not on this machine")
def test_ease_on_movielens_is_near_the_published_models() -> None:
    """Published on the same split: Recall@20 .2787 and NDCG@20 .2642 for UltraGCN, .2802 and .2670 for SimpleX."""
    train, test = (pq.read_table(ML1M / f"{name}.parquet") for name in ("train", "test"))
    user_ids, item_ids = (np.unique(train[column]) for column in ("user_id", "item_id"))
    items_by_split = []
    for events in (train, test):
        user_row_E = np.searchsorted(user_ids, events["user_id"].to_numpy())
        item_row_E = np.searchsorted(item_ids, events["item_id"].to_numpy())
        order_E = np.argsort(user_row_E, kind="stable")
        items_by_split.append(JaggedArray.from_pairs(user_row_E[order_E], item_row_E[order_E], num_lists=len(user_ids)))
    histories, targets = items_by_split
    matrix_UI = user_item_matrix(histories, num_items=len(item_ids))
    weight_II = ease_weights(matrix_UI, l2=500)

    def score_tile(queries: slice, columns: slice, score_BC: np.ndarray) -> None:
        score_BC[:] = (matrix_UI[queries] @ weight_II)[:, columns]

    queries = Queries(None, is_known_B=np.ones(len(user_ids), bool), seen=histories, targets=targets)
    columns = np.arange(len(item_ids))
    ranking = rank_by_scores(queries, score_tile=score_tile, row_C=columns, k=20, columns_per_tile=len(columns))
    positions = ranking.target_positions()
    assert recall(positions, k=20).mean() == pytest.approx(0.2759, abs=5e-4)
    assert ndcg(positions, k=20).mean() == pytest.approx(0.2660, abs=5e-4)
