"""Stage `export`: item vectors, query vectors, tables and dense weights of the trained model."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.optim.keyed import CombinedOptimizer

from recsys_core.data.assembly import Assembler
from recsys_core.data.events import EvaluationSplit, EventStore
from recsys_core.data.features.store import FeatureStore
from recsys_core.data.jagged import Int64Array
from recsys_core.disk import save_npy
from recsys_core.launching.config import Launcher, LocalLauncher
from recsys_core.launching.launch import launch
from recsys_core.manifests import (
    Dataset,
    ExportManifest,
    FeaturesManifest,
    InteractionsManifest,
    TrainManifest,
    fingerprint_of,
    produce,
    require_manifest,
)
from recsys_core.models.embedding_tables import table_shards
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.task import RetrievalTask
from recsys_core.seeds import EXPORT_SEED
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.checkpoint import PLAN_COPY, restore
from recsys_core.training.config import TrainingConfig
from recsys_core.training.dense_parallel import whole
from recsys_core.training.disk_estimate import export_bytes
from recsys_core.training.encoding import Encoder, RankWriter
from recsys_core.training.job_spec import ExportJob
from recsys_core.training.optimizers import has_sums, make_optimizer, sum_shards, sums_of
from recsys_core.training.process_group import Process
from recsys_core.training.sharded_array import writing_part
from recsys_core.training.sharded_model import build_model


def export_vectors(
    config: TrainingConfig,
    *,
    model: ModelSpec,
    loss: LossConfig,
    dataset: Dataset,
    train: TrainManifest,
    folder: Path,
    launcher: Launcher = LocalLauncher(),  # noqa: B008  it is frozen
) -> ExportManifest:
    """Launches the ranks that trained once more; each writes its own rows, no rank gathers a table."""
    work = folder.with_name(folder.name + ".work")

    def build(out: Path) -> dict[str, Any]:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        job = ExportJob(
            work=work,
            out=out,
            spec=model,
            loss=loss,
            training=config,
            interactions=dataset.interactions.folder,
            features=None if dataset.features is None else dataset.features.folder,
            plan=train.path(PLAN_COPY),
            checkpoint=train.folder / "checkpoint",
        )
        (work / "job.json").write_text(job.model_dump_json(indent=2))
        launch(
            work / "job.json",
            plan=PlanFile.read(job.plan),
            logs=work / "logs",
            start_timeout_s=config.start_timeout_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            alive=work / "alive",
            launcher=launcher,
        )
        (out / "model.json").write_text(model.model_dump_json(indent=2))
        queries = {split: len(np.load(out / f"query_users_{split}.npy")) for split in SPLITS}
        return {
            "num_items": model.num_items,
            "dim": model.config.output_dim,
            "similarity": model.config.similarity,
            "num_queries": queries,
        }

    manifest = produce(
        folder,
        ExportManifest,
        fingerprint=fingerprint_of("export", model, dataset.interactions, train),
        build=build,
        needs_bytes=export_bytes(config.table_optimizer, model=model),
    )
    shutil.rmtree(work, ignore_errors=True)
    return manifest


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
        seed=EXPORT_SEED,
    )
    optimizer = make_optimizer(model, spec=job.spec, config=job.training)
    restore(model, optimizer, checkpoint=job.checkpoint)
    model.eval()
    task: RetrievalTask = get_unwrapped_module(model)
    assembler = Assembler(user=job.spec.user_batch_key, features=None if features is None else FeatureStore.open(features))
    writer = RankWriter(process, alive=job.work / "alive")
    with torch.no_grad():
        _write_vectors(Encoder(task, store, assembler, process), job=job, writer=writer)
        _write_tables(model, job=job, writer=writer, process=process)
        _write_sums(optimizer, job=job, writer=writer, process=process)
    dense = {}
    for name, value in whole(task.head.state_dict()):
        if process.is_main:
            dense[name] = value.detach().cpu().contiguous()
    if process.is_main:
        save_file(dense, job.out / "dense.safetensors")
    dist.barrier()


def _write_vectors(encoder: Encoder, *, job: ExportJob, writer: RankWriter) -> None:
    config, store, process = job.spec.config, encoder.store, encoder.process
    widths = {job.out / "history_items.npy": config.history_dim, job.out / "item_vectors.npy": config.output_dim}
    with ExitStack() as stack:
        items = [stack.enter_context(writing_part(path, process=process)) for path in widths]
        writer.write(items, count=job.spec.num_items, encode=encoder.items, what="item_vectors.npy")
    for path, width in widths.items():
        writer.build(path, shape=(job.spec.num_items, width))
    for split in SPLITS:
        users = store.users_with_targets(split)
        if process.is_main:
            save_npy(job.out / f"query_users_{split}.npy", users)
        path = job.out / f"query_vectors_{split}.npy"

        def encode(rows: Int64Array, users: Int64Array = users, split: EvaluationSplit = split) -> tuple[torch.Tensor, ...]:
            return (encoder.queries(users[rows], split=split),)

        with writing_part(path, process=process) as part:
            writer.write([part], count=len(users), encode=encode, what=path.name)
        writer.build(path, shape=(len(users), config.output_dim))


def _write_tables(model: DistributedModelParallel, *, job: ExportJob, writer: RankWriter, process: Process) -> None:
    state, plan = model.state_dict(), PlanFile.read(job.plan)
    for name, table in job.spec.tables.items():
        path = job.out / f"table_{name}.npy"
        with writing_part(path, process=process) as part:
            for shard in table_shards(state, table=name) if _writes(plan, name, process=process) else ():
                part.add(shard.row, shard.column, shard.weight_RD)
                writer.sign()
        writer.build(path, shape=(table.num_rows, table.dim))


def _write_sums(optimizer: CombinedOptimizer, *, job: ExportJob, writer: RankWriter, process: Process) -> None:
    """What the next night goes on with beside the rows: with its sums at zero, the first step of a row that has long been
    trained would be as large as the learning rate.
    """
    default, plan = job.training.table_optimizer, PlanFile.read(job.plan)
    for name, table in job.spec.tables.items():
        if not has_sums(job.spec, name, default=default):
            continue
        by_row = (table.settings.optimizer or default).kind == "rowwise_adagrad"
        path = job.out / f"state_{name}.npy"
        shards = sum_shards(optimizer, spec=job.spec, table=name)
        with writing_part(path, process=process) as part:
            for shard in shards if _writes(plan, name, process=process) else ():
                part.add(*sums_of(shard, by_row=by_row, dim=table.dim))
        # The columns of one row may lie on several ranks: their shares of its sum add up.
        writer.build(path, shape=(table.num_rows,) if by_row else (table.num_rows, table.dim), adds=by_row)


def _writes(plan: PlanFile, table: str, *, process: Process) -> bool:
    """Whether this rank writes its shards of a table: of one that is replicated every rank has all rows."""
    return plan.tables[table].sharding_type != "data_parallel" or process.is_main
