"""A small pipeline from parquet files to a package, in which a model with random weights replaces the training."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.dataset.loader import query_batch
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.ingest import InputConfig
from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import Dataset, PackageManifest
from recsys_core.models.config import PackageConfig, TwoTowerConfig
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import EmbeddingTables, parameter_name
from recsys_core.models.tables.initialisation import scale_to_norm
from recsys_core.models.tables.table_config import TableConfig, random_norm
from recsys_core.models.task import RetrievalHead, RetrievalTask
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.index import build_indexes
from recsys_core.serving.package import build_package
from tests.recsys_core.evaluation.stage_folders import write_export_stage

ITEMS, EVENT_ITEMS, NUM_USERS, VECTOR_DIM = range(1000, 1300), range(1000, 1240), 60, 12
"""Ids of all items, and of the items that may have events. The other items are in the catalogue because of their vectors."""
GENRES = ("rock", "pop", "jazz", None)
MODEL = {
    "embedding_dim": 8,
    "history": {"length": 5, "item_representation": "candidate_tower"},
    "candidate": {"layers": [10, 8]},
    "query": {"layers": [10, 8]},
}
FEATURES = (
    {"name": "genre"},
    {"name": "tags", "kind": "list"},
    {"name": "price", "kind": "numeric", "standardise": True},
    {"name": "size", "kind": "numeric", "column": "price", "buckets": 4},
    {"name": "brand", "kind": "categorical", "hash_rows": 5},
)


def write_vectors(
    folder: Path, ids: Iterable[int], *, dim: int = VECTOR_DIM, seed_by_id: Mapping[int, int] | None = None
) -> None:
    """Write random vectors to vectors.parquet. The seed of an item's vector is its id, or the seed in `seed_by_id`."""
    id_list = list(ids)
    seeds = [(seed_by_id or {}).get(item_id, item_id) for item_id in id_list]
    vectors = [np.random.default_rng(seed).normal(size=dim).astype(np.float32) for seed in seeds]
    columns = {"item_id": pa.array(id_list, pa.int64()), "vector": pa.array(vectors, pa.list_(pa.float32()))}
    pq.write_table(pa.table(columns), folder / "vectors.parquet")


def write_items(folder: Path, ids: Iterable[int], **changed_columns: dict[int, Any]) -> None:
    """Write items.parquet. changed_columns: changed values of a column by item id."""
    id_list = list(ids)
    columns: dict[str, list[Any]] = {
        "item_id": id_list,
        "title": [f"item {item_id}" if item_id % 5 else None for item_id in id_list],
        "genre": [GENRES[item_id % 4] for item_id in id_list],
        "tags": [[f"tag {item_id % 3}", f"tag {item_id % 7}"][: item_id % 4] for item_id in id_list],
        "brand": [f"brand {item_id % 9}" for item_id in id_list],
        "price": [float(item_id % 50) if item_id % 11 else None for item_id in id_list],
        "in_stock": [item_id % 6 > 0 for item_id in id_list],
    }
    for name, value_by_id in changed_columns.items():
        columns[name] = [value_by_id.get(item_id, value) for item_id, value in zip(id_list, columns[name], strict=True)]
    array_by_name = {
        name: pa.array(column_values, pa.list_(pa.string()) if name == "tags" else None)
        for name, column_values in columns.items()
    }
    pq.write_table(pa.table(array_by_name), folder / "items.parquet")


def inputs_of(
    folder: Path, *, has_vectors: bool = True, features: Sequence[dict[str, Any]] | None = FEATURES, shards: int = 1
) -> InputConfig:
    """Return the input settings for the files in `folder`. features: features of items; None for no table of items."""
    items_settings = {
        "paths": str(folder / "items.parquet"),
        "id_column": "item_id",
        "title_column": "title",
        "filter_columns": ["genre", "in_stock"],
        "features": features,
    }
    vectors_config = EmbeddingsConfig(paths=(str(folder / "vectors.parquet"),), vector_column="vector")
    return InputConfig(
        InteractionsConfig.model_validate(
            {
                "paths": str(folder / "log.parquet"),
                "order_column": "position",
                "split": {"kind": "leave_last_out"},
                "shards": shards,
            }
        ),
        (vectors_config,) if has_vectors else (),
        None if features is None else FeaturesConfig.model_validate({"items": items_settings}),
        None,
    )


class SmallPipeline(NamedTuple):
    """The inputs, the dataset and the package of a model, and the task that computed its vectors."""

    input_folder: Path
    inputs: InputConfig
    package: PackageManifest
    task: RetrievalTask
    dataset: Dataset

    @property
    def package_folder(self) -> Path:
        return self.package.folder / "package"


