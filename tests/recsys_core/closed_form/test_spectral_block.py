"""Factors of the spectral block, compared with their definition and with a baseline of the evaluation. Covariances.

Shapes: U users, I items, V items with an event, M width of the block, D width of a vector, R rows.
"""

import numpy as np
import pytest
from scipy.sparse import csr_array

from recsys_core.closed_form import spectral_block
from recsys_core.closed_form.linear_models import singular_vectors
from recsys_core.closed_form.spectral_block import block_factors
from recsys_core.errors import InputError
from recsys_core.evaluation.closed_form import spectral_vectors


@pytest.fixture(scope="module")
def matrix_UI() -> csr_array:
    """A random matrix of users and items, whose last item and last user have no events."""
    rng = np.random.default_rng(0)
    dense_UI = (rng.random((80, 40)) < rng.random(40) * 0.4).astype(np.float32)
    dense_UI[:, -1] = dense_UI[-1] = 0
    return csr_array(dense_UI)


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.5])
def test_scores_equal_the_definition_up_to_a_constant(matrix_UI: csr_array, exponent: float) -> None:
    history_factor_IM, candidate_factor_IM = block_factors(matrix_UI, dim=6, item_exponent=exponent)
    dense_UV = matrix_UI.toarray()[:-1, :-1]  # without the user and the item that have no events
    _, vector_VM = singular_vectors(csr_array(dense_UV), num_vectors=6)
    item_scale_V = dense_UV.sum(axis=0) ** exponent
    expected_UV = (dense_UV / item_scale_V) @ vector_VM @ vector_VM.T * item_scale_V
    actual_UV = (matrix_UI @ history_factor_IM @ candidate_factor_IM.T)[:-1, :-1]
    ratio = (actual_UV * expected_UV).sum() / (expected_UV**2).sum()
    np.testing.assert_allclose(actual_UV, ratio * expected_UV, atol=1e-4 * np.abs(actual_UV).max())
    assert not history_factor_IM[-1].any() and not candidate_factor_IM[-1].any()


def test_the_exponent_of_one_half_ranks_like_the_ideal_low_pass_filter(matrix_UI: csr_array) -> None:
    history_factor_IM, candidate_factor_IM = block_factors(matrix_UI, dim=6, item_exponent=0.5)
    query_UD, vector_ID = spectral_vectors(matrix_UI, rank=6, history_BI=matrix_UI, user_exponent=0.5, item_exponent=0.5)
    actual_UI, expected_UI = (matrix_UI @ history_factor_IM @ candidate_factor_IM.T)[:-1], (query_UD @ vector_ID.T)[:-1]
    ratio = np.abs(actual_UI).max() / np.abs(expected_UI).max()
    np.testing.assert_allclose(actual_UI, ratio * expected_UI, atol=1e-4 * np.abs(actual_UI).max())


def test_the_standard_deviation_of_the_scores_is_the_norm_of_the_query_vector(matrix_UI: csr_array) -> None:
    history_factor_IM, candidate_factor_IM = block_factors(matrix_UI, dim=6, item_exponent=0.4)
    query_UM = matrix_UI @ history_factor_IM
    score_std_U = (query_UM @ candidate_factor_IM.T).std(axis=1, ddof=1)
    np.testing.assert_allclose(score_std_U, np.linalg.norm(query_UM, axis=1), rtol=1e-3)


@pytest.mark.parametrize(("matrix_shape", "count_text"), [((80, 6), "6 items"), ((5, 40), "5 users")])
def test_too_few_items_or_users_for_the_singular_vectors_are_rejected(matrix_shape: tuple[int, int], count_text: str) -> None:
    with pytest.raises(InputError, match=f"model.spectral_block.dim is 6, but only {count_text} have training events"):
        block_factors(csr_array(np.ones(matrix_shape, np.float32)), dim=6, item_exponent=0.4)


@pytest.mark.parametrize("chunk_rows", [1, 7, 100])
def test_a_covariance_does_not_depend_on_chunks_and_may_leave_out_zero_rows(
    chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spectral_block, "CHUNK_ROWS", chunk_rows)
    vector_RD = np.random.default_rng(0).normal(loc=3, size=(30, 4)).astype(np.float32)
    vector_with_zeros_RD = np.concatenate([vector_RD, np.zeros((12, 4), np.float32)])
    assert len(next(spectral_block.row_chunks(vector_RD))) == min(30, chunk_rows)
    np.testing.assert_allclose(spectral_block.covariance(vector_RD), np.cov(vector_RD, rowvar=False), rtol=1e-5)
    np.testing.assert_allclose(
        spectral_block.covariance(vector_RD, num_rows=len(vector_with_zeros_RD)),
        np.cov(vector_with_zeros_RD, rowvar=False),
        rtol=1e-5,
    )
