"""Exported query towers, compared with the served tower, also in processes that do not import this project."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from flows.settings.pipeline import PipelineConfig
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import InputError, StageError
from recsys_core.models import config as model_config
from recsys_core.models.config import PackageConfig
from recsys_core.models.history import make_encoder
from recsys_core.models.history_config import AttentionHistory, HistoryConfig, HistorySettings
from recsys_core.serving.contents import open_contents
from recsys_core.serving.description import PackageDescription, export_name
from recsys_core.serving.exports import export
from recsys_core.serving.exports.padded_tower import PaddedQueryTower, _pool_history, padded_inputs
from recsys_core.serving.given_features import GivenFeature
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.refresh.small_pipeline import build_pipeline
from tests.recsys_core.serving.conftest import (
    CONTEXT_FEATURES,
    USER_FEATURES,
    ExportedModel,
    query_tower_of,
    small_model_config,
)

PT2_SCRIPT = """
import sys, json, torch
vectors_by_file = {}
for path, batches in json.load(open(sys.argv[1])).items():
    query = torch.export.load(path).module()
    vectors_by_file[path] = [
        query({name: torch.tensor(values, dtype=getattr(torch, dtype)) for name, (dtype, values) in inputs.items()}).tolist()
        for inputs in batches
    ]
print(json.dumps(vectors_by_file))
assert not {name for name in sys.modules if name.startswith(("recsys_core", "tasks", "flows", "torchrec"))}
"""
"""Print the query vectors of exported programs. The argument is a JSON file with the inputs of each program."""
ONNX_SCRIPT = """
import sys, json, numpy, onnxruntime
vectors_by_file = {}
for path, batches in json.load(open(sys.argv[1])).items():
    session = onnxruntime.InferenceSession(path)
    vectors_by_file[path] = [
        session.run(["query"], {name: numpy.array(values, dtype=dtype) for name, (dtype, values) in inputs.items()})[0].tolist()
        for inputs in batches
    ]