def build_pipeline(
    folder: Path,
    *,
    has_vectors: bool = True,
    features: Sequence[dict[str, Any]] | None = FEATURES,
    transfer: str = "frozen",
    index: str | dict[str, Any] = "flat",
    model: dict[str, Any] | None = None,
    shards: int = 1,
    index_shards: int = 1,
    **package: Any,
) -> SmallPipeline:
    """Write the input files, and run the pipeline on them.

    Args:
        transfer: use of the pretrained vectors in the table `item`.
        model: settings that differ from MODEL.
        shards: number of shards of the log.
        package: settings of the package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    histories = [rng.choice(EVENT_ITEMS, length, replace=False) for length in rng.integers(4, 20, NUM_USERS)]
    log_columns = {
        "user_id": [f"user-{user}" for user, history in enumerate(histories) for _ in history],
        "item_id": np.concatenate(histories),
        "position": np.concatenate([np.arange(len(history)) for history in histories]),
    }
    pq.write_table(pa.table(log_columns), folder / "log.parquet")
    write_vectors(folder, ITEMS)
    write_items(folder, ITEMS)
    inputs = inputs_of(folder, has_vectors=has_vectors, features=features, shards=shards)
    dataset = _ingest(inputs, folder)
    config_by_table = {"item": TableConfig(transfer=transfer)} if has_vectors else {}  # type: ignore[arg-type]
    spec = ModelSpec.of(TwoTowerConfig.model_validate({**MODEL, **(model or {})}), dataset=dataset, tables=config_by_table)
    task = _make_task(spec, dataset)
    export = _write_export(task, dataset, folder / "export")
    package_manifest = build_package(
        PackageConfig(**package),
        export=export,
        index=build_indexes(
            IndexConfig.model_validate({"served": index, "recall_k": 20, "shards": index_shards}),
            export=export,
            folder=folder / "index",
        ),
        dataset=dataset,
        evaluation=evaluate(EvaluationConfig(), export=export, dataset=dataset, folder=folder / "evaluation"),
        folder=folder / "package",
    )
    return SmallPipeline(folder, inputs, package_manifest, task, dataset)


def _ingest(inputs: InputConfig, folder: Path) -> Dataset:
    """Ingest vectors, log and features of a config as a run does."""
    embeddings = ingest_embeddings(inputs.embeddings, folder=folder / "embeddings") if inputs.embeddings else None
    interactions = ingest_interactions(inputs.interactions, embeddings=embeddings, folder=folder / "interactions")
    dataset = Dataset(interactions, embeddings=embeddings)
    if inputs.features is None:
        return dataset
    features = ingest_features(
        inputs.features, dataset=dataset, previous=None, memory_limit="500MB", threads=1, folder=folder / "features"
    )
    return Dataset(interactions, embeddings=embeddings, features=features)


def _make_task(spec: ModelSpec, dataset: Dataset) -> RetrievalTask:
    """Return a task with random weights. Its table `item` has the pretrained vectors if the dataset has any."""
    torch.manual_seed(0)
    store = EventStore.open(dataset.interactions)
    head = RetrievalHead(
        spec, loss=LossConfig(), item_count_I=store.train_count_I, popularity_rank={}, weight_decay={}, group=None
    )
    task = RetrievalTask(head, device=torch.device("cpu"))
    task.embedding_tables = EmbeddingTables(spec, device=torch.device("cpu"))
    for parameter in (*task.embedding_tables.parameters(), *head.parameters()):
        nn.init.normal_(parameter, std=0.5)
    if dataset.embeddings is not None:
        vector_row_I, item_weight_ID = store.vector_rows("item"), _table_weight(task, "item")
        assert vector_row_I is not None
        vector_ID = torch.from_numpy(np.load(dataset.embeddings.vectors_path("item"))[vector_row_I])
        with torch.no_grad():
            norm = random_norm(spec.tables["item"].settings.init_std, VECTOR_DIM)
            item_weight_ID.copy_(scale_to_norm(vector_ID, norm=norm).tile(1, spec.config.num_members))
    return task.eval()


def _table_weight(task: RetrievalTask, table_name: str) -> torch.Tensor:
    return task.embedding_tables.get_parameter(parameter_name(task.head.spec, table_name))


def _write_export(task: RetrievalTask, dataset: Dataset, folder: Path) -> Any:
    """Write the export of an untrained model: its vectors of all items and of the test users."""
    store = EventStore.open(dataset.interactions)
    features = None if dataset.features is None else FeatureStore.open(dataset.features)
    assembler = Assembler(user_batch_key=task.head.spec.user_batch_key, features=features)
    spec, user_U = task.head.spec, store.users_with_targets("test")
    with torch.no_grad():
        history_ID, vector_ID = (
            encoded_ID.numpy() for encoded_ID in task.encode_items(assembler.item_batch(np.arange(spec.num_items)))
        )
        batch = query_batch(store, user_U, "test", assembler=assembler, max_history=spec.history_length)
        query_BD = task.encode_queries(batch).numpy()
    return write_export_stage(
        folder,
        item_vectors=vector_ID,
        queries={"validation": ([], query_BD[:0]), "test": (user_U.tolist(), query_BD)},
        spec=spec,
        tables={table_name: _table_weight(task, table_name).detach().numpy() for table_name in spec.tables},
        history_items=history_ID,
        dense=task.head.state_dict(),
        spectral_block_store=None if spec.config.spectral_block is None else store,
    )
