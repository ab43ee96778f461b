"""Config of the delivery of a new champion to other systems."""

from typing import Annotated

from pydantic import Field

from recsys_core.config import OPERATIONAL, Folder, Paths, Settings
from tasks.delivery.lancedb_store import LanceDbSettings
from tasks.delivery.milvus_store import MilvusSettings
from tasks.delivery.qdrant_store import QdrantSettings

MAX_RECOMMENDED_ITEMS = 1_000_000
AnyStore = LanceDbSettings | QdrantSettings | MilvusSettings
StoreConfig = Annotated[AnyStore, Field(discriminator="kind")]


class RecommendationsConfig(Settings):
    """Recommendations for many users, written to parquet files: by `nightjar recommend`, and for each new champion."""

    folder: Annotated[Folder | None, OPERATIONAL] = Field(
        None,
        description="folder for the recommendations of the champion. Its files are replaced when another version becomes "
        "champion (by a run, a promotion or a rollback), and after a run if a setting of `delivery.recommendations` has "
        "changed. Default: recommendations are written only by `nightjar recommend --out`",
    )
    user_paths: Annotated[Paths, OPERATIONAL] = Field(
        (),
        description="parquet files with one row per query: the column `user_id`, the column `history` (a list of item ids), or "
        "columns of features. Default: all users of the model",
    )
    k: Annotated[int, OPERATIONAL] = Field(
        100, ge=1, le=MAX_RECOMMENDED_ITEMS, description="number of items that each user gets"
    )
    exclude_seen: Annotated[bool, OPERATIONAL] = Field(True, description="whether the items of a user's history are left out")


class DeliveryConfig(Settings):
    """Systems outside of MLflow that get the champion."""

    recommendations: RecommendationsConfig = Field(
        default_factory=RecommendationsConfig,
        description="the champion's recommendations for many users, in parquet files",
    )
    stores: tuple[StoreConfig, ...] = Field(
        (),
        max_length=20,
        description="vector stores that get the items of each new champion: a list of groups of settings, each with a `kind`. "
        "Default: none",
    )

    def require_libraries(self) -> None:
        """Raise InputError if a library of a store is not installed."""
        for store in self.stores:
            store.require_libraries()
