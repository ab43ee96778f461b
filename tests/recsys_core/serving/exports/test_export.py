"""The exported query tower: in processes without this project, with every form of the model, and files that differ."""

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
from recsys_core.serving.quantise import ServedQueryTower, build_tower
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.refresh.small_pipeline import build_pipeline
from tests.recsys_core.serving.conftest import CONTEXT_FEATURES, USER_FEATURES, ExportedModel, config_of

RUN_PT2 = """
import sys, json, torch
query = torch.export.load(sys.argv[1]).module()
vectors = []
for arrays in json.load(open(sys.argv[2])):
    inputs = {name: torch.tensor(value, dtype=getattr(torch, kind)) for name, (kind, value) in arrays.items()}
    vectors.append(query(inputs).tolist())
print(json.dumps(vectors))
assert not {name for name in sys.modules if name.startswith(("recsys_core", "tasks", "flows", "torchrec"))}
"""
RUN_ONNX = """
import sys, json, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
vectors = []
for arrays in json.load(open(sys.argv[2])):
    inputs = {name: numpy.array(value, dtype=kind) for name, (kind, value) in arrays.items()}
    vectors.append(session.run(["query"], inputs)[0].tolist())
print(json.dumps(vectors))
assert not {name for name in sys.modules if name.startswith(("recsys_core", "tasks", "flows", "torch"))}
"""
MODELS: list[dict[str, Any]] = [
    {"history": {"pooling": "mean"}, "features": (*USER_FEATURES, *CONTEXT_FEATURES), "learn_user_embedding": True},
    {
        "history": {"pooling": "recency", "last_item_feature": False},
        "similarity": "dot",
        "quantization": "int4",
        "popularity": {"kind": "learned"},
    },
    {"history": {"pooling": "self_attention", "num_heads": 2, "recency_residual": True}},
    {"num_members": 3, "features": USER_FEATURES},
]


def queries(exported_model: ExportedModel) -> tuple[np.ndarray, JaggedArray, dict[str, GivenFeature]]:
    """Return known and unknown users, histories from empty to longer than the model reads, and features of the context."""
    random = np.random.default_rng(3)
    length = np.array([0, 1, 3, 9, 0, 6])
    user_row = np.array([0, 1, 2, 39, -1, -1])
    history = JaggedArray.from_lengths(length, random.integers(0, 300, length.sum()))
    is_given = np.array([True, False, True, True, False, True])
    weights = {"context.single": None, "context.number": random.normal(size=4).astype(np.float32)}
    given_features = {
        key: GivenFeature(is_given, JaggedArray.from_lengths(is_given, random.integers(0, 6, 4)), weight)
        for key, weight in weights.items()
        if key in exported_model.tables
    }
    return user_row, history, given_features


def tower_of(exported_model: ExportedModel, *, quantization: Any = "fp32") -> ServedQueryTower:
    return build_tower(
        exported_model.spec,
        history_items=exported_model.history_items,
        tables=exported_model.query_tables,
        dense=exported_model.towers.state_dict(),
        quantization=quantization,
    )


@pytest.mark.parametrize("features", [(), (*USER_FEATURES, *CONTEXT_FEATURES)], ids=["no features", "all features"])
@pytest.mark.parametrize("pooling", ["mean", "sum", "recency", "attention", "self_attention"])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"similarity": "dot", "layers": ()},
        {"learn_user_embedding": True, "history": {"last_item_feature": False}, "popularity": {"kind": "learned"}},
        {"history": {"item_representation": "candidate_tower"}},
        {"num_members": 2, "history": {"item_representation": "candidate_tower"}, "learn_user_embedding": True},
    ],
)
@pytest.mark.parametrize("quantization", ["fp32", "int8", "int4"])
def test_padded_lists_give_the_vectors_of_the_served_tower(
    pooling: str, model: dict[str, Any], features: tuple[str, ...], quantization: str
) -> None:
    history = {"pooling": pooling} | model.get("history", {})
    exported_model = ExportedModel(config_of(**(model | {"history": history})), features=features)
    tower = tower_of(exported_model, quantization=quantization)
    user_row, lists, given_features = queries(exported_model)
    expected = tower(user_row, lists, features=exported_model.user_features, given_features=given_features).numpy()
    inputs = padded_inputs(tower, user_row, lists, features=exported_model.user_features, given_features=given_features)
    actual = PaddedQueryTower(tower)({name: torch.from_numpy(values) for name, values in inputs.items()})
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_padding_may_be_on_either_side_and_have_any_value() -> None:
    exported_model = ExportedModel(config_of(history={"pooling": "recency"}))
    tower = PaddedQueryTower(tower_of(exported_model))
    right = {"history": torch.tensor([[4, 9, 2, -1, -1, -1]]), "history_mask": torch.tensor([[1, 1, 1, 0, 0, 0]]).bool()}
    left = {"history": torch.tensor([[777777, 0, 0, 4, 9, 2]]), "history_mask": torch.tensor([[0, 0, 0, 1, 1, 1]]).bool()}
    torch.testing.assert_close(tower(left), tower(right))


