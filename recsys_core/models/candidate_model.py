"""The candidate tower with the embedding tables of the item features in plain torch, which embeds items without events.

Shapes: R rows of a table, V items, D width of a vector.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.models.ensemble import make_candidate_tower
from recsys_core.models.history import pool_lists
from recsys_core.models.score_terms import UNSEEN_POPULARITY, append_popularity
from recsys_core.models.spec import ModelSpec, module_name
from recsys_core.models.tables.initialisation import scale_to_norm
from recsys_core.models.tables.table_config import random_norm

BATCH_ITEMS = 8_192


class CandidateModel(nn.Module):
    """The trained part of the model that computes the vectors of items, without the rows of the items themselves.

    An item that the training has not seen gets the row with which the training would begin: its pretrained vector, scaled like
    all others. Without pretrained vectors, that row would be random, and its expected value is used: zero. The offset of an
    unseen item is zero too.
    """

    trained_map: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        shapes = {name: (spec.tables[name].num_rows, spec.tables[name].dim) for name in spec.features("item")}
        # A new nn.Embedding is initialised, which imports torch._dynamo on the meta device.
        self.tables = nn.ModuleDict(
            {
                module_name(name): nn.Embedding.from_pretrained(torch.empty(shape))  # type: ignore[no-untyped-call]
                for name, shape in shapes.items()
            }
        )
        self.tower = make_candidate_tower(spec)
        if spec.config.spectral_block is not None:
            # The block of an unseen item is zero.
            self.register_buffer("trained_map", torch.empty(spec.config.trained_dim, spec.config.output_dim))
        self.eval()

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *,
        tables: Mapping[str, NDArray[np.float32]],
        dense: Mapping[str, Tensor],
        item_map: Tensor | None = None,
    ) -> Self:
        """Return the model of an export.

        Args:
            tables: name -> [R, D], the tables of the item features. Arrays may be memory maps.
            dense: state of the trained dense layers; names with the prefix `item.` are used.
            item_map: matrix by which concatenated trained vectors and spectral blocks are multiplied, for a model with a block.
        """
        state = {f"tower.{name.removeprefix('item.')}": tensor for name, tensor in dense.items() if name.startswith("item.")}
        state |= {
            f"tables.{module_name(name)}.weight": torch.from_numpy(np.ascontiguousarray(table))
            for name, table in tables.items()
        }
        if item_map is not None:
            state["trained_map"] = item_map[: spec.config.trained_dim].contiguous()
        return cls._with_state(spec, state)

    @classmethod
    def load(cls, path: Path, spec: ModelSpec) -> Self:
        """Read a file of `save`."""
        return cls._with_state(spec, load_file(path))

    @classmethod
    def _with_state(cls, spec: ModelSpec, state: Mapping[str, Tensor]) -> Self:
        with torch.device("meta"):
            model = cls(spec)
        model.load_state_dict(state, strict=True, assign=True)
        return model

    def save(self, path: Path) -> None:
        """Write the layers and the tables as safetensors."""
        save_file({name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}, path)

    @torch.inference_mode()
    def encode(
        self, vector_VD: NDArray[np.float32] | None, features: FeatureStore, owner_V: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (vectors that represent the items in histories, candidate vectors) of unseen items, both with V rows.

        Args:
            vector_VD: pretrained vectors; None if the model has none.
            features: features of items, by item.<name>.
            owner_V: index of each item in the arrays of the features.
        """
        batches = list(self._encode_batches(vector_VD, features, owner_V))
        config = self.spec.config
        if not batches:
            return np.zeros((0, config.history_dim), np.float32), np.zeros((0, config.output_dim), np.float32)
        history_VD, candidate_VD = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        return history_VD, candidate_VD

    def _encode_batches(
        self, vector_VD: NDArray[np.float32] | None, features: FeatureStore, owner_V: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        for start in range(0, len(owner_V), BATCH_ITEMS):
            batch = slice(start, start + BATCH_ITEMS)
            owners = owner_V[batch]
            item_VD = self.tower.embed({"item": self._rows(None if vector_VD is None else vector_VD[batch], len(owners))})
            candidate_VD = self.tower(
                item_VD, features={name: self._feature_vectors(name, features, owners) for name in self.spec.features("item")}
            )
            uses_tower = self.spec.config.history.item_representation == "candidate_tower"
            history_VD = candidate_VD if uses_tower else item_VD
            if self.spec.config.has_popularity:
                candidate_VD = append_popularity(candidate_VD, torch.full_like(candidate_VD[:, 0], UNSEEN_POPULARITY))
            if self.spec.config.spectral_block is not None:
                candidate_VD = candidate_VD @ self.trained_map
            yield history_VD.numpy(), candidate_VD.numpy()

    def _rows(self, vector_VD: NDArray[np.float32] | None, num_items: int) -> Tensor:
        """Return the rows of unseen items in the table of the items."""
        table = self.spec.tables["item"]
        if vector_VD is None:
            return torch.zeros(num_items, table.dim)
        row_VD = torch.from_numpy(np.ascontiguousarray(vector_VD))
        dim = row_VD.shape[1]
        if table.settings.rescale:
            row_VD = scale_to_norm(row_VD, norm=random_norm(table.settings.init_std, dim))
        return row_VD.tile(1, table.dim // dim)

    def _feature_vectors(self, name: str, features: FeatureStore, owner_V: NDArray[np.int64]) -> Tensor:
        """Look up and pool the values of a feature, [V, D]."""
        table = self.spec.tables[name]
        row_lists, weight_L = features.feature_by_key[name].rows_and_weights(owner_V)
        value_LD = self.tables[module_name(name)](torch.from_numpy(row_lists.values_L.astype(np.int64)))
        return pool_lists(
            value_LD,
            torch.from_numpy(row_lists.offset),
            weight_L=None if weight_L is None else torch.from_numpy(weight_L),
            is_mean=self.spec.forms[name] in ("list", "weighted_list") and table.settings.pooling == "mean",
        )
