"""Served query towers with quantised tables, compared with the float tower and with FBGEMM."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import StageError
from recsys_core.serving.quantise import IntegerTable, load_tower, make_table, save_tower
from tests.recsys_core.serving.conftest import (
    CONTEXT_FEATURES,
    DIM,
    NUM_ITEMS,
    NUM_USERS,
    USER_FEATURES,
    ExportedModel,
    query_tower_of,
    small_model_config,
)

EMBEDDING_BAG_CONFIG = EmbeddingBagConfig(name="t", num_embeddings=500, embedding_dim=12, feature_names=["f"])

MODEL_SETTINGS_BY_NAME = {
    "history": {},
    "history and user": {"learn_user_embedding": True},
    "user alone": {"learn_user_embedding": True, "history": {"length": 0, "last_item_feature": False}},
    "history without last item, dot": {"history": {"last_item_feature": False}, "similarity": "dot"},
    "no layers": {"layers": ()},
    "recency": {"history": {"pooling": "recency"}},
    "attention over vectors": {"history": {"pooling": "attention", "item_representation": "candidate_tower"}},
    "features of user and event": {"learn_user_embedding": True, "features": (*USER_FEATURES, *CONTEXT_FEATURES)},
}


def _exported_model(*, features: tuple[str, ...] = (), **model_settings: object) -> ExportedModel:
    return ExportedModel(small_model_config(**model_settings), features=features)  # type: ignore[arg-type]


@pytest.mark.parametrize("model_settings", MODEL_SETTINGS_BY_NAME.values(), ids=MODEL_SETTINGS_BY_NAME)
def test_the_served_tower_gives_the_vectors_of_the_float_tower(model_settings: dict, tmp_path: Path) -> None:
    exported_model = _exported_model(**model_settings)
    # All users with their logs, and an unknown user (-1) with and without a history.
    users, histories = [*range(NUM_USERS), -1, -1], [*exported_model.log, [5, 6], []]
    expected_BD = np.stack(
        [exported_model.query_vector(None if user < 0 else user, rows) for user, rows in zip(users, histories, strict=True)]
    )
    user_row_B, history_length_B = np.array(users), np.array([*map(len, histories)])
    history = JaggedArray.from_lengths(history_length_B, np.concatenate(histories).astype(np.int64))
    for quantization in ("fp32", "fp16", "int8", "int4"):
        tower = query_tower_of(exported_model, quantization=quantization)
        save_tower(tower, tmp_path / "tower.safetensors")
        loaded_tower = load_tower(tmp_path / "tower.safetensors", spec=exported_model.spec, quantization=quantization)
        loaded_BD, unsaved_BD = (
            served_tower(user_row_B, history, features=exported_model.user_features).numpy()
            for served_tower in (loaded_tower, tower)
        )
        np.testing.assert_array_equal(loaded_BD, unsaved_BD)
        if quantization.startswith("fp"):
            tolerance = 1e-2 if quantization == "fp16" else 1e-5
            np.testing.assert_allclose(loaded_BD, expected_BD, rtol=10 * tolerance, atol=tolerance)
        else:
            norm_product_B = np.linalg.norm(loaded_BD, axis=1) * np.linalg.norm(expected_BD, axis=1)
            cosine_B = (loaded_BD * expected_BD).sum(axis=1)[norm_product_B > 0] / norm_product_B[norm_product_B > 0]
            assert cosine_B.min() > (0.99 if quantization == "int8" else 0.8)
            assert not np.array_equal(loaded_BD, expected_BD)


def test_an_empty_batch_has_no_query_vectors() -> None:
    exported_model = _exported_model(learn_user_embedding=True, features=USER_FEATURES)
    tower = query_tower_of(exported_model, quantization="int8")
    assert tower(np.zeros(0, np.int64), JaggedArray.empty(0), features=exported_model.user_features).shape == (0, DIM)


def test_int8_rows_equal_the_rows_of_fbgemm() -> None:
    value_RD = np.random.default_rng(3).normal(size=(500, 12)).astype(np.float32)
    value_RD *= np.logspace(-6, 3, 500, dtype=np.float32)[:, None]
    value_RD[:3] = np.array([0, 3.25, 1e-9], np.float32)[:, None]  # rows of equal values
    fbgemm_bags = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=[EMBEDDING_BAG_CONFIG], device=torch.device("cpu"))})
    fbgemm_bags["bags"].embedding_bags["t"].weight.data.copy_(torch.from_numpy(value_RD))
    quantize_embeddings(fbgemm_bags, dtype=torch.qint8, inplace=True)
    every_row = KeyedJaggedTensor(keys=["f"], values=torch.arange(500), lengths=torch.ones(500, dtype=torch.int32))
    quantised_table = IntegerTable(500, 12, num_bits=8)
    quantised_table.fill(value_RD)
    assert torch.equal(quantised_table(torch.arange(500)), fbgemm_bags["bags"](every_row).values())


@pytest.mark.parametrize("dim", [12, 7])
def test_int4_rows_equal_the_rows_of_fbgemm(dim: int) -> None:
    value_RD = np.random.default_rng(3).normal(size=(500, dim)).astype(np.float32)
    value_RD *= np.logspace(-4, 3, 500, dtype=np.float32)[:, None]
    # FBGEMM needs an even number of columns.
    padded_RD = torch.from_numpy(np.pad(value_RD, ((0, 0), (0, dim % 2)), mode="edge"))
    code_RD = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(padded_RD, 4)
    expected_RD = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(code_RD, 4)[:, :dim]
    quantised_table = IntegerTable(500, dim, num_bits=4)
    quantised_table.fill(value_RD)
    assert quantised_table.code.shape == (500, (dim + 1) // 2)
    torch.testing.assert_close(quantised_table(torch.arange(500)), expected_RD, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp16"])
def test_a_row_that_overflows_float16_is_rejected(quantization: Any) -> None:
    value_RD = np.zeros((3, 4), np.float32)
    value_RD[2, 1] = 1e9
    with pytest.raises(StageError, match=r"row 2: values 0 to 1e\+09 do not fit .*; set package.quantization to fp32"):
        make_table(3, 4, quantization=quantization).fill(value_RD)


def test_int8_tables_are_stored_as_bytes(tmp_path: Path) -> None:
    save_tower(query_tower_of(_exported_model(), quantization="int8"), tmp_path / "tower")
    tensors = load_file(tmp_path / "tower")
    code, scale_offset = tensors["tables.history.code"], tensors["tables.history.scale_offset"]
    assert (code.dtype, code.shape) == (torch.uint8, (NUM_ITEMS, DIM))
    assert (scale_offset.dtype, scale_offset.shape) == (torch.float16, (NUM_ITEMS, 2))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dense.tower.layers.0.weight", None, "is missing, but the model expects float32"),
        ("tables.history.code", lambda tensor: tensor.float(), r"is float32 \[300, 16\], but the model expects uint8"),
        (
            "tables.history.code",
            lambda tensor: tensor[1:].clone(),
            r"is uint8 \[299, 16\], but the model expects uint8 \[300, 16\]",
        ),
        ("surplus", lambda _: torch.zeros(1), r"is float32 \[1\], but the model expects no such tensor"),
    ],
)
def test_an_error_about_a_tensor_that_does_not_fit_the_model_names_it(
    tmp_path: Path, name: str, change: Callable[[torch.Tensor | None], torch.Tensor] | None, message: str
) -> None:
    save_tower(query_tower_of(_exported_model(), quantization="int8"), tmp_path / "tower")
    tensors = load_file(tmp_path / "tower")
    tensor = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(tensor)
    save_file(tensors, tmp_path / "changed")
    with pytest.raises(StageError, match=f"changed: tensor {name} {message}"):
        load_tower(tmp_path / "changed", spec=_exported_model().spec, quantization="int8")
