"""The served query tower in plain torch, with quantized or float embedding tables.

Shapes: B queries, R rows of a table, L looked-up rows, I items, D width of the vectors, T width of the trained query vectors,
M width of the item vectors of the spectral block.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recsys_core.dataset.feature_store import FeatureForm, FeatureStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import StageError
from recsys_core.models.config import Quantization
from recsys_core.models.ensemble import make_query_tower
from recsys_core.models.history import pool_lists
from recsys_core.models.score_terms import SpectralBlock, history_totals
from recsys_core.models.spec import ModelSpec, module_name

if TYPE_CHECKING:
    from recsys_core.serving.given_features import GivenFeature

HISTORY_TABLE = "history"
"""Name of the table with the vectors that represent items in histories."""
BLOCK_TABLE = "spectral_block"
"""Name of the table with the item vectors that are added up for the spectral block."""
CHUNK_ROWS = 1 << 16
"""Number of table rows that are converted at once."""
SPACE_ID_KEY = "space_id"
"""Key of the id of the vector space in the metadata of tower.safetensors and items.parquet."""


class FloatTable(nn.Module):
    """Embedding table of floats."""

    weight: Tensor

    def __init__(self, num_rows: int, dim: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(num_rows, dim, dtype=dtype))

    @torch.no_grad()
    def fill(self, weight_RD: NDArray[np.float32]) -> None:
        """Copy the weights into the table. Raises StageError for a row with a value that overflows the type."""
        for start in range(0, len(weight_RD), CHUNK_ROWS):
            row_slice = slice(start, start + CHUNK_ROWS)
            self.weight[row_slice] = torch.from_numpy(np.ascontiguousarray(weight_RD[row_slice])).to(self.weight.dtype)
            is_finite_R = self.weight[row_slice].isfinite().all(dim=1)
            if not is_finite_R.all():
                row = start + int((~is_finite_R).nonzero()[0])
                raise _overflow_error(row, weight_RD[row], "fp16 values")

    def forward(self, row_L: Tensor) -> Tensor:
        """Look up rows, fp32 [L, D]."""
        return self.weight.index_select(0, row_L).float()


class IntegerTable(nn.Module):
    """Embedding table of codes with 8 or 4 bits, and a float16 scale and offset per row: value = code * scale + offset.

    The codes equal the codes of FBGEMM's row-wise quantization with half-precision scale and offset. A byte holds two codes of
    4 bits, with the first code in its lower half.
    """

    code: Tensor
    scale_offset: Tensor

    def __init__(self, num_rows: int, dim: int, *, num_bits: int) -> None:
        super().__init__()
        self._dim, self._num_bits = dim, num_bits
        self.register_buffer("code", torch.empty(num_rows, -(-dim * num_bits // 8), dtype=torch.uint8))
        self.register_buffer("scale_offset", torch.empty(num_rows, 2, dtype=torch.float16))

    @torch.no_grad()
    def fill(self, weight_RD: NDArray[np.float32]) -> None:
        """Quantize the weights into the table. Raises StageError for a row whose scale or offset overflows float16."""
        max_code = (1 << self._num_bits) - 1
        for start in range(0, len(weight_RD), CHUNK_ROWS):
            row_slice = slice(start, start + CHUNK_ROWS)
            value_RD = torch.from_numpy(np.ascontiguousarray(weight_RD[row_slice]))
            offset_R = value_RD.amin(dim=1).half()
            scale_R = ((value_RD.amax(dim=1) - offset_R.float()) / max_code).half()
            # A scale of 0 means that all values are equal, or that their range underflows float16.
            scale_R = torch.where(scale_R == 0, torch.ones_like(scale_R), scale_R)
            is_finite_R = offset_R.isfinite() & scale_R.isfinite()
            if not is_finite_R.all():
                row = start + int((~is_finite_R).nonzero()[0])
                raise _overflow_error(row, weight_RD[row], f"the float16 scale and offset of an INT{self._num_bits} row")
            code_RD = (value_RD - offset_R.float()[:, None]) * (1 / scale_R.float())[:, None]
            self.code[row_slice] = self._packed(code_RD.round_().clamp_(0, max_code).to(torch.uint8))
            self.scale_offset[row_slice] = torch.stack([scale_R, offset_R], dim=1)

    def forward(self, row_L: Tensor) -> Tensor:
        """Look up and dequantize rows, fp32 [L, D]."""
        scale_offset_L2 = self.scale_offset.index_select(0, row_L).float()
        value_LD = self._unpacked(self.code.index_select(0, row_L)).float()
        return value_LD.mul_(scale_offset_L2[:, :1]).add_(scale_offset_L2[:, 1:])

    def _packed(self, code_RD: Tensor) -> Tensor:
        if self._num_bits == 8:
            return code_RD
        code_RD = nn.functional.pad(code_RD, (0, self._dim % 2))
        return code_RD[:, ::2] | (code_RD[:, 1::2] << 4)

    def _unpacked(self, byte_L: Tensor) -> Tensor:
        if self._num_bits == 8:
            return byte_L
        byte_L = byte_L.int()  # ONNX gets the wrong type for a shift of bytes (torch 2.14)
        return torch.stack([byte_L & 15, byte_L >> 4], dim=2).flatten(1)[:, : self._dim]


Table = FloatTable | IntegerTable


class BlockArrays(NamedTuple):
    """The spectral block of an exported model: the item vectors that it adds up over a history, and its matrices."""

    history_factor_IM: NDArray[np.float32]
    query_map: Tensor
    similar_map: Tensor


def _overflow_error(row: int, value_D: NDArray[np.float32], target_text: str) -> StageError:
    return StageError(
        f"row {row}: values {value_D.min():g} to {value_D.max():g} do not fit {target_text}; set package.quantization to fp32"
    )


def make_table(num_rows: int, dim: int, *, quantization: Quantization) -> Table:
    """Return an empty table."""
    if quantization in ("int8", "int4"):
        return IntegerTable(num_rows, dim, num_bits=int(quantization.removeprefix("int")))
    return FloatTable(num_rows, dim, dtype=torch.float16 if quantization == "fp16" else torch.float32)


class ServedQueryTower(nn.Module):
    """Embedding tables and dense layers of the query tower. tower.safetensors is its state_dict."""

    def __init__(self, spec: ModelSpec, *, quantization: Quantization) -> None:
        super().__init__()
        self.spec = spec
        self.tables = nn.ModuleDict(
            {name: make_table(*shape, quantization=quantization) for name, shape in _table_shapes(spec).items()}
        )
        self.dense = make_query_tower(spec)
        self.block = None if spec.config.spectral_block is None else SpectralBlock(spec.config)
        self.eval()

    @torch.inference_mode()
    def forward(
        self,
        user_row_B: NDArray[np.int64],
        history: JaggedArray,
        *,
        features: FeatureStore,
        given_features: "Mapping[str, GivenFeature] | None" = None,
    ) -> Tensor:
        """Compute the query vectors, [B, D].

        Args:
            user_row_B: row of each user; -1 for an unknown user, who has no stored features.
            history: item rows, oldest first. Only the newest items are used, up to the history lengths of the model.
            features: the user features of the package.
            given_features: features from the request. They replace stored features.
        """
        full_history, history = history, history.last_values(self.spec.history_length)
        item_LD = torch.zeros(0, self.spec.config.history_dim)
        if HISTORY_TABLE in self.tables:
            item_LD = self.tables[HISTORY_TABLE](torch.from_numpy(history.values_L))
        vector_by_table = {
            name: self._feature_vectors(name, user_row_B, features, (given_features or {}).get(name))
            for name in self.spec.on_side("query")
        }
        history_index_L, offset = torch.arange(len(item_LD)), torch.from_numpy(history.offset)
        query_BD: Tensor = self.dense(item_LD, history_index_L, offset, features=vector_by_table)
        return query_BD if self.block is None else self._with_block(query_BD, full_history)

    def _with_block(self, query_BT: Tensor, history: JaggedArray) -> Tensor:
        """Return the query vectors with the spectral block of their histories, [B, D]."""
        assert self.block is not None
        assert self.spec.config.spectral_block is not None
        history = history.last_values(self.spec.config.spectral_block.history_length)
        item_LM = self.tables[BLOCK_TABLE](torch.from_numpy(history.values_L))
        query_BD: Tensor = self.block(
            query_BT, history_totals(item_LM, torch.arange(len(item_LM)), torch.from_numpy(history.offset))
        )
        return query_BD

    def _feature_vectors(
        self, table_name: str, user_row_B: NDArray[np.int64], features: FeatureStore, given_feature: "GivenFeature | None"
    ) -> Tensor:
        """Look up and pool the rows of a table, [B, D]. The vector of a query without rows is zero."""
        table = self.spec.tables[table_name]
        row_lists, weight_L = self.rows_and_weights(table_name, user_row_B, features, given_feature)
        if not len(row_lists.values_L):
            return torch.zeros(len(user_row_B), table.dim)
        is_list = self.spec.forms.get(table_name, "single") in ("list", "weighted_list")
        return pool_lists(
            self.tables[module_name(table_name)](torch.from_numpy(row_lists.values_L)),
            torch.from_numpy(row_lists.offset),
            weight_L=None if weight_L is None else torch.from_numpy(weight_L),
            is_mean=is_list and table.settings.pooling == "mean",
        )

    def rows_and_weights(
        self, table_name: str, user_row_B: NDArray[np.int64], features: FeatureStore, given_feature: "GivenFeature | None"
    ) -> tuple[JaggedArray, NDArray[np.float32] | None]:
        """Return the rows of each query in a table, and their weights; None if all weights are 1."""
        row_lists, weight_L = self._stored_rows(table_name, user_row_B, features)
        return (row_lists, weight_L) if given_feature is None else _replace_rows(row_lists, weight_L, given_feature)

    def _stored_rows(
        self, table_name: str, user_row_B: NDArray[np.int64], features: FeatureStore
    ) -> tuple[JaggedArray, NDArray[np.float32] | None]:
        """Return the rows of each user in a table, and their weights.

        A missing single value has row 0, as in the training. Unknown users have no value of a feature. Context features have
        values in the request only.
        """
        form = self.spec.forms.get(table_name)
        is_stored_B = user_row_B >= 0
        if table_name != "user" and table_name not in features.feature_by_key:
            is_stored_B = np.zeros(len(user_row_B), np.bool_)
        row_lists, weight_L = JaggedArray.empty(0), np.zeros(0, np.float32) if form in ("weighted_list", "number") else None
        if is_stored_B.any():
            row_lists = JaggedArray.from_single_values(user_row_B[is_stored_B])
            if table_name != "user":
                row_lists, weight_L = features.feature_by_key[table_name].rows_and_weights(user_row_B[is_stored_B])
        if form == "single":
            table_row_B = np.zeros(len(user_row_B), np.int64)
            table_row_B[is_stored_B] = row_lists.values_L
            return JaggedArray.from_single_values(table_row_B), None
        length_B = np.zeros(len(user_row_B), np.int64)
        length_B[is_stored_B] = row_lists.lengths
        return JaggedArray.from_lengths(length_B, row_lists.values_L), weight_L


def _replace_rows(
    stored_rows: JaggedArray, weight_L: NDArray[np.float32] | None, given_feature: "GivenFeature"
) -> tuple[JaggedArray, NDArray[np.float32] | None]:
    """Replace the stored rows and weights of the queries whose request has the feature."""
    stored_index = JaggedArray(stored_rows.offset, np.arange(len(stored_rows.values_L)))
    given_index = JaggedArray(
        given_feature.rows.offset, len(stored_rows.values_L) + np.arange(len(given_feature.rows.values_L))
    )
    value_index = stored_index.replace(given_index, where=given_feature.is_given_B)
    row_L = np.concatenate([stored_rows.values_L, given_feature.rows.values_L])[value_index.values_L]
    if weight_L is None or given_feature.weight_L is None:
        return JaggedArray(value_index.offset, row_L), None
    return JaggedArray(value_index.offset, row_L), np.concatenate([weight_L, given_feature.weight_L])[value_index.values_L]


def user_features(spec: ModelSpec) -> dict[str, FeatureForm]:
    """Return the form of each user feature by key. The package stores the values of these features."""
    return {feature_name: form for feature_name, form in spec.forms.items() if feature_name.startswith("user.")}


def served_tables(spec: ModelSpec) -> list[str]:
    """Return the names of the tables that a query looks up in addition to its history: users and query features."""
    return list(spec.on_side("query"))


def build_tower(
    spec: ModelSpec,
    *,
    history_items: NDArray[np.float32],
    tables: Mapping[str, NDArray[np.float32]],
    dense: Mapping[str, Tensor],
    quantization: Quantization,
    block: "BlockArrays | None" = None,
) -> ServedQueryTower:
    """Build the served tower from the exported model.

    Args:
        history_items: [I, D], the vector of each item in histories.
        tables: weights [R, D] by table name, at least for `served_tables`. Arrays may be memory maps.
        dense: tensors of the trained dense layers by name; only tensors of the query tower (prefix `query.`) are used.
        block: arrays of the spectral block, for a model that has one.
    """
    tower = ServedQueryTower(spec, quantization=quantization)
    weights_by_table = {HISTORY_TABLE: history_items} | {
        module_name(table_name): weight for table_name, weight in tables.items()
    }
    if tower.block is not None:
        assert block is not None
        weights_by_table[BLOCK_TABLE] = block.history_factor_IM
        tower.block.query_map.copy_(block.query_map)
        tower.block.similar_map.copy_(block.similar_map)
    for table_name, table in tower.tables.items():
        assert isinstance(table, Table)
        try:
            table.fill(weights_by_table[table_name])
        except StageError as error:
            raise StageError(f"table {table_name}, {error}") from None
    query_tensors = {name.removeprefix("query."): tensor for name, tensor in dense.items() if name.startswith("query.")}
    tower.dense.load_state_dict(query_tensors, strict=True)
    return tower


def save_tower(tower: ServedQueryTower, path: Path, *, space_id: str = "") -> None:
    """Write tower.safetensors, with `space_id` in its metadata.

    A table of integers has the tensors `code` uint8 [R, D], or [R, D / 2] with 4 bits, and `scale_offset` float16 [R, 2].
    """
    tensors = {tensor_name: tensor.detach().contiguous() for tensor_name, tensor in tower.state_dict().items()}
    save_file(tensors, path, metadata={SPACE_ID_KEY: space_id})


def read_space_id(path: Path) -> str | None:
    """Return the space_id of a file of `save_tower`; None if the file has no space_id."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] | None = file.metadata()
    return (metadata or {}).get(SPACE_ID_KEY)


