"""Rotation of vectors onto the champion's rows."""

import numpy as np
import pytest

from recsys_core.training.warm.warm_start import rotation_onto_champion


@pytest.mark.parametrize("seed", range(3))
def test_rotated_vectors_are_rotated_back_to_the_rows_of_the_champion(seed: int) -> None:
    random = np.random.default_rng(seed)
    unrotated_ID = random.normal(size=(30, 5)).astype(np.float32)
    random_rotation_DD = np.linalg.qr(random.normal(size=(5, 5)))[0].astype(np.float32)
    vector_row_I = np.concatenate([random.permutation(25), np.full(5, -1)])
    vector_VD = np.empty((25, 5), np.float32)
    vector_VD[vector_row_I[:25]] = unrotated_ID[:25] @ random_rotation_DD
    champion_row_I = np.where(np.arange(30) < 20, np.arange(30)[::-1], -1)  # items 20 and later are new
    champion_RD = np.zeros((30, 5), np.float32)
    champion_RD[champion_row_I[:20]] = 7 * unrotated_ID[:20]  # the rows may have other norms
    rotation_DD = rotation_onto_champion(
        vector_VD, vector_row_T=vector_row_I, champion_row_T=champion_row_I, champion_RD=champion_RD
    )
    rotated_VD = vector_VD @ rotation_DD
    np.testing.assert_allclose(rotated_VD[vector_row_I[:25]], unrotated_ID[:25], atol=1e-4)


def test_without_a_common_item_the_vectors_keep_their_inner_products() -> None:
    vector_VD = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    no_champion_row_I = np.full(4, -1)
    rotation_DD = rotation_onto_champion(
        vector_VD, vector_row_T=np.arange(4), champion_row_T=no_champion_row_I, champion_RD=vector_VD
    )
    rotated_VD = vector_VD @ rotation_DD
    np.testing.assert_allclose(rotated_VD @ rotated_VD.T, vector_VD @ vector_VD.T, atol=1e-5)
