"""Stage `export`: item vectors, query vectors, tables and layers of the trained model; the ranks write them together."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.optim.keyed import CombinedOptimizer

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.dataset.jagged import Int64Array
from recsys_core.dataset.layout import save_npy
from recsys_core.manifests import Dataset, ExportManifest, StageFolder, TrainManifest, fingerprint_of, require_no_link
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.task import RetrievalTask
from recsys_core.sharding.config import PLAN_NAME
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.checkpoint import restore
from recsys_core.training.dense_parallel import gather_tensors
from recsys_core.training.export.encoding import Encoder, RankWriter
from recsys_core.training.export.sharded_array import writing_part
from recsys_core.training.job.attempts import launch_job
from recsys_core.training.job.job_spec import ExportJob
from recsys_core.training.job.process_group import Process
from recsys_core.training.optimizers import accumulator_shards, has_accumulators, make_optimizer
from recsys_core.training.setup import TrainingSetup, export_bytes
from recsys_core.training.sharded_model import build_model

HELD_OUT_SPLITS: tuple[EvaluationSplit, ...] = ("validation", "test")


def export_vectors(setup: TrainingSetup, *, dataset: Dataset, train: TrainManifest, folder: Path) -> ExportManifest:
    """Launch as many ranks as the training had. Together they write the arrays of the model; no rank gathers a whole table.

    Raises InputError, StageError or LaunchError as `launch` does.
    """
    config, model = setup.training, setup.model
    work_folder = folder.with_name(folder.name + ".work")
    require_no_link(work_folder)
    fingerprint = fingerprint_of("export", model, dataset.interactions, train)
    stage = StageFolder(folder, ExportManifest, fingerprint=fingerprint)
    if stage.manifest is not None:
        shutil.rmtree(work_folder, ignore_errors=True)
        return stage.manifest
    with stage.writing(min_bytes=export_bytes(model)) as output_folder:
        shutil.rmtree(work_folder, ignore_errors=True)
        work_folder.mkdir(parents=True)
        job = ExportJob(
            work=work_folder,
            out=output_folder,
            spec=model,
            loss=setup.loss,
            training=config,
            interactions=dataset.interactions.folder,
            features=dataset.features.folder if dataset.features else None,
            plan=train.path(PLAN_NAME),
            checkpoint=train.folder / "checkpoint",
        )
        launch_job(job, launcher=setup.launcher, log_folder=work_folder / "logs")
        (output_folder / "model.json").write_text(model.model_dump_json(indent=2))
        num_queries_by_split = {split: len(np.load(output_folder / f"query_users_{split}.npy")) for split in HELD_OUT_SPLITS}
        manifest = stage.commit(
            num_items=model.num_items,
            dim=model.config.output_dim,
            similarity=model.config.similarity,
            num_queries=num_queries_by_split,
        )
    shutil.rmtree(work_folder, ignore_errors=True)
    return manifest


def run_export(job: ExportJob, *, process: Process) -> None:
    """Collective. Write the files that ExportManifest lists to `job.out`."""
    dataset = job.open_dataset()
    store = EventStore.open(dataset.interactions)
    feature_store = None if dataset.features is None else FeatureStore.open(dataset.features)
    sharded_model = build_model(
        job.spec,
        loss=job.loss,
        item_count_I=store.train_count_I,
        popularity_rank_by_table={},
        plan=PlanFile.read(job.plan),
        process=process,
        config=job.training,
    )
    optimizer = make_optimizer(sharded_model, spec=job.spec, config=job.training)
    restore(sharded_model, optimizer, checkpoint=job.checkpoint)
    sharded_model.eval()
    task: RetrievalTask = get_unwrapped_module(sharded_model)
    encoder = Encoder(task, store, Assembler(user_batch_key=job.spec.user_batch_key, features=feature_store), process)
    writer = RankWriter(process, heartbeat=job.heartbeat)
    with torch.no_grad():
        _write_item_vectors(encoder, job=job, writer=writer)
        for split in HELD_OUT_SPLITS:
            _write_query_vectors(encoder, split, job=job, writer=writer)
        _write_tables(sharded_model, job=job, writer=writer, process=process)
        _write_accumulators(optimizer, job=job, writer=writer, process=process)
    layer_by_name = {}
    for tensor_name, tensor in gather_tensors(task.head.state_dict()):
        if process.is_main:
            layer_by_name[tensor_name] = tensor.detach().cpu().contiguous()
    if process.is_main:
        save_file(layer_by_name, job.out / "dense.safetensors")
    dist.barrier()


def _write_item_vectors(encoder: Encoder, *, job: ExportJob, writer: RankWriter) -> None:
    config, process = job.spec.config, encoder.process
    dim_by_path = {job.out / "history_items.npy": config.history_dim, job.out / "item_vectors.npy": config.output_dim}
    with ExitStack() as stack:
        parts = [stack.enter_context(writing_part(path, process=process)) for path in dim_by_path]
        writer.write(parts, num_rows=job.spec.num_items, encode=encoder.encode_items, array_name="item_vectors.npy")
    for path, dim in dim_by_path.items():
        writer.build(path, shape=(job.spec.num_items, dim))


def _write_query_vectors(encoder: Encoder, split: EvaluationSplit, *, job: ExportJob, writer: RankWriter) -> None:
    users = encoder.store.users_with_targets(split)
    if encoder.process.is_main:
        save_npy(job.out / f"query_users_{split}.npy", users)
    path = job.out / f"query_vectors_{split}.npy"

    def encode(user_indices: Int64Array) -> tuple[torch.Tensor]:
        return (encoder.encode_queries(users[user_indices], split=split),)

    with writing_part(path, process=encoder.process) as part:
        writer.write([part], num_rows=len(users), encode=encode, array_name=path.name)
    writer.build(path, shape=(len(users), job.spec.config.output_dim))


def _write_tables(sharded_model: DistributedModelParallel, *, job: ExportJob, writer: RankWriter, process: Process) -> None:
    tensor_by_name, sharding_plan = sharded_model.state_dict(), PlanFile.read(job.plan)
    for table_name, table in job.spec.tables.items():
        path = job.out / f"table_{table_name}.npy"
        with writing_part(path, process=process) as part:
            for shard in (
                table_shards(tensor_by_name, table=table_name)
                if _writes_table(sharding_plan, table_name, process=process)
                else ()
            ):
                part.add(shard.row, shard.column, shard.weight_RD)
                writer.touch_heartbeat()
        writer.build(path, shape=(table.num_rows, table.dim))


def _write_accumulators(optimizer: CombinedOptimizer, *, job: ExportJob, writer: RankWriter, process: Process) -> None:
    """Write the Adagrad accumulators, which a warm start of the next run needs."""
    sharding_plan = PlanFile.read(job.plan)
    for table_name, table in job.spec.tables.items():
        if not has_accumulators(table):
            continue
        is_rowwise = table.optimizer.kind == "rowwise_adagrad"
        path = job.out / f"state_{table_name}.npy"
        shards = accumulator_shards(optimizer, spec=job.spec, table=table_name)
        with writing_part(path, process=process) as part:
            for shard in shards if _writes_table(sharding_plan, table_name, process=process) else ():
                part.add(*shard.table_contribution(is_rowwise=is_rowwise, dim=table.dim))
        # Ranks that hold different columns of a row each add their share of the row's accumulator.
        writer.build(path, shape=(table.num_rows,) if is_rowwise else (table.num_rows, table.dim), accumulate=is_rowwise)


def _writes_table(sharding_plan: PlanFile, table_name: str, *, process: Process) -> bool:
    """Return whether this rank writes its shards of the table. Every rank has a replicated table, but only rank 0 writes it."""
    return sharding_plan.tables[table_name].sharding_type != "data_parallel" or process.is_main
