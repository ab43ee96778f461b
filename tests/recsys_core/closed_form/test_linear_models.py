"""Linear models compared with dense computations."""

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

from recsys_core.closed_form.linear_models import ease_vectors, ease_weights, log_matrix, singular_vectors
from recsys_core.dataset.events import EventStore
from tests.recsys_core.closed_form.random_log import NUM_ITEMS, dense_matrix
from tests.recsys_core.evaluation.stage_folders import interactions_stage


@pytest.fixture(scope="module")
def dense_UI() -> np.ndarray:
    return dense_matrix()


def test_ease_solves_the_ridge_regression_of_each_item_on_the_others(dense_UI: np.ndarray) -> None:
    weight_II = ease_weights(csr_array(dense_UI), l2=3.0)
    for item in range(NUM_ITEMS):
        others = np.delete(np.arange(NUM_ITEMS), item)
        features = dense_UI[:, others].astype(np.float64)
        expected = np.linalg.solve(features.T @ features + 3.0 * np.eye(len(others)), features.T @ dense_UI[:, item])
        np.testing.assert_allclose(weight_II[others, item], expected, atol=1e-5)
        assert weight_II[item, item] == 0


def test_the_vectors_of_ease_are_the_best_symmetric_approximation_of_its_weights(dense_UI: np.ndarray) -> None:
    present_UI = np.delete(dense_UI, 7, axis=1)
    weight_II = ease_weights(csr_array(present_UI), l2=3.0).astype(np.float64)
    inverse = np.linalg.inv(present_UI.T.astype(np.float64) @ present_UI + 3.0 * np.eye(NUM_ITEMS - 1))
    root_I = np.sqrt(np.diag(inverse))
    symmetric = weight_II / root_I[:, None] * root_I
    np.testing.assert_allclose(symmetric, symmetric.T, atol=1e-5)
    values, vectors = np.linalg.eigh(symmetric)
    vector_ID = ease_vectors(csr_array(present_UI), l2=3.0, dim=6)
    expected = vectors[:, -6:] * values[-6:] @ vectors[:, -6:].T
    assert values[-6] > 0
    np.testing.assert_allclose(vector_ID @ vector_ID.T, expected, atol=1e-4)


@pytest.mark.parametrize(("user_exponent", "item_exponent"), [(0.5, 0.5), (0.3, 0.0)])
def test_the_singular_vectors_are_those_of_the_dense_normalised_matrix(
    user_exponent: float, item_exponent: float, dense_UI: np.ndarray
) -> None:
    value_D, vector_ID = singular_vectors(
        csr_array(dense_UI), num_vectors=5, user_exponent=user_exponent, item_exponent=item_exponent
    )
    user_power, item_power = (
        np.maximum(dense_UI.sum(axis=axis, keepdims=True), 1) ** exponent
        for axis, exponent in ((1, user_exponent), (0, item_exponent))
    )
    _, values, vectors = np.linalg.svd(dense_UI / user_power / item_power, full_matrices=False)
    np.testing.assert_allclose(value_D, values[:5], atol=1e-4)
    np.testing.assert_allclose(vector_ID @ vector_ID.T, vectors[:5].T @ vectors[:5], atol=1e-4)
    assert not vector_ID[7].any()


def test_a_large_log_is_sampled_by_users(tmp_path: Path) -> None:
    train = [[0, 1, 2]] * 20
    store = EventStore.open(
        interactions_stage(tmp_path / "interactions", train=train, validation=[[]] * 20, test=[[3] * 20] * 20, num_items=4)
    )
    assert log_matrix(store, before="test", max_events=30).toarray().tolist() == [[1, 1, 1, 0]] * 10
    assert log_matrix(store, before="test", max_events=30, max_history=1).toarray().tolist() == [[0, 0, 1, 0]] * 10