@pytest.mark.parametrize("model", MODELS, ids=["all features", "recency, dot, int4", "self-attention", "ensemble"])
def test_processes_without_this_project_give_the_same_vectors(
    build: Callable[..., Any], model: dict[str, Any], tmp_path: Path
) -> None:
    exported_model, package = build(exports=("pt2", "onnx"), **model)
    folder = package.folder / "package"
    assert Retriever.load(package.folder).package.exports == ("pt2", "onnx")
    description = PackageDescription.model_validate_json((folder / "package.json").read_bytes())
    contents = open_contents(folder, description)
    user_row, lists, given_features = queries(exported_model)
    batches, expected_batches = [], []
    for start, end in ((0, 6), (3, 4)):  # a batch, and a single query
        rows = np.arange(start, end)
        arguments = (user_row[rows], lists.take(rows))
        given_rows = {key: feature.take(rows) for key, feature in given_features.items()}
        expected = contents.tower(*arguments, features=contents.users.features, given_features=given_rows).numpy()
        inputs = padded_inputs(contents.tower, *arguments, features=contents.users.features, given_features=given_rows)
        expected_batches.append(expected)
        batches.append({name: (str(values.dtype), values.tolist()) for name, values in inputs.items()})
    (tmp_path / "inputs.json").write_text(json.dumps(batches))
    for script, name in ((RUN_PT2, "query.pt2"), (RUN_ONNX, "query.onnx")):
        command = [sys.executable, "-I", "-c", script, str(folder / name), str(tmp_path / "inputs.json")]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert result.returncode == 0, result.stderr[-2000:]
        for vectors, expected in zip(json.loads(result.stdout), expected_batches, strict=True):
            np.testing.assert_allclose(vectors, expected, atol=1e-5, err_msg=name)


def test_a_pt2_file_contains_no_pickle(build: Callable[..., Any]) -> None:
    _, package = build(exports=("pt2",), quantization="int8", history={"pooling": "attention"})
    with zipfile.ZipFile(package.folder / "package" / "query.pt2") as archive:
        tensors = json.loads(archive.read("query/data/weights/model_weights_config.json"))["config"]
        assert {tensor["use_pickle"] for tensor in tensors.values()} == {False}
        assert json.loads(archive.read("query/data/constants/model_constants_config.json"))["config"] == {}
        assert archive.read("query/data/sample_inputs/model.pt") == b""


def test_a_file_with_other_vectors_ends_the_stage_by_name(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    load = export._load_pt2
    monkeypatch.setattr(export, "_load_pt2", lambda path: lambda inputs: load(path)(inputs) + 1e-3)
    with pytest.raises(StageError, match=r"query.pt2: .* differ by 0.001.* leave pt2 out of package.exports"):
        build(exports=("pt2",), history={"pooling": "sum"})


def test_tables_that_are_too_large_for_onnx_end_the_stage_by_name(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_ONNX_BYTES", 100)
    with pytest.raises(StageError, match=r"but an ONNX file holds 100; leave out onnx, or set package.quantization"):
        build(exports=("onnx",))


def test_every_history_that_a_config_may_export_has_a_padded_form() -> None:
    for history_class in get_args(get_args(HistoryConfig)[0]):
        history: HistorySettings = history_class(length=3)
        encoder = make_encoder(history, dim=4, std=1.0)
        items, mask = torch.randn(2, 3, 4), torch.tensor([[True, True, False], [False, False, False]])
        if history.has_padded_form:
            assert _pool_history(encoder, items, mask, torch.tensor([[1, 0, 0], [0, 0, 0]])).shape == (2, 4)
        else:
            with pytest.raises(NotImplementedError):
                _pool_history(encoder, items, mask, torch.zeros(2, 3, dtype=torch.int64))


def test_a_pooling_without_a_padded_form_is_rejected_with_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionHistory, "has_padded_form", False)
    log = {"paths": "log.parquet", "timestamp_column": "t"}
    settings = {"interactions": log, "model": {"history": {"pooling": "attention"}}}
    PipelineConfig.model_validate(settings)
    with pytest.raises(ValueError, match=r"package.exports is pt2, but model.history.pooling attention cannot be exported"):
        PipelineConfig.model_validate(settings | {"package": {"exports": ["pt2"]}})


def test_a_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "find_spec", lambda library: None)
    PackageConfig(exports=("pt2",)).require_libraries()
    with pytest.raises(InputError, match="needs onnx, onnxscript; install nightjar with the extra onnx"):
        PackageConfig(exports=("pt2", "onnx")).require_libraries()


def test_a_model_with_a_spectral_block_is_exported(tmp_path: Path) -> None:
    block = {"dim": 8, "weights": [0.5], "output_dim": 12, "history_length": 20}
    pipeline = build_pipeline(tmp_path, model={"spectral_block": block}, exports=("pt2",))
    assert [path.name for path in pipeline.package_folder.glob("*.pt2")] == [export_name("pt2")]
