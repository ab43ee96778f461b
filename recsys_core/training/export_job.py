"""One rank of the export: encodes its range of rows and writes it where all ranks write.

Shapes: I items, H width of an item in a history, O output width.
"""

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.optim.keyed import CombinedOptimizer

from recsys_core.data.assembly import Assembler
from recsys_core.data.events import EvaluationSplit, EventStore, Rows
from recsys_core.data.features.store import FeatureStore
from recsys_core.manifests import FeaturesManifest, InteractionsManifest, require_manifest
from recsys_core.models.shards import table_shards
from recsys_core.models.task import RetrievalTask
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.dense_parallel import whole
from recsys_core.training.distributed import build_model
from recsys_core.training.encoding import Encoder, RankWriter
from recsys_core.training.job import ExportJob
from recsys_core.training.optimizers import make_optimizer
from recsys_core.training.process import Process
from recsys_core.training.restore import restore
from recsys_core.training.sums import add_sums, has_sums, sum_shards

SPLITS: tuple[EvaluationSplit, ...] = ("validation", "test")


def run_export(job: ExportJob, *, process: Process) -> None:
    """Collective. Writes what ExportManifest lists into `job.out`."""
    store = EventStore.open(require_manifest(job.interactions, InteractionsManifest, verify=False))
    features = None if job.features is None else require_manifest(job.features, FeaturesManifest, verify=False)
    model = build_model(
        job.spec,
        loss=job.loss,
        item_count_I=store.item_count,
        ranks={},
        plan=PlanFile.read(job.plan),
        process=process,
        optimizer=job.training.table_optimizer,
        dense_parallel=job.training.dense_parallel,
        seed=0,
    )
    optimizer = make_optimizer(model, spec=job.spec, config=job.training)
    restore(model, optimizer, checkpoint=job.checkpoint)
    model.eval()
    task: RetrievalTask = get_unwrapped_module(model)
    assembler = Assembler(user=job.spec.user_in, features=None if features is None else FeatureStore.open(features))
    writer = RankWriter(process, alive=job.work / "alive")
    with torch.no_grad():
        _write_vectors(Encoder(task, store, assembler, process), job=job, writer=writer)
        _write_tables(model, job=job, writer=writer)
        _write_sums(optimizer, job=job, writer=writer, process=process)
    dense = {}
    for name, value in whole(task.head.state_dict()):
        if process.leads:
            dense[name] = value.detach().cpu().contiguous()
    if process.leads:
        save_file(dense, job.out / "dense.safetensors")
    dist.barrier()


def _write_vectors(encoder: Encoder, *, job: ExportJob, writer: RankWriter) -> None:
    config, store = job.spec.config, encoder.store
    items = [
        writer.create(job.out / f"{name}.npy", shape=(job.spec.items, dim))
        for name, dim in (("history_items", config.history_dim), ("item_vectors", config.output_dim))
    ]
    writer.write(items, encode=encoder.items, what="item_vectors.npy")
    for split in SPLITS:
        users = store.users_with_targets(split)
        if encoder.process.leads:
            np.save(job.out / f"query_users_{split}.npy", users)
        target = writer.create(job.out / f"query_vectors_{split}.npy", shape=(len(users), config.output_dim))

        def encode(rows: Rows, users: Rows = users, split: EvaluationSplit = split) -> tuple[torch.Tensor, ...]:
            return (encoder.queries(users[rows], split=split),)

        writer.write([target], encode=encode, what=f"query_vectors_{split}.npy")


def _write_tables(model: DistributedModelParallel, *, job: ExportJob, writer: RankWriter) -> None:
    state = model.state_dict()
    for name, table in job.spec.tables.items():
        target = writer.create(job.out / f"table_{name}.npy", shape=(table.rows, table.dim))
        for shard in table_shards(state, table=name):
            rows, columns = shard.weight_RC.shape
            target[shard.row : shard.row + rows, shard.column : shard.column + columns] = shard.weight_RC.cpu().numpy()


def _write_sums(optimizer: CombinedOptimizer, *, job: ExportJob, writer: RankWriter, process: Process) -> None:
    """What the next night goes on with beside the rows: with its sums at zero, the first step of a row that has long been
    trained would be as large as the learning rate.
    """
    default, plan = job.training.table_optimizer, PlanFile.read(job.plan)
    for name, table in job.spec.tables.items():
        if not has_sums(job.spec, name, default=default):
            continue
        by_row = (table.settings.optimizer or default).kind == "rowwise_adagrad"
        target = writer.create(job.out / f"state_{name}.npy", shape=(table.rows,) if by_row else (table.rows, table.dim))
        shards = sum_shards(optimizer, spec=job.spec, table=name)
        if plan.tables[name].sharding_type == "data_parallel" and not process.leads:
            shards = []  # every rank has them all
        for rank in range(process.world_size):  # one after the other: the columns of one row may lie on several
            if rank == process.rank:
                for shard in shards:
                    add_sums(target, shard, dim=table.dim)
            dist.barrier()
