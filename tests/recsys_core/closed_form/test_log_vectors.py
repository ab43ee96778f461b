"""Item vectors from the log, compared with dense computations. Reused stages, and errors for bad input."""

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
from tests.recsys_core.evaluation.stage_folders import Events, write_interactions_stage

NUM_USERS, NUM_ITEMS, COLD_ITEM = 40, 20, 13


def training_events() -> list[list[int]]:
    """Return the item rows of each user, without the cold item."""
    rng = np.random.default_rng(0)
    warm_items = np.delete(np.arange(NUM_ITEMS), COLD_ITEM)
    return [rng.choice(warm_items, rng.integers(2, 9), replace=False).tolist() for _ in range(NUM_USERS)]


def embed_training_log(
    folder: Path,
    config: LogVectorsConfig,
    *,
    train: Events,
    validation: Events | None = None,
    test: Events | None = None,
) -> LogVectorsManifest:
    """Embed the items of a log. By default, the held-out events of each user are events of the cold item."""
    held_out_events: Events = [[COLD_ITEM]] * len(train)
    interactions = write_interactions_stage(
        folder / "interactions",
        train=train,
        validation=validation or held_out_events,
        test=test or held_out_events,
        num_items=NUM_ITEMS,
    )
    return embed_log(config, interactions=interactions, folder=folder / "log_vectors")


