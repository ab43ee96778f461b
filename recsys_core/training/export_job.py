"""One rank of the export: encodes its range of rows and writes it where all ranks write.

Shapes: I items, O output width.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from recsys_core.data.events import EvaluationSplit, EventStore, Rows
from recsys_core.data.loader import item_batch, query_batch
from recsys_core.errors import StageError
from recsys_core.manifests import InteractionsManifest, require_manifest
from recsys_core.models.config import LossConfig
from recsys_core.models.shards import table_shards
from recsys_core.models.task import RetrievalTask
from recsys_core.models.two_tower import query_features
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.checkpoint import restore_model
from recsys_core.training.distributed import build_model
from recsys_core.training.job import ExportJob
from recsys_core.training.process import Process

ENCODE_ROWS = 8192
SPLITS: tuple[EvaluationSplit, ...] = ("validation", "test")


def run_export(job: ExportJob, *, process: Process) -> None:
    """Collective. Writes what ExportManifest lists into `job.out`."""
    store = EventStore.open(require_manifest(job.interactions, InteractionsManifest, verify=False))
    model = build_model(
        job.spec,
        loss=LossConfig(),
        item_count_I=store.item_count,
        plan=PlanFile.read(job.plan),
        process=process,
        table_learning_rate=0.0,
        seed=0,
    )
    restore_model(model, checkpoint=job.checkpoint)
    model.eval()
    task: RetrievalTask = get_unwrapped_module(model)
    config, device = job.spec.config, process.device
    features = query_features(config)
    writer = _RankWriter(process, alive=job.work / "alive")

    def encode_items(rows: Rows) -> Tensor:
        return task.encode_items(item_batch(rows, features=features).to(device))

    def encode_queries(rows: Rows, *, users: Rows, split: EvaluationSplit) -> Tensor:
        sparse = query_batch(store, users[rows], split, features=features, max_history=config.max_history)
        return task.encode_queries(sparse.to(device))

    with torch.no_grad():
        writer.write(job.out / "item_vectors.npy", shape=(job.spec.items, config.output_dim), encode=encode_items)
        for split in SPLITS:
            users = store.users_with_targets(split)
            if process.leads:
                np.save(job.out / f"query_users_{split}.npy", users)
            writer.write(
                job.out / f"query_vectors_{split}.npy",
                shape=(len(users), config.output_dim),
                encode=partial(encode_queries, users=users, split=split),
            )
        _write_tables(model, job=job, writer=writer)
    if process.leads:
        dense = {name: value.detach().cpu().contiguous() for name, value in task.head.towers.state_dict().items()}
        save_file(dense, job.out / "dense.safetensors")
    dist.barrier()


class _RankWriter:
    """Shared .npy files of which each rank fills a contiguous range of rows."""

    def __init__(self, process: Process, *, alive: Path) -> None:
        self._process, self._alive = process, alive

    def create(self, path: Path, *, shape: tuple[int, int]) -> NDArray[np.float32]:
        """Collective. The file as a writable map, made once by rank 0."""
        if self._process.leads:
            np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape).flush()
        dist.barrier()
        return np.lib.format.open_memmap(path, mode="r+") if shape[0] else np.empty(shape, np.float32)

    def write(self, path: Path, *, shape: tuple[int, int], encode: Callable[[NDArray[np.int64]], Tensor]) -> None:
        """Collective. Fills this rank's rows of `path` with encode(rows) in batches."""
        target = self.create(path, shape=shape)
        for rows, is_ours in self._batches(shape[0]):
            vectors = encode(rows).cpu().numpy()
            if not np.isfinite(vectors).all():
                raise StageError(
                    f"{path.name}: the trained model gives vectors that are not finite (near row {rows[0]}); "
                    "lower training.table_learning_rate or training.dense_learning_rate"
                )
            if is_ours:
                target[rows] = vectors
            self._alive.touch()

    def _batches(self, count: int) -> Iterator[tuple[NDArray[np.int64], bool]]:
        """The same number of batches on every rank, since encoding is collective; a rank without rows repeats row 0."""
        if count == 0:
            return
        ranges = np.array_split(np.arange(count), self._process.world_size)
        batches = -(-len(ranges[0]) // ENCODE_ROWS)
        for rows in np.array_split(ranges[self._process.rank], batches):
            yield (rows, True) if len(rows) else (np.zeros(1, np.int64), False)


def _write_tables(model: DistributedModelParallel, *, job: ExportJob, writer: _RankWriter) -> None:
    state = model.state_dict()
    for table, shape in job.spec.tables.items():
        target = writer.create(job.out / f"table_{table}.npy", shape=shape)
        for shard in table_shards(state, table=table):
            rows, columns = shard.weight_RC.shape
            target[shard.row : shard.row + rows, shard.column : shard.column + columns] = shard.weight_RC.cpu().numpy()
