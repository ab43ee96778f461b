"""Stage `export`: item vectors, query vectors, tables and layers of the trained model, which the ranks write together.

Shapes: B items or users of a batch, I items, R rows of a shard, D width of a vector or of a shard.
"""

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
from recsys_core.launching.rank import Process
from recsys_core.manifests import (
    Dataset,
    ExportManifest,
    InteractionsManifest,
    RankingSettings,
    StageFolder,
    TrainManifest,
    require_no_link,
)
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.task import RetrievalTask
from recsys_core.sharding.config import PLAN_NAME
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.checkpoint import restore
from recsys_core.training.export.encoding import Encoder, RankWriter
from recsys_core.training.export.item_columns import EncodedRows
from recsys_core.training.export.ranking import RankingWriter
from recsys_core.training.export.validated_choice import choose_popularity
from recsys_core.training.job import ExportJob
from recsys_core.training.model.dense_parallel import gather_tensors
from recsys_core.training.model.optimizers import accumulator_shards, has_accumulators, make_optimizer
from recsys_core.training.model.sharded_model import build_model
from recsys_core.training.setup import TrainingSetup, export_bytes
from recsys_core.training.train import launch_job

HELD_OUT_SPLITS: tuple[EvaluationSplit, ...] = ("validation", "test")


def export_vectors(
    setup: TrainingSetup,
    *,
    dataset: Dataset,
    train: TrainManifest,
    folder: Path,
    ranking: RankingSettings | None = None,
    train_log: InteractionsManifest | None = None,
) -> ExportManifest:
    """Launch as many ranks as the training had. They write the arrays of the model together; no rank gathers a whole table.

    Args:
        ranking: settings of the rankings that the ranks also write; None for no rankings. The ranks write no rankings if the
            model has a spectral block or a validated popularity term, whose weights are chosen after the ranks have
            finished. The settings are not part of the fingerprint. If they change, the export stays valid, and the stage
            `evaluate` computes the rankings, as for an export without rankings.
        train_log: stage with the training events from which a spectral block is computed; None means the events of `dataset`.
            The export is computed again if these events change, because the fingerprint of `train` depends on them.

    Raises InputError, StageError or LaunchError as `launch` does.
    """
    config, model = setup.training, setup.model
    has_chosen_weight = model.config.spectral_block is not None or model.config.popularity.kind == "validated"
    work_folder = folder.with_name(folder.name + ".work")
    require_no_link(work_folder)
    stage = StageFolder(folder, ExportManifest, inputs=["export", model, dataset.interactions, train])
    if stage.manifest is not None:
        shutil.rmtree(work_folder, ignore_errors=True)
        return stage.manifest
    with stage.writing(min_bytes=export_bytes(model)) as output_folder:
        shutil.rmtree(work_folder, ignore_errors=True)
        work_folder.mkdir(parents=True)
        job = ExportJob(
            work_folder=work_folder,
            output_folder=output_folder,
            spec=model,
            loss=setup.loss,
            training=config,
            interactions_folder=dataset.interactions.folder,
            embeddings_folder=dataset.embeddings.folder if dataset.embeddings else None,
            features_folder=dataset.features.folder if dataset.features else None,
            plan_path=train.path(PLAN_NAME),
            checkpoint_folder=train.folder / "checkpoint",
            ranking=None if has_chosen_weight else ranking,
        )
        launch_job(job, launcher=setup.launcher, log_folder=work_folder / "logs")
        block_weight, popularity_weight = _choose_weights(
            setup, interactions=dataset.interactions, train_log=train_log, folder=output_folder
        )
        model = model.with_choices(popularity_weight=popularity_weight)
        (output_folder / "model.json").write_text(model.model_dump_json(indent=2))
        num_queries_by_split = {split: len(np.load(output_folder / f"query_users_{split}.npy")) for split in HELD_OUT_SPLITS}
        manifest = stage.commit(
            num_items=model.num_items,
            dim=model.config.output_dim,
            similarity=model.config.similarity,
            num_queries=num_queries_by_split,
            ranking=job.ranking,
            spectral_block_weight=block_weight,
            popularity_weight=popularity_weight,
        )
    shutil.rmtree(work_folder, ignore_errors=True)
    return manifest


def _choose_weights(
    setup: TrainingSetup, *, interactions: InteractionsManifest, train_log: InteractionsManifest | None, folder: Path
) -> tuple[float | None, float | None]:
    """Append the spectral block to the vectors in `folder`, and choose the weight of a validated popularity term.

    Return (weight of the block, weight of the popularity term), each None if the model has no such term.
    """
    model, validation = setup.model, setup.training.validation
    block_weight = popularity_weight = None
    if model.config.spectral_block is not None:
        from recsys_core.training.export.append_block import append_block  # imports scipy, which few models need

        block_weight = append_block(
            model,
            store=EventStore.open(interactions),
            validation=validation,
            folder=folder,
            train_store=None if train_log is None else EventStore.open(train_log),
        )
    if model.config.popularity.kind == "validated":
        store = EventStore.open(interactions)
        popularity_weight = choose_popularity(model, store=store, validation=validation, folder=folder)
    return block_weight, popularity_weight


