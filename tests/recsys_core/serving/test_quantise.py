from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from recsys_core.data.lists import Lists
from recsys_core.models.config import TwoTowerConfig
from recsys_core.serving.quantise import build_tower, load_tower, save_tower
from tests.recsys_core.serving.conftest import ITEMS, USERS, World

SHAPES = {
    "history": {},
    "history and user": {"user_id": True},
    "user alone": {"user_id": True, "max_history": 0, "last_item": False},
    "history without last item, dot": {"last_item": False, "similarity": "dot"},
    "no layers": {"query_layers": ()},
}


def _world(model: dict) -> World:
    return World(TwoTowerConfig(**{"embedding_dim": 16, "query_layers": (24, 16), "max_history": 6, "dropout": 0.5, **model}))


def _asked(world: World) -> tuple[torch.Tensor, Lists, np.ndarray]:
    """Every user with its log, then an unknown one with a history, and one with nothing."""
    users, histories = [*range(USERS), -1, -1], [*world.log, [5, 6], []]
    offset = np.cumsum([0, *map(len, histories)])
    expected = [world.query(None if user < 0 else user, rows) for user, rows in zip(users, histories, strict=True)]
    return torch.tensor(users), Lists(offset, np.concatenate(histories).astype(np.int64)), np.stack(expected)


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_the_served_tower_gives_the_vectors_of_the_float_tower(model: dict, tmp_path: Path) -> None:
    world = _world(model)
    users, histories, expected = _asked(world)
    for quantization in ("none", "int8"):
        tower = build_tower(world.spec, tables=world.tables, dense=world.towers.state_dict(), quantization=quantization)
        save_tower(tower, tmp_path / "tower.safetensors")
        loaded = load_tower(tmp_path / "tower.safetensors", spec=world.spec, quantization=quantization)
        served = loaded(users, histories).numpy()
        np.testing.assert_array_equal(served, tower(users, histories).numpy())
        if quantization == "none":
            np.testing.assert_allclose(served, expected, rtol=1e-4, atol=1e-5)
        else:
            norms = np.linalg.norm(served, axis=1) * np.linalg.norm(expected, axis=1)
            cosine = (served * expected).sum(axis=1)[norms > 0] / norms[norms > 0]
            assert cosine.min() > 0.99
            assert not np.array_equal(served, expected)


def test_int8_tables_are_bytes_on_disk(tmp_path: Path) -> None:
    world = _world({})
    save_tower(
        build_tower(world.spec, tables=world.tables, dense=world.towers.state_dict(), quantization="int8"), tmp_path / "tower"
    )
    table = load_file(tmp_path / "tower")["tables.embedding_bags.item.weight"]
    assert table.dtype == torch.uint8
    assert table.shape == (ITEMS, 32)  # 16 codes, scale and offset in 4 bytes, rounded up to 16


def test_a_missing_layer_is_an_error(tmp_path: Path) -> None:
    world = _world({})
    save_tower(
        build_tower(world.spec, tables=world.tables, dense=world.towers.state_dict(), quantization="int8"), tmp_path / "tower"
    )
    tensors = load_file(tmp_path / "tower")
    del tensors["dense.query_mlp.0.weight"]
    save_file(tensors, tmp_path / "less")
    with pytest.raises(RuntimeError, match="query_mlp"):
        load_tower(tmp_path / "less", spec=world.spec, quantization="int8")
