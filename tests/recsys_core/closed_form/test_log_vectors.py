"""Item vectors from the log: compared with a dense computation, independent of held-out events, and refused for bad input."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.closed_form import config as config_module
from recsys_core.closed_form.config import EaseVectorsConfig, IalsVectorsConfig, LogVectorsConfig, SpectralVectorsConfig
from recsys_core.closed_form.linear_models import ease_vectors, user_item_matrix
from recsys_core.closed_form.log_vectors import embed_log
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import InputError
from recsys_core.manifests import LogVectorsManifest
from tests.recsys_core.evaluation.stage_folders import Events, interactions_stage

NUM_USERS, NUM_ITEMS, COLD_ITEM = 40, 20, 13


def training_events(seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    warm_items = np.delete(np.arange(NUM_ITEMS), COLD_ITEM)
    return [random.choice(warm_items, random.integers(2, 9), replace=False).tolist() for _ in range(NUM_USERS)]


def embed(
    folder: Path,
    config: LogVectorsConfig,
    *,
    train: Events,
    validation: Events | None = None,
    test: Events | None = None,
) -> LogVectorsManifest:
    held_out: Events = [[COLD_ITEM]] * len(train)
    interactions = interactions_stage(
        folder / "interactions", train=train, validation=validation or held_out, test=test or held_out, num_items=NUM_ITEMS
    )
    return embed_log(config, interactions=interactions, folder=folder / "log_vectors")


def read(manifest: LogVectorsManifest) -> tuple[np.ndarray, np.ndarray]:
    return np.load(manifest.vectors_path), np.load(manifest.vector_row_path)


@pytest.mark.parametrize(
    ("user_exponent", "item_exponent", "power"), [(0.5, 0.5, 0.0), (0.5, 0.5, 0.5), (0.4, 0.3, 0.5), (0.0, 1.0, 1.0)]
)
def test_spectral_vectors_are_the_weighted_singular_vectors_of_the_training_events(
    user_exponent: float, item_exponent: float, power: float, tmp_path: Path
) -> None:
    train = training_events()
    config = SpectralVectorsConfig(dim=4, user_exponent=user_exponent, item_exponent=item_exponent, singular_power=power)
    manifest = embed(tmp_path, config, train=train)
    vector_VD, vector_row_I = read(manifest)
    dense_UI = np.zeros((NUM_USERS, NUM_ITEMS))
    for user, items in enumerate(train):
        dense_UI[user, items] = 1
    user_power, item_power = dense_UI.sum(axis=1) ** user_exponent, np.maximum(dense_UI.sum(axis=0), 1) ** item_exponent
    _, values, vectors = np.linalg.svd(dense_UI / item_power / user_power[:, None], full_matrices=False)
    expected_ID = vectors[:4].T * values[:4] ** power
    warm_items = np.flatnonzero(vector_row_I >= 0)
    assert warm_items.tolist() == [item for item in range(NUM_ITEMS) if item != COLD_ITEM]
    vector_ID = vector_VD[vector_row_I[warm_items]]
    np.testing.assert_allclose(
        vector_ID @ vector_ID.T, (expected_ID @ expected_ID.T)[np.ix_(warm_items, warm_items)], atol=1e-4
    )
    assert (manifest.num_vectors, manifest.dim) == (NUM_ITEMS - 1, 4)


def test_ease_vectors_are_those_of_the_matrix_of_the_training_events(tmp_path: Path) -> None:
    train = training_events()
    vector_VD, vector_row_I = read(embed(tmp_path, EaseVectorsConfig(dim=4, l2=2.0), train=train))
    items = JaggedArray.from_lengths(np.array([len(row) for row in train]), np.concatenate(train))
    warm_items = np.flatnonzero(vector_row_I >= 0)
    expected_VD = ease_vectors(user_item_matrix(items, num_items=NUM_ITEMS)[:, warm_items], l2=2.0, dim=4)
    np.testing.assert_allclose(vector_VD[vector_row_I[warm_items]], expected_VD, atol=1e-5)


def test_ials_vectors_solve_the_normal_equations(tmp_path: Path) -> None:
    train = training_events()
    manifest = embed(tmp_path, IalsVectorsConfig(dim=4, l2=0.5, alpha=5.0, iterations=300), train=train)
    vector_VD, vector_row_I = read(manifest)
    items = JaggedArray.from_lengths(np.array([len(row) for row in train]), np.concatenate(train))
    matrix_UV = user_item_matrix(items, num_items=NUM_ITEMS)[:, np.flatnonzero(vector_row_I >= 0)].toarray()
    factor_VD = vector_VD[vector_row_I[vector_row_I >= 0]]
    user_UD = _least_squares(matrix_UV, factor_VD, l2=0.5, alpha=5.0)
    np.testing.assert_allclose(_least_squares(matrix_UV.T, user_UD, l2=0.5, alpha=5.0), factor_VD, rtol=0.02, atol=0.02)


def _least_squares(matrix_RC: np.ndarray, factor_CD: np.ndarray, *, l2: float, alpha: float) -> np.ndarray:
    """Return the factors of the rows that minimise the squared errors; a pair with events has the weight `alpha`."""
    weight_RC = np.where(matrix_RC > 0, alpha, 1.0)
    ridge = l2 * np.eye(factor_CD.shape[1])
    return np.stack(
        [
            np.linalg.solve(factor_CD.T @ (weight_C[:, None] * factor_CD) + ridge, factor_CD.T @ (weight_C * value_C))
            for weight_C, value_C in zip(weight_RC, matrix_RC, strict=True)
        ]
    )


def test_ials_without_its_library_is_refused_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r'needs the library implicit; install nightjar with the extra ials, e.g. pip install "'
    ):
        embed(tmp_path, IalsVectorsConfig(dim=4), train=training_events())
    assert not (tmp_path / "log_vectors").exists()


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    config=st.sampled_from([SpectralVectorsConfig(dim=4), EaseVectorsConfig(dim=4), IalsVectorsConfig(dim=4, iterations=3)]),
)
def test_held_out_events_do_not_change_the_vectors(
    seed: int, config: LogVectorsConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random, train = np.random.default_rng(seed), training_events()
    held_out = [[random.integers(0, NUM_ITEMS, random.integers(0, 4)).tolist() for _ in train] for _ in range(2)]
    first_vectors = read(embed(tmp_path_factory.mktemp("first"), config, train=train))
    second_vectors = read(
        embed(tmp_path_factory.mktemp("second"), config, train=train, validation=held_out[0], test=held_out[1])
    )
    for first_array, second_array in zip(first_vectors, second_vectors, strict=True):
        np.testing.assert_array_equal(first_array, second_array)


def test_a_changed_training_event_changes_the_vectors(tmp_path: Path) -> None:
    train = training_events()
    first_vectors = read(embed(tmp_path / "first", SpectralVectorsConfig(dim=4), train=train))
    train[0] = [0, 1, 2]
    second_vectors = read(embed(tmp_path / "second", SpectralVectorsConfig(dim=4), train=train))
    assert not np.allclose(np.abs(first_vectors[0]), np.abs(second_vectors[0]))


def test_a_completed_stage_is_reused_until_a_setting_changes(tmp_path: Path) -> None:
    interactions = interactions_stage(
        tmp_path / "interactions",
        train=training_events(),
        validation=[[]] * NUM_USERS,
        test=[[]] * NUM_USERS,
        num_items=NUM_ITEMS,
    )
    folder = tmp_path / "log_vectors"
    first_vectors = embed_log(SpectralVectorsConfig(dim=4), interactions=interactions, folder=folder)
    assert embed_log(SpectralVectorsConfig(dim=4, memory_gb=1), interactions=interactions, folder=folder) == first_vectors
    assert embed_log(SpectralVectorsConfig(dim=8), interactions=interactions, folder=folder).dim == 8


def test_more_dimensions_than_items_with_events_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"embeddings\.dim is 20, but only 19 items have training events.*at most 16"):
        embed(tmp_path, EaseVectorsConfig(dim=20), train=training_events())
    assert not (tmp_path / "log_vectors").exists()


def test_more_dimensions_than_users_with_events_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"embeddings\.dim is 8, but only 6 users have training events.*at most 4"):
        embed(tmp_path, SpectralVectorsConfig(dim=8), train=training_events()[:6])


def test_with_too_few_users_for_any_width_the_error_advises_more_events(tmp_path: Path) -> None:
    text = r"only 4 users have training events, which give at most 3 dimensions; add events, or remove the entry"
    with pytest.raises(InputError, match=text):
        embed(tmp_path, SpectralVectorsConfig(dim=4), train=training_events()[:4])


def test_a_matrix_above_the_memory_limit_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    text = r"memory_gb is 1e-06, but method ease needs 4.33e-06 GB \(three matrices of 19 x 19 items\).*set method to spectral"
    with pytest.raises(InputError, match=text):
        embed(tmp_path, EaseVectorsConfig(dim=4, memory_gb=1e-6), train=training_events())
    with pytest.raises(
        InputError, match=r"method spectral needs .* 9 vectors of 19 items\); raise memory_gb, or lower embeddings.dim"
    ):
        embed(tmp_path / "spectral", SpectralVectorsConfig(dim=4, memory_gb=1e-6), train=training_events())


def test_a_log_without_a_training_event_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="source is log, but the log has no training event"):
        embed(tmp_path, SpectralVectorsConfig(dim=4), train=[[]] * NUM_USERS)
