"""The query tower as it is served, in plain torch: embedding rows in INT8 with a scale and an offset each, or in fp32.

Shapes: B queries, R rows of a table, W its width, T looked up rows, H width of an item in a history, O output width.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from recsys_core.errors import StageError
from recsys_core.models.spec import ModelSpec, module_name
from recsys_core.models.towers import QueryTower
from recsys_core.serving.query_batch import QueryBatch, RowLists, served_tables

Quantization = Literal["int8", "none"]
HISTORY = "history"
"""The one table with what stands for each item in a history, whatever tables and layers that came from."""
ROWS_AT_ONCE = 1 << 16


class FloatRows(nn.Module):
    """A table in fp32."""

    weight: Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(rows, width))

    @torch.no_grad()
    def fill(self, weight_RW: NDArray[np.float32]) -> None:
        """Copies the table."""
        self.weight.copy_(torch.from_numpy(weight_RW))

    def forward(self, row_T: Tensor) -> Tensor:
        """Rows [T, W]."""
        return self.weight.index_select(0, row_T)


class Int8Rows(nn.Module):
    """A table in uint8 codes with a float16 scale and offset per row; a value is code * scale + offset.

    The codes are those of FBGEMM's row-wise quantization with half-precision scale and offset.
    """

    code: Tensor
    scale_offset: Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("code", torch.empty(rows, width, dtype=torch.uint8))
        self.register_buffer("scale_offset", torch.empty(rows, 2, dtype=torch.float16))

    @torch.no_grad()
    def fill(self, weight_RW: NDArray[np.float32]) -> None:
        """Quantizes the table; StageError for a row that float16 cannot hold."""
        for start in range(0, len(weight_RW), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            value = torch.from_numpy(np.ascontiguousarray(weight_RW[part]))
            offset = value.amin(dim=1).half()
            scale = ((value.amax(dim=1) - offset.float()) / 255).half()
            scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # a row of equal values, or of one below float16
            if not (offset.isfinite() & scale.isfinite()).all():
                row = start + int((~(offset.isfinite() & scale.isfinite())).nonzero()[0])
                raise StageError(
                    f"row {row}: values {weight_RW[row].min():g} to {weight_RW[row].max():g} do not fit the float16 scale and "
                    "offset of an INT8 row; set package.quantization to none"
                )
            code = (value - offset.float()[:, None]) * (1 / scale.float())[:, None]
            self.code[part] = code.round_().clamp_(0, 255).to(torch.uint8)
            self.scale_offset[part] = torch.stack([scale, offset], dim=1)

    def forward(self, row_T: Tensor) -> Tensor:
        """Rows [T, W] in fp32."""
        scale_offset_T2 = self.scale_offset.index_select(0, row_T).float()
        value_TW = self.code.index_select(0, row_T).float()
        return value_TW.mul_(scale_offset_T2[:, :1]).add_(scale_offset_T2[:, 1:])


class ServedQueryTower(nn.Module):
    """Embedding tables and dense layers of the query side; the names of its state are those of tower.safetensors."""

    def __init__(self, spec: ModelSpec, *, quantization: Quantization) -> None:
        super().__init__()
        rows = Int8Rows if quantization == "int8" else FloatRows
        self.spec = spec
        self.tables = nn.ModuleDict({name: rows(*shape) for name, shape in _shapes(spec).items()})
        self.dense = QueryTower(spec)
        self.eval()

    @torch.inference_mode()
    def forward(self, batch: QueryBatch) -> Tensor:
        """Query vectors [B, O]."""
        item_T = batch.history.row_T
        item_TH = self.tables[HISTORY](item_T) if HISTORY in self.tables else torch.zeros(0, self.spec.config.history_dim)
        features = {name: self._feature(name, batch) for name in self.spec.on_side("query")}
        query_BO: Tensor = self.dense(item_TH, torch.arange(len(item_T)), batch.history.offset, features=features)
        return query_BO

    def _feature(self, name: str, batch: QueryBatch) -> Tensor:
        """[B, W]: rows of the table `name`, pooled; zeros for a feature of the event, which is not known when serving."""
        table = self.spec.tables[name]
        if name not in batch.features:
            return torch.zeros(batch.size, table.dim)
        lists = batch.features[name]
        is_list = self.spec.forms.get(name, "single") in ("list", "weighted_list")
        return _pooled(self.tables[module_name(name)](lists.row_T), lists, mean=is_list and table.settings.pooling == "mean")


def build_tower(
    spec: ModelSpec,
    *,
    history_items: NDArray[np.float32],
    tables: Mapping[str, NDArray[np.float32]],
    dense: Mapping[str, Tensor],
    quantization: Quantization,
) -> ServedQueryTower:
    """The tower from float tables (arrays may be memory maps) and the dense state of the trained head.

    history_items: [items, H], what stands for an item in a history. tables: name -> [rows, width], those of `served_tables`
    at least.
    """
    tower = ServedQueryTower(spec, quantization=quantization)
    weights = {HISTORY: history_items} | {module_name(name): weight for name, weight in tables.items()}
    for name, rows in tower.tables.items():
        assert isinstance(rows, FloatRows | Int8Rows)
        try:
            rows.fill(weights[name])
        except StageError as error:
            raise StageError(f"table {name}, {error}") from None
    own = {name.removeprefix("query."): value for name, value in dense.items() if name.startswith("query.")}
    tower.dense.load_state_dict(own, strict=True)
    return tower


def save_tower(tower: ServedQueryTower, path: Path) -> None:
    """Writes tower.safetensors. An INT8 table is `code` uint8 [R, W] and `scale_offset` float16 [R, 2]."""
    save_file({name: tensor.detach().contiguous() for name, tensor in tower.state_dict().items()}, path)


def load_tower(path: Path, *, spec: ModelSpec, quantization: Quantization) -> ServedQueryTower:
    """What save_tower wrote; StageError for a tensor that is missing, surplus, or of another shape or type."""
    with torch.device("meta"):
        tower = ServedQueryTower(spec, quantization=quantization)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise StageError(f"{path}: no readable safetensors file ({error}); package the model again") from error
    expected = {name: _described(tensor) for name, tensor in tower.state_dict().items()}
    stored = {name: _described(tensor) for name, tensor in tensors.items()}
    if stored != expected:
        name = min(name for name, _ in stored.items() ^ expected.items())
        raise StageError(
            f"{path}: tensor {name} is {stored.get(name, 'missing')}, but the model's is {expected.get(name, 'not there')}; "
            "package the model again"
        )
    tower.load_state_dict(tensors, assign=True)
    return tower


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Rows and width of each table, by its name as a submodule."""
    history = {HISTORY: (spec.num_items, spec.config.history_dim)} if spec.config.history.length else {}
    return history | {module_name(name): (spec.tables[name].num_rows, spec.tables[name].dim) for name in served_tables(spec)}


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _pooled(value_TW: Tensor, lists: RowLists, *, mean: bool) -> Tensor:
    """[B, W]: the weighted sum of each list, over the sum of its weights under `mean`; zeros for an empty one."""
    weight_T = torch.ones(len(value_TW)) if lists.weight_T is None else lists.weight_T
    sum_BW = embedding_bag(
        torch.arange(len(value_TW)), value_TW, lists.offset, mode="sum", per_sample_weights=weight_T, include_last_offset=True
    )
    if not mean:
        return sum_BW
    total_B = torch.segment_reduce(weight_T, "sum", offsets=lists.offset, initial=0.0)
    return sum_BW / torch.where(total_B > 0, total_B, 1.0)[:, None]