print(json.dumps(vectors_by_file))
assert not {name for name in sys.modules if name.startswith(("recsys_core", "tasks", "flows", "torch"))}
"""
MODEL_SETTINGS: list[dict[str, Any]] = [
    {"history": {"pooling": "mean"}, "features": (*USER_FEATURES, *CONTEXT_FEATURES), "learn_user_embedding": True},
    {
        "history": {"pooling": "recency", "last_item_feature": False},
        "similarity": "dot",
        "quantization": "int4",
        "popularity": {"kind": "learned"},
    },
    {"history": {"pooling": "self_attention", "num_heads": 2, "recency_residual": True}},
    {"num_members": 2, "features": USER_FEATURES},
]


def queries_for(exported_model: ExportedModel) -> tuple[np.ndarray, JaggedArray, dict[str, GivenFeature]]:
    """Return user rows, histories and context features of six queries.

    Some users are unknown. The histories have 0 to 9 items, and the model reads 6.
    """
    random = np.random.default_rng(3)
    history_length_B = np.array([0, 1, 3, 9, 0, 6])
    user_row_B = np.array([0, 1, 2, 39, -1, -1])
    histories = JaggedArray.from_lengths(history_length_B, random.integers(0, 300, history_length_B.sum()))
    is_given_B = np.array([True, False, True, True, False, True])
    weights_by_key = {"context.single": None, "context.number": random.normal(size=4).astype(np.float32)}
    given_features = {
        key: GivenFeature(is_given_B, JaggedArray.from_lengths(is_given_B, random.integers(0, 6, 4)), weights)
        for key, weights in weights_by_key.items()
        if key in exported_model.tables
    }
    return user_row_B, histories, given_features


@pytest.mark.parametrize("features", [(), (*USER_FEATURES, *CONTEXT_FEATURES)], ids=["no features", "all features"])
@pytest.mark.parametrize("pooling", ["mean", "sum", "recency", "attention", "self_attention"])
@pytest.mark.parametrize(
    "model_settings",
    [
        {},
        {"similarity": "dot", "layers": ()},
        {"learn_user_embedding": True, "history": {"last_item_feature": False}, "popularity": {"kind": "learned"}},
        {"history": {"item_representation": "candidate_tower"}},
        {"num_members": 2, "history": {"item_representation": "candidate_tower"}, "learn_user_embedding": True},
    ],
)
@pytest.mark.parametrize("quantization", ["fp32", "int8", "int4"])
def test_the_padded_tower_gives_the_vectors_of_the_served_tower(
    pooling: str, model_settings: dict[str, Any], features: tuple[str, ...], quantization: str
) -> None:
    history_settings = {"pooling": pooling} | model_settings.get("history", {})
    exported_model = ExportedModel(small_model_config(**(model_settings | {"history": history_settings})), features=features)
    tower = query_tower_of(exported_model, quantization=quantization)
    user_row_B, histories, given_features = queries_for(exported_model)
    expected_BD = tower(user_row_B, histories, features=exported_model.user_features, given_features=given_features).numpy()
    inputs = padded_inputs(tower, user_row_B, histories, features=exported_model.user_features, given_features=given_features)
    padded_BD = PaddedQueryTower(tower)({name: torch.from_numpy(values) for name, values in inputs.items()})
    np.testing.assert_allclose(padded_BD.detach().numpy(), expected_BD, rtol=1e-5, atol=1e-5)


def test_the_padding_of_a_history_may_be_on_either_side_and_have_any_value() -> None:
    exported_model = ExportedModel(small_model_config(history={"pooling": "recency"}))
    tower = PaddedQueryTower(query_tower_of(exported_model))
    right_padded = {"history": torch.tensor([[4, 9, 2, -1, -1, -1]]), "history_mask": torch.tensor([[1, 1, 1, 0, 0, 0]]).bool()}
    left_padded = {
        "history": torch.tensor([[777777, 0, 0, 4, 9, 2]]),
        "history_mask": torch.tensor([[0, 0, 0, 1, 1, 1]]).bool(),
    }
    torch.testing.assert_close(tower(left_padded), tower(right_padded))


def served_batches(
    exported_model: ExportedModel, package_folder: Path
) -> tuple[list[dict[str, tuple[str, Any]]], list[np.ndarray]]:
    """Return the inputs of two batches for an exported file, and the query vectors of the served tower for them.

    The first batch has all queries, and the second batch has a single query. An input is a type and a nested list, such as
    `("int64", [[3, 5]])`.
    """
    contents = open_contents(
        package_folder, PackageDescription.model_validate_json((package_folder / "package.json").read_bytes())
    )
    user_row_B, histories, given_features = queries_for(exported_model)
    batches, served_vectors = [], []
    for query_indices in (np.arange(6), np.array([3])):
        users_and_histories = (user_row_B[query_indices], histories.take(query_indices))
        features = {
            "features": contents.users.features,
            "given_features": {key: feature.take(query_indices) for key, feature in given_features.items()},
        }
        served_vectors.append(contents.tower(*users_and_histories, **features).numpy())
        inputs = padded_inputs(contents.tower, *users_and_histories, **features)
        batches.append({name: (str(values.dtype), values.tolist()) for name, values in inputs.items()})
    return batches, served_vectors


def test_exported_files_give_the_served_vectors_in_a_process_without_nightjar(
    build_packaged_model: Callable[..., Any], tmp_path: Path
) -> None:
    batches_by_folder: dict[Path, list[dict[str, tuple[str, Any]]]] = {}
    served_vectors_by_folder: dict[Path, list[np.ndarray]] = {}
    for model_settings in MODEL_SETTINGS:
        exported_model, package = build_packaged_model(exports=("pt2", "onnx"), **model_settings)
        assert Retriever.load(package.folder).package.exports == ("pt2", "onnx")
        folder = package.folder / "package"
        batches_by_folder[folder], served_vectors_by_folder[folder] = served_batches(exported_model, folder)
    for script, name in ((PT2_SCRIPT, "query.pt2"), (ONNX_SCRIPT, "query.onnx")):
        batches_by_file = {str(folder / name): batches for folder, batches in batches_by_folder.items()}
        (tmp_path / "inputs.json").write_text(json.dumps(batches_by_file))
        # One process for all models, because the imports take longer than the models.
        command = [sys.executable, "-I", "-c", script, str(tmp_path / "inputs.json")]
        script_process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert script_process.returncode == 0, script_process.stderr[-2000:]
        vectors_by_file = json.loads(script_process.stdout)
        for model_settings, (folder, served_vectors) in zip(MODEL_SETTINGS, served_vectors_by_folder.items(), strict=True):
            for vectors, expected in zip(vectors_by_file[str(folder / name)], served_vectors, strict=True):
                np.testing.assert_allclose(vectors, expected, atol=1e-5, err_msg=f"{name} of {model_settings}")


def test_a_pt2_file_contains_no_pickle(build_packaged_model: Callable[..., Any]) -> None:
    _, package = build_packaged_model(exports=("pt2",), quantization="int8", history={"pooling": "attention"})
    with zipfile.ZipFile(package.folder / "package" / "query.pt2") as archive:
        tensors = json.loads(archive.read("query/data/weights/model_weights_config.json"))["config"]
        assert {tensor["use_pickle"] for tensor in tensors.values()} == {False}
        assert json.loads(archive.read("query/data/constants/model_constants_config.json"))["config"] == {}
        assert archive.read("query/data/sample_inputs/model.pt") == b""


def test_an_export_that_gives_other_vectors_stops_the_stage_with_the_name_of_its_file(
    build_packaged_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_pt2 = export._load_pt2
    monkeypatch.setattr(export, "_load_pt2", lambda path: lambda inputs: load_pt2(path)(inputs) + 1e-3)
    with pytest.raises(StageError, match=r"query.pt2: .* differ by 0.001.* leave pt2 out of package.exports"):
        build_packaged_model(exports=("pt2",), history={"pooling": "sum"})


def test_tables_that_are_too_large_for_onnx_stop_the_stage(
    build_packaged_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_ONNX_BYTES", 100)
    with pytest.raises(StageError, match=r"but an ONNX file holds 100; leave out onnx, or set package.quantization"):
        build_packaged_model(exports=("onnx",))


def test_exactly_the_histories_that_are_marked_as_exportable_have_a_padded_form() -> None:
    for history_class in get_args(get_args(HistoryConfig)[0]):
        history: HistorySettings = history_class(length=3)
        encoder = make_encoder(history, dim=4, std=1.0)
        items, mask = torch.randn(2, 3, 4), torch.tensor([[True, True, False], [False, False, False]])
        if history.has_padded_form:
            num_newer_items = torch.tensor([[1, 0, 0], [0, 0, 0]])
            assert _pool_history(encoder, items, mask, num_newer_items).shape == (2, 4)
        else:
            with pytest.raises(NotImplementedError):
                _pool_history(encoder, items, mask, torch.zeros(2, 3, dtype=torch.int64))


def test_a_config_that_exports_a_pooling_without_a_padded_form_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionHistory, "has_padded_form", False)
    interactions = {"paths": "log.parquet", "timestamp_column": "t"}
    settings = {"interactions": interactions, "model": {"history": {"pooling": "attention"}}}
    PipelineConfig.model_validate(settings)
    with pytest.raises(ValueError, match=r"package.exports is pt2, but model.history.pooling attention cannot be exported"):
        PipelineConfig.model_validate(settings | {"package": {"exports": ["pt2"]}})


def test_an_error_about_missing_libraries_names_them_and_the_extra_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "find_spec", lambda library: None)
    PackageConfig(exports=("pt2",)).require_libraries()
    with pytest.raises(InputError, match="needs onnx, onnxscript; install nightjar with the extra onnx"):
        PackageConfig(exports=("pt2", "onnx")).require_libraries()


def test_a_model_with_a_spectral_block_is_exported(tmp_path: Path) -> None:
    spectral_block = {"dim": 8, "weights": [0.5], "output_dim": 12, "history_length": 20}
    pipeline = build_pipeline(tmp_path, model={"spectral_block": spectral_block}, exports=("pt2",))
    assert [path.name for path in pipeline.package_folder.glob("*.pt2")] == [export_name("pt2")]