def load_tower(path: Path, *, spec: ModelSpec, quantization: Quantization) -> ServedQueryTower:
    """Read a file of `save_tower`. Raises StageError if a tensor is missing or unknown, or has another shape or type."""
    with torch.device("meta"):
        tower = ServedQueryTower(spec, quantization=quantization)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise StageError(f"{path}: not a valid safetensors file ({error}); package the model again") from error
    expected_layout_by_tensor = {tensor_name: _dtype_and_shape(tensor) for tensor_name, tensor in tower.state_dict().items()}
    stored_layout_by_tensor = {tensor_name: _dtype_and_shape(tensor) for tensor_name, tensor in tensors.items()}
    if stored_layout_by_tensor != expected_layout_by_tensor:
        tensor_name = min(tensor_name for tensor_name, _ in stored_layout_by_tensor.items() ^ expected_layout_by_tensor.items())
        raise StageError(
            f"{path}: tensor {tensor_name} is {stored_layout_by_tensor.get(tensor_name, 'missing')}, but the model expects "
            f"{expected_layout_by_tensor.get(tensor_name, 'no such tensor')}; package the model again"
        )
    tower.load_state_dict(tensors, assign=True)
    return tower


def _table_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the number of rows and the width of each table, by the name of its submodule."""
    item_shapes = {HISTORY_TABLE: (spec.num_items, spec.config.history_dim)} if spec.history_length else {}
    if spec.config.spectral_block is not None:
        item_shapes[BLOCK_TABLE] = (spec.num_items, spec.config.spectral_block.dim)
    return item_shapes | {
        module_name(table_name): (spec.tables[table_name].num_rows, spec.tables[table_name].dim)
        for table_name in served_tables(spec)
    }


def _dtype_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
