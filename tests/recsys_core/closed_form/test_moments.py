"""Moments in chunks, compared with NumPy on all rows."""

import numpy as np
import pytest

from recsys_core.closed_form import moments


@pytest.mark.parametrize("chunk_rows", [1, 7, 100])
def test_chunks_and_absent_zero_rows_do_not_change_a_covariance(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "CHUNK_ROWS", chunk_rows)
    vectors = np.random.default_rng(0).normal(loc=3, size=(30, 4)).astype(np.float32)
    with_zeros = np.concatenate([vectors, np.zeros((12, 4), np.float32)])
    assert len(next(moments.row_chunks(vectors))) == min(30, chunk_rows)
    np.testing.assert_allclose(moments.covariance(vectors), np.cov(vectors, rowvar=False), rtol=1e-5)
    np.testing.assert_allclose(moments.covariance(vectors, num_rows=42), np.cov(with_zeros, rowvar=False), rtol=1e-5)
