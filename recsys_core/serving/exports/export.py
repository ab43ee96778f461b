"""query.pt2 and query.onnx: the query tower in the formats of torch.export and ONNX, compared with the served tower.

Shapes: B queries, D width of a vector.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.errors import StageError
from recsys_core.models.config import ExportFormat
from recsys_core.models.spec import module_name
from recsys_core.serving.contents import PackageContents
from recsys_core.serving.description import export_name
from recsys_core.serving.exports.padded_tower import WEIGHT_SUFFIX, PaddedQueryTower, is_list, padded_inputs
from recsys_core.serving.golden import golden_vectors
from recsys_core.serving.quantise import ServedQueryTower
from recsys_core.serving.retriever import Retriever

MAX_DIFFERENCE = 1e-5
"""Largest allowed difference of vectors of both towers, multiplied by the largest component of a vector if that is above 1."""
MAX_ONNX_BYTES = 2_000_000_000
"""An ONNX file is a protobuf message, which holds at most 2 GiB."""
_OUTPUT_NAME = "query"
_NUM_EXAMPLE_QUERIES = 2


class _Example(NamedTuple):
    """Inputs of queries, and the vectors that the served tower returns for them."""

    inputs: dict[str, NDArray[np.generic]]
    query_BD: NDArray[np.float32]


def write_exports(formats: Sequence[ExportFormat], contents: PackageContents, *, folder: Path) -> list[str]:
    """Write the query tower of a package in each format; return the names of the files.

    Each file is loaded, and its vectors of the golden queries are compared with the vectors of the served tower.

    Raises:
        StageError: a value differs by more than MAX_DIFFERENCE, or the tables are too large for ONNX.
    """
    if not formats:
        return []
    examples = _golden_examples(contents)
    exported_program = _export(contents.tower, examples[0])
    file_names = []
    for export_format in formats:
        path = folder / export_name(export_format)
        if export_format == "pt2":
            _write_pt2(exported_program, path)
            encode = _load_pt2(path)
        else:
            _write_onnx(exported_program, path, input_names=list(examples[0].inputs))
            encode = _load_onnx(path)
        _verify_vectors(encode, examples, path=path)
        file_names.append(path.name)
    return file_names


class _Recorder(torch.nn.Module):
    """A served tower that records its inputs, in padded form, and its query vectors."""

    def __init__(self, tower: ServedQueryTower) -> None:
        super().__init__()
        self._tower, self.examples = tower, list[_Example]()
        self.block = tower.block  # a retriever reads it for similar items

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        query_BD: Tensor = self._tower(*arguments, **options)
        self.examples.append(_Example(padded_inputs(self._tower, *arguments, **options), query_BD.numpy()))
        return query_BD


def _golden_examples(contents: PackageContents) -> list[_Example]:
    recorder = _Recorder(contents.tower)
    golden_vectors(Retriever(replace(contents, tower=recorder), version=""))  # type: ignore[arg-type]  # called like the tower
    if not recorder.examples:
        raise StageError("package.exports: the model ranks none of the golden queries, so the exported query tower is untested")
    return recorder.examples


@torch.no_grad()
def _export(tower: ServedQueryTower, example: _Example) -> torch.export.ExportedProgram:
    # A dimension of size 0 or 1 would become a constant of the program.
    query_indices = np.resize(np.arange(len(example.query_BD)), _NUM_EXAMPLE_QUERIES)
    inputs = {name: torch.from_numpy(values[query_indices]) for name, values in example.inputs.items()}
    batch_dim = torch.export.Dim("batch", min=1)
    dynamic_shapes: dict[str, dict[int, Any]] = {name: {0: batch_dim} for name in inputs}
    for table_name in tower.dense.feature_names:
        if is_list(tower, table_name):
            input_name = module_name(table_name)
            length_dim = torch.export.Dim(f"length_{input_name}", min=1)
            dynamic_shapes[input_name][1] = dynamic_shapes[input_name + WEIGHT_SUFFIX][1] = length_dim
    return torch.export.export(PaddedQueryTower(tower), (inputs,), dynamic_shapes=(dynamic_shapes,))


def _write_pt2(exported_program: torch.export.ExportedProgram, path: Path) -> None:
    # The example inputs would be the only pickle in the file.
    example_inputs, exported_program.example_inputs = exported_program.example_inputs, None
    torch.export.save(exported_program, path)
    exported_program.example_inputs = example_inputs


def _load_pt2(path: Path) -> Any:
    module = torch.export.load(path).module()
    return lambda inputs: module({name: torch.from_numpy(values) for name, values in inputs.items()}).numpy()


def _write_onnx(exported_program: torch.export.ExportedProgram, path: Path, *, input_names: list[str]) -> None:
    num_bytes = sum(tensor.nbytes for tensor in exported_program.state_dict.values())
    if num_bytes > MAX_ONNX_BYTES:
        raise StageError(
            f"package.exports: the tables of the query tower have {num_bytes:,} bytes, but an ONNX file holds "
            f"{MAX_ONNX_BYTES:,}; leave out onnx, or set package.quantization to int8 or int4"
        )
    # The exporter warns four times that torchvision is not installed, which nothing here uses.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    program = torch.onnx.export(
        exported_program, input_names=input_names, output_names=[_OUTPUT_NAME], dynamo=True, external_data=False, verbose=False
    )
    assert program is not None
    program.save(path)


def _load_onnx(path: Path) -> Any:
    from onnx.reference import ReferenceEvaluator

    evaluator: Any = ReferenceEvaluator(str(path))  # the annotation of `run` is wrong
    return lambda inputs: evaluator.run([_OUTPUT_NAME], inputs)[0]


@torch.no_grad()
def _verify_vectors(encode: Any, examples: Sequence[_Example], *, path: Path) -> None:
    for example in examples:
        inputs: Mapping[str, Any] = example.inputs
        max_difference = np.abs(encode(inputs) - example.query_BD).max(initial=0)
        limit = MAX_DIFFERENCE * max(1.0, float(np.abs(example.query_BD).max(initial=0)))
        if not max_difference <= limit:
            raise StageError(
                f"{path.name}: the query vectors of the golden queries differ by {max_difference:g} from the vectors of the "
                f"served query tower, but at most {limit:g} is allowed; leave {path.suffix[1:]} out of package.exports"
            )
