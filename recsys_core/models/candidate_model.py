"""A model in plain torch that embeds items without events: the candidate tower and the tables of the item features.

Shapes: R rows of a table, V items, D width of a vector, L feature values of all items.
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

NUM_ITEMS_PER_BATCH = 8_192


class CandidateModel(nn.Module):
    """The trained part of the model that computes the vectors of items, without the rows of the items themselves.

    An item that the training has not seen gets the row with which the training would begin: its pretrained vector, scaled like
    all pretrained vectors. Without pretrained vectors, this row would be random, so it gets the expected value, zero. The
    offset of an unseen item is zero too.
    """

    trained_map: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        shape_by_table = {name: (spec.tables[name].num_rows, spec.tables[name].dim) for name in spec.features("item")}
        # nn.Embedding() would fill the weights, which imports torch._dynamo on the meta device.
        self.tables = nn.ModuleDict(
            {
                module_name(table_name): nn.Embedding.from_pretrained(torch.empty(shape))  # type: ignore[no-untyped-call]
                for table_name, shape in shape_by_table.items()
            }
        )
        self.tower = make_candidate_tower(spec)
        if spec.config.spectral_block is not None:
            # The spectral block of an unseen item is zero, so only the rows of the map for trained vectors are used.
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
            tables: tables of the item features by name, [R, D] each. They may be memory maps.
            dense: weights of the trained layers by name; only names with the prefix `item.` are used.
            item_map: matrix that multiplies the concatenation of an item's trained vector and block; None without a spectral
                block.
        """
        tensor_by_name = {
            f"tower.{name.removeprefix('item.')}": tensor for name, tensor in dense.items() if name.startswith("item.")
        }
        tensor_by_name |= {
            f"tables.{module_name(name)}.weight": torch.from_numpy(np.ascontiguousarray(table))
            for name, table in tables.items()
        }
        if item_map is not None:
            tensor_by_name["trained_map"] = item_map[: spec.config.trained_dim].contiguous()
        return cls._with_state(spec, tensor_by_name)

    @classmethod
    def load(cls, path: Path, spec: ModelSpec) -> Self:
        """Read a file that `save` has written."""
        return cls._with_state(spec, load_file(path))

    @classmethod
    def _with_state(cls, spec: ModelSpec, tensor_by_name: Mapping[str, Tensor]) -> Self:
        with torch.device("meta"):
            model = cls(spec)
        model.load_state_dict(tensor_by_name, strict=True, assign=True)
        return model

    def save(self, path: Path) -> None:
        """Write the layers and the tables as safetensors."""
        save_file({name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}, path)

    @torch.inference_mode()
    def encode(
        self, vector_VD: NDArray[np.float32] | None, features: FeatureStore, owner_V: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the history vectors and the candidate vectors of unseen items, with V rows each.

        Args:
            vector_VD: pretrained vectors; None if the model has none.
            features: feature values of the items.
            owner_V: index of each item in the arrays of the features.
        """
        encoded_batches = list(self._encode_batches(vector_VD, features, owner_V))
        config = self.spec.config
        if not encoded_batches:
            return np.zeros((0, config.history_dim), np.float32), np.zeros((0, config.output_dim), np.float32)
        history_VD, candidate_VD = (np.concatenate(batch_vectors) for batch_vectors in zip(*encoded_batches, strict=True))
        return history_VD, candidate_VD

    def _encode_batches(
        self, vector_VD: NDArray[np.float32] | None, features: FeatureStore, owner_V: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        for start in range(0, len(owner_V), NUM_ITEMS_PER_BATCH):
            batch = slice(start, start + NUM_ITEMS_PER_BATCH)
            batch_owner_V = owner_V[batch]
            row_VD = self._initial_rows(None if vector_VD is None else vector_VD[batch], num_items=len(batch_owner_V))
            item_VD = self.tower.embed({"item": row_VD})
            feature_by_name = {
                name: self._feature_vectors(name, features, batch_owner_V) for name in self.spec.features("item")
            }
            candidate_VD = self.tower(item_VD, features=feature_by_name)
            histories_use_tower = self.spec.config.history.item_representation == "candidate_tower"
            history_VD = candidate_VD if histories_use_tower else item_VD
            if self.spec.config.has_popularity:
                candidate_VD = append_popularity(candidate_VD, torch.full_like(candidate_VD[:, 0], UNSEEN_POPULARITY))
            if self.spec.config.spectral_block is not None:
                candidate_VD = candidate_VD @ self.trained_map
            yield history_VD.numpy(), candidate_VD.numpy()

    def _initial_rows(self, vector_VD: NDArray[np.float32] | None, *, num_items: int) -> Tensor:
        """Return the rows that unseen items have in table `item`, [V, D]."""
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