def read_vectors(manifest: LogVectorsManifest) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors, and the vector row of each item: -1 for an item without a vector."""
    return np.load(manifest.vectors_path), np.load(manifest.vector_row_path)


@pytest.mark.parametrize(
    ("user_exponent", "item_exponent", "singular_power"), [(0.5, 0.5, 0.0), (0.5, 0.5, 0.5), (0.4, 0.3, 0.5), (0.0, 1.0, 1.0)]
)
def test_spectral_vectors_are_the_weighted_singular_vectors_of_the_training_events(
    user_exponent: float, item_exponent: float, singular_power: float, tmp_path: Path
) -> None:
    train = training_events()
    config = SpectralVectorsConfig(
        dim=4, user_exponent=user_exponent, item_exponent=item_exponent, singular_power=singular_power
    )
    manifest = embed_training_log(tmp_path, config, train=train)
    vector_VD, vector_row_I = read_vectors(manifest)
    dense_UI = np.zeros((NUM_USERS, NUM_ITEMS))
    for user, items in enumerate(train):
        dense_UI[user, items] = 1
    user_scale_U, item_scale_I = dense_UI.sum(axis=1) ** user_exponent, np.maximum(dense_UI.sum(axis=0), 1) ** item_exponent
    _, singular_value_D, singular_vector_DI = np.linalg.svd(
        dense_UI / item_scale_I / user_scale_U[:, None], full_matrices=False
    )
    expected_ID = singular_vector_DI[:4].T * singular_value_D[:4] ** singular_power
    warm_items = np.flatnonzero(vector_row_I >= 0)
    assert warm_items.tolist() == [item for item in range(NUM_ITEMS) if item != COLD_ITEM]
    vector_ID = vector_VD[vector_row_I[warm_items]]
    np.testing.assert_allclose(
        vector_ID @ vector_ID.T, (expected_ID @ expected_ID.T)[np.ix_(warm_items, warm_items)], atol=1e-4
    )
    assert (manifest.num_vectors, manifest.dim) == (NUM_ITEMS - 1, 4)


def test_ease_vectors_are_computed_from_the_matrix_of_the_training_events(tmp_path: Path) -> None:
    train = training_events()
    vector_VD, vector_row_I = read_vectors(embed_training_log(tmp_path, EaseVectorsConfig(dim=4, l2=2.0), train=train))
    train_items = JaggedArray.from_lengths(np.array([len(user_items) for user_items in train]), np.concatenate(train))
    warm_items = np.flatnonzero(vector_row_I >= 0)
    expected_VD = ease_vectors(user_item_matrix(train_items, num_items=NUM_ITEMS)[:, warm_items], l2=2.0, dim=4)
    np.testing.assert_allclose(vector_VD[vector_row_I[warm_items]], expected_VD, atol=1e-5)


def test_ease_is_rejected_if_no_user_has_two_items(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none of the 10 users has training events with two items.*add events"):
        embed_training_log(tmp_path, EaseVectorsConfig(dim=4), train=[[item] for item in range(10)])


def test_ials_vectors_solve_the_normal_equations(tmp_path: Path) -> None:
    train = training_events()
    manifest = embed_training_log(tmp_path, IalsVectorsConfig(dim=4, l2=0.5, alpha=5.0, iterations=300), train=train)
    vector_VD, vector_row_I = read_vectors(manifest)
    train_items = JaggedArray.from_lengths(np.array([len(user_items) for user_items in train]), np.concatenate(train))
    matrix_UV = user_item_matrix(train_items, num_items=NUM_ITEMS)[:, np.flatnonzero(vector_row_I >= 0)].toarray()
    factor_VD = vector_VD[vector_row_I[vector_row_I >= 0]]
    user_UD = _least_squares(matrix_UV, factor_VD, l2=0.5, alpha=5.0)
    np.testing.assert_allclose(_least_squares(matrix_UV.T, user_UD, l2=0.5, alpha=5.0), factor_VD, rtol=0.02, atol=0.02)


def _least_squares(matrix_RC: np.ndarray, factor_CD: np.ndarray, *, l2: float, alpha: float) -> np.ndarray:
    """Return, for each row, the factor with the smallest squared error. Entries with events weigh `alpha`, all others 1."""
    weight_RC = np.where(matrix_RC > 0, alpha, 1.0)
    ridge = l2 * np.eye(factor_CD.shape[1])
    return np.stack(
        [
            np.linalg.solve(factor_CD.T @ (weight_C[:, None] * factor_CD) + ridge, factor_CD.T @ (weight_C * value_C))
            for weight_C, value_C in zip(weight_RC, matrix_RC, strict=True)
        ]
    )


def test_an_error_about_the_missing_library_of_ials_names_the_extra_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r'needs the library implicit; install nightjar with the extra ials, e.g. pip install "'
    ):
        embed_training_log(tmp_path, IalsVectorsConfig(dim=4), train=training_events())
    assert not (tmp_path / "log_vectors").exists()


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**16),
    config=st.sampled_from([SpectralVectorsConfig(dim=4), EaseVectorsConfig(dim=4), IalsVectorsConfig(dim=4, iterations=3)]),
)
def test_held_out_events_do_not_change_the_vectors(
    seed: int, config: LogVectorsConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng, train = np.random.default_rng(seed), training_events()
    validation, test = (
        [rng.integers(0, NUM_ITEMS, rng.integers(0, 4)).tolist() for _ in train] for _ in ("validation", "test")
    )
    expected_manifest = embed_training_log(tmp_path_factory.mktemp("expected"), config, train=train)
    manifest = embed_training_log(tmp_path_factory.mktemp("changed"), config, train=train, validation=validation, test=test)
    for array, expected_array in zip(read_vectors(manifest), read_vectors(expected_manifest), strict=True):
        np.testing.assert_array_equal(array, expected_array)


def test_a_changed_training_event_changes_the_vectors(tmp_path: Path) -> None:
    train = training_events()
    vector_VD, _ = read_vectors(embed_training_log(tmp_path / "first", SpectralVectorsConfig(dim=4), train=train))
    train[0] = [0, 1, 2]
    changed_vector_VD, _ = read_vectors(embed_training_log(tmp_path / "second", SpectralVectorsConfig(dim=4), train=train))
    assert not np.allclose(np.abs(vector_VD), np.abs(changed_vector_VD))  # the sign of a singular vector is arbitrary


def test_a_completed_stage_is_reused_until_a_setting_of_its_vectors_changes(tmp_path: Path) -> None:
    interactions = write_interactions_stage(
        tmp_path / "interactions",
        train=training_events(),
        validation=[[]] * NUM_USERS,
        test=[[]] * NUM_USERS,
        num_items=NUM_ITEMS,
    )
    folder = tmp_path / "log_vectors"
    manifest = embed_log(SpectralVectorsConfig(dim=4), interactions=interactions, folder=folder)
    assert embed_log(SpectralVectorsConfig(dim=4, memory_gb=1), interactions=interactions, folder=folder) == manifest
    assert embed_log(SpectralVectorsConfig(dim=8), interactions=interactions, folder=folder).dim == 8


@pytest.mark.parametrize(
    ("config", "num_users", "message_pattern"),
    [
        (
            EaseVectorsConfig(dim=20),
            NUM_USERS,
            r"embeddings\.dim is 20, but only 19 items have training events.*at most 16",
        ),
        (SpectralVectorsConfig(dim=8), 6, r"embeddings\.dim is 8, but only 6 users have training events.*at most 4"),
        (
            SpectralVectorsConfig(dim=4),
            4,
            r"only 4 users have training events, which give at most 3 dimensions; add events, or remove the entry",
        ),
    ],
    ids=["too few items", "too few users", "too few users for any width"],
)
def test_more_dimensions_than_items_or_users_with_events_are_rejected(
    config: LogVectorsConfig, num_users: int, message_pattern: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message_pattern):
        embed_training_log(tmp_path, config, train=training_events()[:num_users])
    assert not (tmp_path / "log_vectors").exists()


def test_an_error_about_a_matrix_above_the_memory_limit_explains_its_size(tmp_path: Path) -> None:
    message_pattern = (
        r"memory_gb is 1e-06, but method ease needs 4.33e-06 GB \(three matrices of 19 x 19 items\).*set method to spectral"
    )
    with pytest.raises(InputError, match=message_pattern):
        embed_training_log(tmp_path, EaseVectorsConfig(dim=4, memory_gb=1e-6), train=training_events())
    with pytest.raises(
        InputError, match=r"method spectral needs .* 9 vectors of 19 items\); raise memory_gb, or lower embeddings.dim"
    ):
        embed_training_log(tmp_path / "spectral", SpectralVectorsConfig(dim=4, memory_gb=1e-6), train=training_events())


def test_a_log_without_a_training_event_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="source is log, but the log has no training event"):
        embed_training_log(tmp_path, SpectralVectorsConfig(dim=4), train=[[]] * NUM_USERS)
