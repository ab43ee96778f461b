"""Config of the delivery: the vector stores that follow the champion."""

from typing import Annotated

from pydantic import Field

from recsys_core.config import Settings
from tasks.delivery.lancedb_store import LanceDbSettings
from tasks.delivery.milvus_store import MilvusSettings
from tasks.delivery.qdrant_store import QdrantSettings

AnyStore = LanceDbSettings | QdrantSettings | MilvusSettings
StoreConfig = Annotated[AnyStore, Field(discriminator="kind")]


class DeliveryConfig(Settings):
    """Systems outside of MLflow that get the champion."""

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
