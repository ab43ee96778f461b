from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from recsys_core.data.lists import Lists
from recsys_core.serving.quantise import QueryTower, build_tower, load_tower, save_tower
from tests.recsys_core.serving.conftest import CONTEXT_FEATURES, ITEMS, USER_FEATURES, USERS, World, config_of

SHAPES = {
    "history": {},
    "history and user": {"user_id": True},
    "user alone": {"user_id": True, "history": {"length": 0, "last_item": False}},
    "history without last item, dot": {"history": {"last_item": False}, "similarity": "dot"},
    "no layers": {"layers": ()},
    "recency": {"history": {"pooling": "recency"}},
    "attention over vectors": {"history": {"pooling": "attention", "items": "vector"}},
    "features of user and event": {"user_id": True, "features": (*USER_FEATURES, *CONTEXT_FEATURES)},
}


def _world(*, features: tuple[str, ...] = (), **model: object) -> World:
    return World(config_of(**model), features=features)  # type: ignore[arg-type]


def _tower(world: World, quantization: str) -> QueryTower:
    return build_tower(
        world.spec,
        history_items=world.history_items,
        tables=world.query_tables,
        dense=world.towers.state_dict(),
        quantization=quantization,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_the_served_tower_gives_the_vectors_of_the_float_tower(model: dict, tmp_path: Path) -> None:
    world = _world(**model)
    # Every user with its log, then an unknown one with a history, and one with nothing.
    users, histories = [*range(USERS), -1, -1], [*world.log, [5, 6], []]
    expected = np.stack([world.query(None if user < 0 else user, rows) for user, rows in zip(users, histories, strict=True)])
    asked = world.questions.batch(
        np.array(users), Lists.of_lengths(np.array([*map(len, histories)]), np.concatenate(histories).astype(np.int64))
    )
    for quantization in ("none", "int8"):
        tower = _tower(world, quantization)
        save_tower(tower, tmp_path / "tower.safetensors")
        loaded = load_tower(tmp_path / "tower.safetensors", spec=world.spec, quantization=quantization)
        served = loaded(asked).numpy()
        np.testing.assert_array_equal(served, tower(asked).numpy())
        if quantization == "none":
            np.testing.assert_allclose(served, expected, rtol=1e-4, atol=1e-5)
        else:
            norms = np.linalg.norm(served, axis=1) * np.linalg.norm(expected, axis=1)
            cosine = (served * expected).sum(axis=1)[norms > 0] / norms[norms > 0]
            assert cosine.min() > 0.99
            assert not np.array_equal(served, expected)


def test_nobody_asked_is_nothing_answered() -> None:
    world = _world(user_id=True, features=USER_FEATURES)
    asked = world.questions.batch(np.zeros(0, np.int64), Lists.empty(0))
    assert _tower(world, "int8")(asked).shape == (0, 16)


def test_int8_tables_are_bytes_on_disk(tmp_path: Path) -> None:
    world = _world()
    save_tower(_tower(world, "int8"), tmp_path / "tower")
    table = load_file(tmp_path / "tower")["tables.history.embedding_bags.item.weight"]
    assert table.dtype == torch.uint8
    assert table.shape == (ITEMS, 32)  # 16 codes, scale and offset in 4 bytes, rounded up to 16


def test_a_missing_layer_is_an_error(tmp_path: Path) -> None:
    save_tower(_tower(_world(), "int8"), tmp_path / "tower")
    tensors = load_file(tmp_path / "tower")
    del tensors["dense.tower.layers.0.weight"]
    save_file(tensors, tmp_path / "less")
    with pytest.raises(RuntimeError, match=r"tower.layers.0.weight"):
        load_tower(tmp_path / "less", spec=_world().spec, quantization="int8")
