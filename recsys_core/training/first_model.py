"""The model before its first step: random rows, pretrained vectors over them, zeros for users we know nothing of."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys_core.data.events import EventStore, mapped
from recsys_core.manifests import Dataset, InteractionsManifest
from recsys_core.models.initialisation import no_vectors
from recsys_core.models.spec import ModelSpec
from recsys_core.models.table_config import TEACHER
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.job_spec import TrainJob
from recsys_core.training.process_group import Process
from recsys_core.training.sharded_model import PretrainedRows, blank_users, build_model, fill_pretrained


def first_model(
    job: TrainJob,
    *,
    store: EventStore,
    dataset: Dataset,
    process: Process,
) -> DistributedModelParallel:
    """The sharded model of `job` before any step."""
    model = build_model(
        job.spec,
        loss=job.loss,
        item_count_I=store.item_count,
        ranks=frequency_ranks(job.spec, store=store, interactions=dataset.interactions),
        plan=PlanFile.read(job.plan),
        process=process,
        optimizer=job.training.table_optimizer,
        dense_parallel=job.training.dense_parallel,
        seed=job.training.seed,
    )
    model_rows: Mapping[str, PretrainedRows] = {}
    if dataset.embeddings is not None:
        model_rows = pretrained_rows(job.spec, dataset=dataset)
    fill_pretrained(model, spec=job.spec, pretrained=model_rows)
    if job.spec.config.user_id:
        known = store.train_end > store.user_offset[:-1]
        if "user" in model_rows:
            known = known | (model_rows["user"].vector_row >= 0)
        blank_users(model, known=known)
    return model


def frequency_ranks(spec: ModelSpec, *, store: EventStore, interactions: InteractionsManifest) -> dict[str, NDArray[np.int64]]:
    """For each gradually unfrozen table the place of each row by training events, 0 for the most; ties by row."""
    ranks = {}
    for name, table in spec.tables.items():
        if table.settings.transfer == "gradual":
            if name == "item":
                ranks[name] = mapped(interactions.path("item_rank.npy"))
            else:
                events_U = store.train_end - store.user_offset[:-1]
                rank = np.empty(len(events_U), np.int64)
                rank[np.argsort(-events_U, kind="stable")] = np.arange(len(events_U))
                ranks[name] = rank
    return ranks


def pretrained_rows(
    spec: ModelSpec,
    *,
    dataset: Dataset,
) -> dict[str, PretrainedRows]:
    """The vectors of each table that has some, and where in them each of its rows finds its own."""
    interactions, embeddings, features = dataset.interactions, dataset.embeddings, dataset.features
    assert embeddings is not None
    places = {"item": "vector_row.npy", "user": "user_vector_row.npy"}
    found = {}
    for name, table in spec.tables.items():
        source = "item" if name == TEACHER else name
        if not table.pretrained:
            continue
        if source in places:
            path = interactions.path(places[source]) if places[source] in interactions.files else None
        else:
            assert features is not None
            path = features.path(f"{source}.vector_row.npy")
        vector_row = no_vectors(table.rows) if path is None else mapped(path)
        found[name] = PretrainedRows(mapped(embeddings.vectors(source)), vector_row)
    return found
