"""From a verified checkpoint back into a model, whatever ranks and sharding it was saved by.

Shapes: R rows of a table, C column shards that it was saved in.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from recsys_core.errors import StageError

TOLD = 5
"""Differences that an error names."""


def restore(model: DistributedModelParallel, optimizer: CombinedOptimizer, *, checkpoint: Path) -> None:
    """Collective. Loads weights and optimizer state into the model's own shards.

    Row-wise Adagrad keeps a sum per row and column shard. Where a table is now split into another number of columns, each of
    them starts from the sum of the whole row: the mean over its old column shards, by their widths.

    Raises StageError where the checkpoint is of another model: names the entries, and both shapes.
    """
    for _, part in optimizer.optimizers:
        if isinstance(part, KeyedOptimizer) and not isinstance(part, CombinedOptimizer):
            part.init_state()  # DCP skips, without a word, the state that is not there yet
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    wanted, _ = flatten_state_dict(state)
    saved: Mapping[str, Any] = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    sums = {key: _weight_of(key, wanted) for key, value in wanted.items() if _is_sum_per_row(value)}
    _require_same(wanted, saved, apart_from=sums, checkpoint=checkpoint)
    resized = {key: weight for key, weight in sums.items() if wanted[key].size() != saved[key].size}
    load({key: value for key, value in wanted.items() if key not in resized}, checkpoint_id=checkpoint)
    whole = {key: torch.empty(saved[key].size) for key in resized}
    load(dict(whole), checkpoint_id=checkpoint)
    for key, weight in resized.items():
        _fill_sums(wanted[key], sum_CR=whole[key].view(-1, wanted[weight].size(0)), saved=saved[weight])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _is_sum_per_row(value: object) -> bool:
    return isinstance(value, ShardedTensor) and len(value.size()) == 1


def _weight_of(key: str, wanted: Mapping[str, Any]) -> str:
    """optimizer.state.<weight>.<table>.momentum1 -> model.<weight>."""
    return next(name for name in wanted if name.startswith("model.") and f".{name.removeprefix('model.')}." in key)


def _fill_sums(target: ShardedTensor, *, sum_CR: Tensor, saved: TensorStorageMetadata) -> None:
    """Puts the rows' sums into this rank's shards of `target`; TorchRec counts its rows once per column shard."""
    widths = dict(sorted((int(chunk.offsets[1]), int(chunk.sizes[1])) for chunk in saved.chunks))
    share_C = torch.tensor(list(widths.values()), dtype=sum_CR.dtype) / sum(widths.values())
    sum_R = share_C @ sum_CR
    for shard in target.local_shards():
        row = shard.metadata.shard_offsets[0] % len(sum_R)
        shard.tensor.copy_(sum_R[row : row + len(shard.tensor)])


def _require_same(
    wanted: Mapping[str, Any], saved: Mapping[str, Any], *, apart_from: Mapping[str, str], checkpoint: Path
) -> None:
    """The same entries, of the same shapes: of any rank, since one that holds no shard of a table has no state of it."""
    shapes = {key: list(value.size()) for key, value in wanted.items() if hasattr(value, "size")}
    gathered: list[dict[str, list[int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, {key: shapes.get(key, []) for key in wanted})
    here = {key: shape for one in gathered for key, shape in one.items()}
    differences = [f"no {key} in the checkpoint" for key in sorted(set(here) - set(saved))]
    differences += [f"no {key} in the model" for key in sorted(set(saved) - set(here))]
    for key in sorted(set(here) & set(saved) - set(apart_from)):
        shape = list(saved[key].size) if isinstance(saved[key], TensorStorageMetadata) else []
        if shape != here[key] and not key.startswith("optimizer."):
            differences.append(f"{key} is {shape} in the checkpoint, {here[key]} in the model")
    if differences:
        told = "; ".join(differences[:TOLD]) + (f"; and {len(differences) - TOLD} more" if len(differences) > TOLD else "")
        raise StageError(f"{checkpoint}: of another model or another kind of sharding: {told}; remove it to start anew")
