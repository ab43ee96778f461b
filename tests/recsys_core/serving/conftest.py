"""A packaged model with random weights, and the recommendations that a test expects from it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.manifests import Dataset, IngestedFeature, PackageManifest
from recsys_core.models.config import PackageConfig, TowerConfig, TwoTowerConfig
from recsys_core.models.ensemble import make_candidate_tower, make_query_tower
from recsys_core.models.score_terms import append_popularity, item_popularity
from recsys_core.models.spec import ModelSpec
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.index import build_indexes
from recsys_core.serving.description import description_sha256
from recsys_core.serving.package import build_package
from recsys_core.serving.quantise import ServedQueryTower, build_tower
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.evaluation.stage_folders import write_export_stage, write_features_stage, write_interactions_stage
from tests.recsys_core.ingest.random_features import feature_store, ingested_features, values_of

NUM_ITEMS, NUM_USERS, DIM = 300, 40, 16
ITEM_IDS = [f"item-{(7 * row) % NUM_ITEMS:03d}" for row in range(NUM_ITEMS)]
"""Id of each item row; the ids are not sorted."""
USER_IDS = [9000 - 3 * row for row in range(NUM_USERS)]

USER_FEATURES = ("user.single", "user.list", "user.weighted_list", "user.number")
CONTEXT_FEATURES = ("context.single", "context.number")
"""Features of an event; at serving time only the request has them."""

GENRES = ("rock", "pop", None)
SINCE_TIMES = [datetime(2026, 1, 1) + timedelta(days=row) for row in range(NUM_ITEMS)]
ITEM_TABLE_ROWS = range(NUM_ITEMS - 10)
"""Item rows that the item table contains; it lacks the last 10 items."""
ITEM_FILES = {
    "item_titles.parquet": pa.table(
        {"row": range(0, NUM_ITEMS, 2), "title": [f"title {row}" for row in range(0, NUM_ITEMS, 2)]}
    ),
    "item_columns.parquet": pa.table(
        {
            "row": ITEM_TABLE_ROWS,
            "genre": [GENRES[row % 3] for row in ITEM_TABLE_ROWS],
            "price": [float(row % 50) for row in ITEM_TABLE_ROWS],
            "stock": [row % 7 for row in ITEM_TABLE_ROWS],
            "is_new": [row % 2 == 0 for row in ITEM_TABLE_ROWS],
            "since": pa.array([SINCE_TIMES[row] for row in ITEM_TABLE_ROWS], pa.timestamp("us")),
        }
    ),
}
"""Titles and filter columns of the items, as the features stage stores them."""

INDEX_KINDS = ("flat", "ivf_flat", "ivf_sq8", "ivf_pq", "opq_pq", "pq_fastscan", "hnsw")

FILTERS_AND_ROWS: list[tuple[dict[str, Any], list[int]]] = [
    ({"genre": {"in": ["rock", "jazz"]}}, [row for row in ITEM_TABLE_ROWS if row % 3 == 0]),
    (
        {"genre": "pop", "price": {"ge": 10, "lt": 12.5}},
        [row for row in ITEM_TABLE_ROWS if row % 3 == 1 and row % 50 in (10, 11, 12)],
    ),
    ({"stock": [2, 3]}, [row for row in ITEM_TABLE_ROWS if row % 7 in (2, 3)]),
    ({"is_new": True, "stock": {"gt": 4, "le": 5}}, [row for row in ITEM_TABLE_ROWS if row % 2 == 0 and row % 7 == 5]),
    (
        {"since": {"since": "2026-10-01T02:00:00+02:00"}},
        [row for row in ITEM_TABLE_ROWS if SINCE_TIMES[row] >= datetime(2026, 10, 1)],
    ),
    ({"price": {"gt": 1000}}, []),
]
"""Filters, each with the item rows that satisfy it."""


def small_model_config(
    *, history: dict[str, object] | None = None, layers: Sequence[int] = (24, DIM), **model_settings: object
) -> TwoTowerConfig:
    """Return the config of a model that reads the last 6 items of a history.

    Args:
        history: settings that complete or replace the length of 6, such as `{"pooling": "recency"}`.
        layers: layer widths of the query tower.
        model_settings: other settings of the model, such as `similarity="dot"`.
    """
    return TwoTowerConfig(
        **{
            "embedding_dim": DIM,
            "history": {"length": 6} | (history or {}),
            "query": TowerConfig(layers=layers, dropout=0.5),
            **model_settings,
        }
    )


RowsAndWeights = tuple[list[int], list[float] | None]
"""Table rows and weights of one feature in a request; the weights are None if the feature has none."""


class ExportedModel:
    """A float model with random weights and a random log, from which a test computes the expected recommendations.

    Attributes:
        ingested_by_feature: manifest entry of each feature.
        features: table rows and weights of each feature.
        tables: weights of each embedding table.
        train: item rows of each user's events before the test event.
        test: for each user, a list with the item row of the test event.
        history_items: vectors that represent the items in histories [items, dimensions].
        item_vectors: vectors with which a query vector is multiplied [items, dimensions].
    """

    def __init__(self, config: TwoTowerConfig, *, features: Sequence[str] = ()) -> None:
        random = np.random.default_rng(1)
        torch.manual_seed(1)
        self.ingested_by_feature = ingested_features(*features) if features else {}
        self.features = FeatureStore(
            {
                key: value
                for key, value in feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=1).feature_by_key.items()
                if key in features
            }
        )
        self.spec = ModelSpec.sized(
            config, num_users=NUM_USERS, num_items=NUM_ITEMS, ingested_by_feature=self.ingested_by_feature
        )
        self.tables = {
            name: random.normal(0, 0.3, (table.num_rows, table.dim)).astype(np.float32)
            for name, table in sorted(self.spec.tables.items())
        }
        self.towers = nn.ModuleDict({"query": make_query_tower(self.spec), "item": make_candidate_tower(self.spec)}).eval()
        for name, parameter in self.towers.named_parameters():
            if "recency" in name or "attention" in name or "popularity" in name:
                nn.init.normal_(parameter)
        self.train = [random.choice(NUM_ITEMS, size, replace=False).tolist() for size in random.integers(1, 25, NUM_USERS)]
        self.train[3] = list(range(NUM_ITEMS - 2))  # user 3 has seen all but two items
        self.test = [random.choice(NUM_ITEMS, 1).tolist() for _ in range(NUM_USERS)]
        self.test[3] = [0]
        with torch.no_grad():
            item_vector_ID = self.towers["item"].embed({"item": torch.from_numpy(self.tables["item"])})
            candidate_ID = self.towers["item"](item_vector_ID, features={})
        histories_use_candidate_tower = config.history.item_representation == "candidate_tower"
        self.history_items = (candidate_ID if histories_use_candidate_tower else item_vector_ID).numpy()
        if config.has_popularity:
            count_I = np.bincount(np.concatenate(self.train), minlength=NUM_ITEMS)
            candidate_ID = append_popularity(candidate_ID, torch.from_numpy(item_popularity(count_I)))
        self.item_vectors = candidate_ID.numpy()

    @property
    def log(self) -> list[list[int]]:
        """Item rows of all events of each user."""
        return [train + test for train, test in zip(self.train, self.test, strict=True)]

    @property
    def query_tables(self) -> dict[str, np.ndarray]:
        """Tables that the query tower reads in addition to the history: the user embedding and the features."""
        return {name: self.tables[name] for name in self.spec.on_side("query")}

    @property
    def user_features(self) -> FeatureStore:
        """The features of users, which a package contains."""
        return FeatureStore({key: value for key, value in self.features.feature_by_key.items() if key.startswith("user.")})

    def query_vector(
        self, user: int | None, history: Sequence[int], *, given_features: Mapping[str, RowsAndWeights] | None = None
    ) -> np.ndarray:
        """Return the query vector of the float model, with features that are pooled in NumPy.

        Args:
            user: user row; None for an unknown user, who has row 0 of a feature with a single value, and no other feature.
            history: item rows, oldest first.
            given_features: features of the request, which replace the features of the user.
        """
        length = self.spec.config.history.length
        recent_rows = list(history)[-length:] if length else []
        pooled_by_table = {
            name: torch.from_numpy(self._pooled_vector(name, user, (given_features or {}).get(name)))[None]
            for name in self.query_tables
        }
        items = torch.from_numpy(self.history_items)
        with torch.no_grad():
            vector = self.towers["query"](
                items,
                torch.tensor(recent_rows, dtype=torch.int64),
                torch.tensor([0, len(recent_rows)]),
                features=pooled_by_table,
            )
        return vector[0].numpy()

    def _pooled_vector(self, table_name: str, user: int | None, given_feature: RowsAndWeights | None) -> np.ndarray:
        """Return the weighted sum of the table rows of a feature. For a list feature, divide it by the total weight."""
        table = self.tables[table_name]
        if given_feature is None and (user is None or table_name.startswith("context.")):
            return table[0] if table_name.endswith(".single") else np.zeros(table.shape[1], np.float32)
        if table_name == "user":
            return table[user]
        rows, weights = values_of(self.features, table_name, user) if given_feature is None else given_feature  # type: ignore[arg-type]
        if not rows:
            return np.zeros(table.shape[1], np.float32)
        weight_L = np.array(weights if weights else [1.0] * len(rows), np.float32)
        weighted_sum_D = table[rows].T @ weight_L
        return (weighted_sum_D / weight_L.sum(dtype=np.float64) if "list" in table_name else weighted_sum_D).astype(np.float32)

    def best_ids(
        self, query_vector: np.ndarray, *, seen_rows: Sequence[int], k: int, allowed_rows: Collection[int] = range(NUM_ITEMS)
    ) -> list[str]:
        """Return the ids of the k best allowed and unseen items, from a sort of the whole catalogue."""
        candidate_rows = {*allowed_rows} - {*seen_rows}
        sorted_rows = np.argsort(-(self.item_vectors @ query_vector), kind="stable")
        return [ITEM_IDS[row] for row in sorted_rows if row in candidate_rows][:k]


def query_tower_of(exported_model: ExportedModel, *, quantization: str = "fp32") -> ServedQueryTower:
    """Return the query tower as a package stores it."""
    return build_tower(
        exported_model.spec,
        history_items=exported_model.history_items,
        tables=exported_model.query_tables,
        dense=exported_model.towers.state_dict(),
        quantization=quantization,  # type: ignore[arg-type]
    )


def _vocabulary_by_file_name(ingested_by_feature: Mapping[str, IngestedFeature]) -> dict[str, pa.Table]:
    """Return the vocabularies of the features that are not numeric. The value in row n is "<key> n"."""
    return {
        f"{key}.vocabulary.parquet": pa.table({"value": [None, *(f"{key} {row}" for row in range(1, feature.num_rows))]})
        for key, feature in ingested_by_feature.items()
        if feature.kind != "numeric"
    }


class PackagedModel(NamedTuple):
    """A model and the manifest of its package."""

    exported_model: ExportedModel
    package: PackageManifest


ModelBuilder = Callable[..., PackagedModel]


@pytest.fixture(scope="session")
def build_packaged_model(tmp_path_factory: pytest.TempPathFactory) -> ModelBuilder:
    """A function that writes the stages and the package of a model. `model_settings`: arguments of `small_model_config`."""

    def build(
        *,
        index_kind: str = "flat",
        num_index_shards: int = 1,
        item_vectors: str = "fp32",
        quantization: str = "none",
        users: str = "stored",
        exports: Sequence[str] = (),
        popularity_by: str | None = None,
        popularity_min_events: int = 50,
        nprobe: int = 1,
        features: Sequence[str] = (),
        item_files: Mapping[str, pa.Table] | None = None,
        **model_settings: object,
    ) -> PackagedModel:
        folder = tmp_path_factory.mktemp("stages")
        exported_model = ExportedModel(small_model_config(**model_settings), features=features)  # type: ignore[arg-type]
        interactions = write_interactions_stage(
            folder / "interactions",
            train=exported_model.train,
            validation=[[] for _ in exported_model.train],
            test=exported_model.test,
            num_items=NUM_ITEMS,
            item_ids=ITEM_IDS,
            user_ids=USER_IDS,
        )
        export = write_export_stage(
            folder / "export",
            item_vectors=exported_model.item_vectors,
            queries={
                "test": (
                    range(NUM_USERS),
                    np.stack([exported_model.query_vector(user, exported_model.train[user]) for user in range(NUM_USERS)]),
                )
            },
            spec=exported_model.spec,
            tables=exported_model.tables,
            history_items=exported_model.history_items,
            dense=exported_model.towers.state_dict(),
        )
        package = build_package(
            PackageConfig(
                quantization=quantization,  # type: ignore[arg-type]
                users=users,  # type: ignore[arg-type]
                item_vectors=item_vectors,  # type: ignore[arg-type]
                popularity_by=popularity_by,
                popularity_min_events=popularity_min_events,
                exports=exports,  # type: ignore[arg-type]
            ),
            export=export,
            index=build_indexes(
                IndexConfig(
                    served_kind=index_kind,
                    shards=num_index_shards,
                    nlist=7,
                    nprobe=nprobe,
                    hnsw_m=4,
                    ef_construction=8,
                    ef_search=8,
                ),
                export=export,
                folder=folder / "index",
            ),
            dataset=Dataset(
                interactions,
                features=write_features_stage(
                    folder / "features",
                    exported_model.features,
                    ingested_by_feature=exported_model.ingested_by_feature,
                    table_by_file_name=_vocabulary_by_file_name(exported_model.ingested_by_feature) | dict(item_files or {}),
                )
                if features or item_files
                else None,
            ),
            evaluation=evaluate(EvaluationConfig(), export=export, dataset=Dataset(interactions), folder=folder / "evaluation"),
            folder=folder / "package",
        )
        return PackagedModel(exported_model, package)

    return build


@pytest.fixture(scope="module")
def flat_model(build_packaged_model: ModelBuilder) -> PackagedModel:
    return build_packaged_model(index_kind="flat")


@pytest.fixture(scope="module")
def retriever(flat_model: PackagedModel) -> Retriever:
    return load_retriever(flat_model.package)


def load_retriever(package: PackageManifest) -> Retriever:
    return Retriever.load(package.folder / "package", sha256=description_sha256(package))


def seen_ids_of(exported_model: ExportedModel, user: int) -> set[str]:
    return {ITEM_IDS[row] for row in exported_model.log[user]}
