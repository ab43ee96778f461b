"""A small trained-looking model, its stages and the package made of them."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.manifests import PackageManifest
from recsys_core.models.config import ModelSpec, TwoTowerConfig
from recsys_core.models.two_tower import TwoTower
from recsys_core.retrieval.config import IndexConfig, IndexKind
from recsys_core.retrieval.index import build_indexes
from recsys_core.serving.config import PackageConfig
from recsys_core.serving.package import build_package
from tests.recsys_core.evaluation.stages import export_stage, interactions_stage

ITEMS, USERS, DIM = 300, 40, 16
ITEM_IDS = [f"item-{(7 * row) % ITEMS:03d}" for row in range(ITEMS)]
USER_IDS = [9000 - 3 * row for row in range(USERS)]


class World:
    """The model in float, and the log, from which a test computes what the package should answer."""

    def __init__(self, config: TwoTowerConfig) -> None:
        random = np.random.default_rng(1)
        torch.manual_seed(1)
        self.spec = ModelSpec(config=config, users=USERS, items=ITEMS)
        self.tables = {
            name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in sorted(self.spec.tables.items())
        }
        self.towers = TwoTower(self.spec).eval()
        self.train = [random.choice(ITEMS, size, replace=False).tolist() for size in random.integers(1, 25, USERS)]
        self.train[3] = list(range(ITEMS - 2))  # has seen all but two items
        self.test = [random.choice(ITEMS, 1).tolist() for _ in range(USERS)]
        self.test[3] = [0]
        with torch.no_grad():
            self.item_vectors = self.towers.candidate(torch.from_numpy(self.tables["item"])).numpy()

    @property
    def log(self) -> list[list[int]]:
        """All events per user."""
        return [train + test for train, test in zip(self.train, self.test, strict=True)]

    def query(self, user: int | None, history: Sequence[int]) -> np.ndarray:
        """The query vector in float, pooled by hand."""
        config, zeros = self.spec.config, np.zeros(DIM, np.float32)
        recent = list(history)[-config.max_history :] if config.max_history else []
        pooled = {
            "user": self.tables["user"][user] if config.user_id and user is not None else zeros,
            "history": self.tables["item"][recent].mean(axis=0) if recent else zeros,
            "last_item": self.tables["item"][recent[-1]] if recent else zeros,
        }
        with torch.no_grad():
            vector = self.towers.query({name: torch.from_numpy(value)[None] for name, value in pooled.items()})
        return vector[0].numpy()

    def best(self, query: np.ndarray, *, seen: Sequence[int], k: int) -> list[str]:
        """Ids by a plain sort over the catalogue."""
        order = np.argsort(-(self.item_vectors @ query), kind="stable")
        return [ITEM_IDS[row] for row in order if row not in set(seen)][:k]


Build = Callable[..., tuple[World, PackageManifest]]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    def build_it(
        *, index: IndexKind = "flat", quantization: str = "none", probes: int = 1, **model: object
    ) -> tuple[World, PackageManifest]:
        folder = tmp_path_factory.mktemp("chain")
        world = World(
            TwoTowerConfig(**{"embedding_dim": DIM, "query_layers": (24, DIM), "max_history": 6, **model})  # type: ignore[arg-type]
        )
        interactions = interactions_stage(
            folder / "interactions",
            train=world.train,
            validation=[[] for _ in world.train],
            test=world.test,
            items=ITEMS,
            item_ids=ITEM_IDS,
            user_ids=USER_IDS,
        )
        export = export_stage(
            folder / "export",
            item_vectors=world.item_vectors,
            queries={"test": (range(USERS), np.stack([world.query(user, world.train[user]) for user in range(USERS)]))},
            spec=world.spec,
            tables=world.tables,
            dense=world.towers.state_dict(),
        )
        package = build_package(
            PackageConfig(quantization=quantization),  # type: ignore[arg-type]
            export=export,
            index=build_indexes(
                IndexConfig(served=index, centroids=7, probes=probes, hnsw_links=4, hnsw_build_depth=8, hnsw_search_depth=8),
                export=export,
                folder=folder / "index",
            ),
            interactions=interactions,
            evaluation=evaluate(
                EvaluationConfig(), export=export, interactions=interactions, embeddings=None, folder=folder / "evaluation"
            ),
            folder=folder / "package",
        )
        return world, package

    return build_it
