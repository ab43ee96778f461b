"""Linear models compared with dense computations."""

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

from recsys_core.closed_form.linear_models import ease_vectors, ease_weights, log_matrix, singular_vectors
from recsys_core.dataset.events import EventStore
from tests.recsys_core.closed_form.random_log import ITEM_WITHOUT_EVENT, NUM_ITEMS, dense_matrix
from tests.recsys_core.evaluation.stage_folders import write_interactions_stage
from tests.recsys_core.ingest.parquet_files import raises_input_error


@pytest.fixture(scope="module")
def dense_UI() -> np.ndarray:
    return dense_matrix()


def test_ease_solves_the_ridge_regression_of_each_item_on_the_others(dense_UI: np.ndarray) -> None:
    weight_II = ease_weights(csr_array(dense_UI), l2=3.0)
    for item in range(NUM_ITEMS):
        other_items = np.delete(np.arange(NUM_ITEMS), item)
        other_UV = dense_UI[:, other_items].astype(np.float64)
        expected_weights = np.linalg.solve(
            other_UV.T @ other_UV + 3.0 * np.eye(len(other_items)), other_UV.T @ dense_UI[:, item]
        )
        np.testing.assert_allclose(weight_II[other_items, item], expected_weights, atol=1e-5)
        assert weight_II[item, item] == 0


def test_too_little_regularisation_for_items_with_the_same_users_is_rejected() -> None:
    with raises_input_error("EASE with l2 = 1e-09", "set l2 to a larger number"):
        ease_weights(csr_array(np.ones((20, 2), np.float32)), l2=1e-9)


def test_the_vectors_of_ease_are_the_best_symmetric_approximation_of_its_weights(dense_UI: np.ndarray) -> None:
    dense_UV = np.delete(dense_UI, ITEM_WITHOUT_EVENT, axis=1)  # V: items with an event
    weight_VV = ease_weights(csr_array(dense_UV), l2=3.0).astype(np.float64)
    inverse_VV = np.linalg.inv(dense_UV.T.astype(np.float64) @ dense_UV + 3.0 * np.eye(NUM_ITEMS - 1))
    root_V = np.sqrt(np.diag(inverse_VV))
    symmetric_VV = weight_VV / root_V[:, None] * root_V
    np.testing.assert_allclose(symmetric_VV, symmetric_VV.T, atol=1e-5)
    eigenvalue_V, eigenvector_VV = np.linalg.eigh(symmetric_VV)
    vector_ID = ease_vectors(csr_array(dense_UV), l2=3.0, dim=6)
    expected_VV = eigenvector_VV[:, -6:] * eigenvalue_V[-6:] @ eigenvector_VV[:, -6:].T
    assert eigenvalue_V[-6] > 0  # otherwise no real vectors have the product `expected_VV`
    np.testing.assert_allclose(vector_ID @ vector_ID.T, expected_VV, atol=1e-4)


@pytest.mark.parametrize(("user_exponent", "item_exponent"), [(0.5, 0.5), (0.3, 0.0)])
def test_singular_vectors_equal_a_decomposition_of_the_dense_normalised_matrix(
    user_exponent: float, item_exponent: float, dense_UI: np.ndarray
) -> None:
    value_D, vector_ID = singular_vectors(
        csr_array(dense_UI), num_vectors=5, user_exponent=user_exponent, item_exponent=item_exponent
    )
    user_scale, item_scale = (
        np.maximum(dense_UI.sum(axis=axis, keepdims=True), 1) ** exponent
        for axis, exponent in ((1, user_exponent), (0, item_exponent))
    )
    _, expected_values, expected_vectors = np.linalg.svd(dense_UI / user_scale / item_scale, full_matrices=False)
    np.testing.assert_allclose(value_D, expected_values[:5], atol=1e-4)
    np.testing.assert_allclose(vector_ID @ vector_ID.T, expected_vectors[:5].T @ expected_vectors[:5], atol=1e-4)
    assert not vector_ID[ITEM_WITHOUT_EVENT].any()


def test_users_of_a_large_log_are_sampled_and_their_histories_cut(tmp_path: Path) -> None:
    training_items = [[0, 1, 2]] * 20
    store = EventStore.open(
        write_interactions_stage(
            tmp_path / "interactions", train=training_items, validation=[[]] * 20, test=[[3] * 20] * 20, num_items=4
        )
    )
    # 10 of the 20 users have 30 events together.
    assert log_matrix(store, before="test", max_events=30).toarray().tolist() == [[1, 1, 1, 0]] * 10
    assert log_matrix(store, before="test", max_events=30, max_history=1).toarray().tolist() == [[0, 0, 1, 0]] * 10