def run_export(job: ExportJob, *, process: Process) -> None:
    """Collective. Write the files that ExportManifest lists to `job.output_folder`."""
    dataset = job.open_dataset()
    store = EventStore.open(dataset.interactions)
    feature_store = None if dataset.features is None else FeatureStore.open(dataset.features)
    sharded_model = build_model(
        job.spec,
        loss=job.loss,
        item_count_I=store.train_count_I,
        popularity_rank_by_table={},
        plan=PlanFile.read(job.plan_path),
        process=process,
        config=job.training,
    )
    optimizer = make_optimizer(sharded_model, spec=job.spec, config=job.training)
    restore(sharded_model, optimizer, checkpoint=job.checkpoint_folder)
    sharded_model.eval()
    task: RetrievalTask = get_unwrapped_module(sharded_model)
    encoder = Encoder(task, store, Assembler(user_batch_key=job.spec.user_batch_key, features=feature_store), process)
    writer = RankWriter(process, heartbeat_path=job.heartbeat_path)
    ranking_writer = None
    if job.ranking is not None:
        ranking_writer = RankingWriter(encoder, settings=job.ranking, folder=job.output_folder, writer=writer)
    with torch.no_grad():
        item_vectors = _write_item_vectors(encoder, job=job, writer=writer)
        for split in HELD_OUT_SPLITS:
            query_vectors = _write_query_vectors(encoder, split, job=job, writer=writer)
            if ranking_writer is not None:
                ranking_writer.write_model_rankings(split, items=item_vectors, query_vectors=query_vectors)
        del item_vectors, query_vectors
        if ranking_writer is not None and dataset.item_embeddings is not None:
            vectors_path = dataset.item_embeddings.vectors_path("item")
            ranking_writer.write_zero_shot_rankings(np.load(vectors_path, mmap_mode="r"))
        _write_tables(sharded_model, optimizer, job=job, writer=writer, process=process)
    layer_by_name = {}
    for tensor_name, tensor in gather_tensors(task.head.state_dict()):
        if process.is_main:
            layer_by_name[tensor_name] = tensor.detach().cpu().contiguous()
    if process.is_main:
        save_file(layer_by_name, job.output_folder / "dense.safetensors")
    dist.barrier()


def _write_item_vectors(encoder: Encoder, *, job: ExportJob, writer: RankWriter) -> EncodedRows:
    """Write the vectors of all items, and return the rows of this rank."""
    config, num_items = job.spec.config, job.spec.num_items
    dim_by_path = {
        job.output_folder / "history_items.npy": config.history_dim,
        job.output_folder / "item_vectors.npy": config.trained_dim,
    }
    encoded_rows = EncodedRows(num_items, dim=config.trained_dim, process=encoder.process)

    def encode(rows: Int64Array) -> tuple[torch.Tensor, ...]:
        history_item_BD, item_BD = encoder.encode_items(rows)
        return history_item_BD, item_BD, item_BD

    with ExitStack() as exit_stack:
        parts = [exit_stack.enter_context(writer.part(path)) for path in dim_by_path]
        writer.write([*parts, encoded_rows], num_rows=num_items, encode=encode, array_name="item_vectors.npy")
    for path, dim in dim_by_path.items():
        writer.build(path, shape=(num_items, dim))
    return encoded_rows


def _write_query_vectors(encoder: Encoder, split: EvaluationSplit, *, job: ExportJob, writer: RankWriter) -> EncodedRows:
    """Write the vectors of all users with targets in the split, and return the rows of this rank."""
    users, dim = encoder.store.users_with_targets(split), job.spec.config.trained_dim
    if encoder.process.is_main:
        save_npy(job.output_folder / f"query_users_{split}.npy", users)
    path = job.output_folder / f"query_vectors_{split}.npy"
    encoded_rows = EncodedRows(len(users), dim=dim, process=encoder.process)

    def encode(user_indices: Int64Array) -> tuple[torch.Tensor, ...]:
        query_BD = encoder.encode_queries(users[user_indices], split=split)
        return query_BD, query_BD

    with writer.part(path) as part:
        writer.write([part, encoded_rows], num_rows=len(users), encode=encode, array_name=path.name)
    writer.build(path, shape=(len(users), dim))
    return encoded_rows


def _write_tables(
    sharded_model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    *,
    job: ExportJob,
    writer: RankWriter,
    process: Process,
) -> None:
    """Write the tables, and the Adagrad accumulators, which a warm start of the next run needs."""
    tensor_by_name, sharding_plan = sharded_model.state_dict(), PlanFile.read(job.plan_path)
    for table_name, table in job.spec.tables.items():
        # Every rank has a copy of a replicated table, but only rank 0 writes it.
        is_writer = sharding_plan.tables[table_name].sharding_type != "data_parallel" or process.is_main
        table_path, state_path = (job.output_folder / f"{prefix}_{table_name}.npy" for prefix in ("table", "state"))
        with writer.part(table_path) as part:
            for shard in table_shards(tensor_by_name, table=table_name) if is_writer else ():
                part.add(shard.first_row, shard.first_column, shard.weight_RD)
                writer.touch_heartbeat()
        writer.build(table_path, shape=(table.num_rows, table.dim))
        if not has_accumulators(table):
            continue
        is_rowwise = table.optimizer.kind == "rowwise_adagrad"
        state_shards = accumulator_shards(optimizer, spec=job.spec, table=table_name)
        with writer.part(state_path) as part:
            for state_shard in state_shards if is_writer else ():
                part.add(*state_shard.table_contribution(is_rowwise=is_rowwise, dim=table.dim))
        # Several ranks may hold columns of one row. Each of them adds its share of the row's accumulator.
        state_shape = (table.num_rows,) if is_rowwise else (table.num_rows, table.dim)
        writer.build(state_path, shape=state_shape, accumulate=is_rowwise)
