"""Items in Qdrant: on a server, or in a folder of Qdrant's local mode.

Each item is a point, whose id must be an unsigned integer or a UUID. An item id of another form is converted to a UUID of
version 5. The payload of each point has the original item id.

Shapes: B queries, D width of the vectors.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import Folder
from recsys_core.errors import StageError
from tasks import delivery
from tasks.delivery.vector_store import ServerUrl, StoreSettings, VectorStore

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys_core.serving.ids import Id

API_KEY_VARIABLE = "QDRANT_API_KEY"
_UUID_NAMESPACE = uuid.UUID("9d4f7c7c-0a1e-5f6b-8a3d-2b1c0e6f4a57")
_INDEX_TIMEOUT_S = 3_600
_TIMEOUT_S = 60


class QdrantSettings(StoreSettings):
    """A Qdrant server, or a folder of Qdrant's local mode."""

    libraries: ClassVar[tuple[str, ...]] = ("qdrant_client",)

    kind: Literal["qdrant"] = Field("qdrant", description="Qdrant on a server (`url`) or in a folder (`folder`)")
    url: ServerUrl | None = Field(
        None,
        description=f"address of a server, without credentials. An API key is read from the environment variable "
        f"`{API_KEY_VARIABLE}`. Default: `folder` is used",
    )
    folder: Folder | None = Field(
        None,
        description="folder of the local mode, for up to about 20,000 items. One process at a time can open it. Default: `url` "
        "is used",
    )

    @model_validator(mode="after")
    def _require_one_location(self) -> Self:
        if (self.url is None) == (self.folder is None):
            raise ValueError("set either url, for a Qdrant server, or folder, for Qdrant's local mode")
        return self

    @property
    def location(self) -> str:
        """Kind and place of the store, for messages."""
        return f"qdrant {self.url or self.folder}"

    @property
    def is_exact(self) -> bool:
        """Whether a search compares the query with all vectors, as the local mode always does."""
        return self.index == "exact" or self.folder is not None

    @contextmanager
    def connect(self) -> Iterator[VectorStore]:
        """Open a connection, and close it at the end."""
        library = self.import_library()
        if self.folder is not None:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            client = library.QdrantClient(path=str(self.folder))
        else:
            client = library.QdrantClient(url=self.url, api_key=os.environ.get(API_KEY_VARIABLE), timeout=_TIMEOUT_S)
        try:
            yield _Qdrant(client, library.models, self)
        finally:
            client.close()


class _Qdrant:
    batch_rows = 512
    """A batch is one JSON document, and a server accepts up to 32 MB."""

    def __init__(self, client: Any, models: Any, settings: QdrantSettings) -> None:
        self._client, self._models, self._settings = client, models, settings

    def collections(self) -> list[str]:
        return [collection.name for collection in self._client.get_collections().collections]

    def create(self, collection: str, schema: pa.Schema) -> None:
        models = self._models
        self._client.create_collection(
            collection,
            vectors_config=models.VectorParams(size=schema.field("vector").type.list_size, distance=models.Distance.DOT),
            hnsw_config=models.HnswConfigDiff(m=0) if self._settings.is_exact else None,  # without links there is no index
        )
        if self._settings.url is not None:  # the local mode has no payload indexes
            for field in schema:
                if field.name not in ("item_id", "title", "vector"):
                    payload_type = _payload_type_by_column_kind(models)[delivery.item_columns.column_kind(field.type)]
                    self._client.create_payload_index(collection, field.name, field_schema=payload_type)

    def add(self, collection: str, items: pa.Table) -> None:
        item_columns = delivery.item_columns
        points = self._models.Batch(
            ids=[_point_id(item_id) for item_id in items["item_id"].to_pylist()],
            vectors=item_columns.vectors_of(items).tolist(),
            payloads=item_columns.rows_of(item_columns.with_text_times(items)),
        )
        self._client.upsert(collection, points, wait=True)

    def finish(self, collection: str) -> None:
        deadline_s = time.monotonic() + _INDEX_TIMEOUT_S
        while (status := self._client.get_collection(collection).status) != self._models.CollectionStatus.GREEN:
            if status == self._models.CollectionStatus.RED or time.monotonic() > deadline_s:
                raise StageError(
                    f"{self._settings.location}: the collection {collection} has the status {status} instead of green; look at "
                    "the log of the server"
                )
            time.sleep(1)

    def count(self, collection: str) -> int:
        return int(self._client.count(collection, exact=True).count)

    def search(self, collection: str, query_BD: NDArray[np.float32], k: int) -> list[list[Id]]:
        requests = [self._models.QueryRequest(query=query.tolist(), limit=k, with_payload=["item_id"]) for query in query_BD]
        responses = self._client.query_batch_points(collection, requests)
        return [[point.payload["item_id"] for point in response.points] for response in responses]

    def aliased_collection(self, alias: str) -> str | None:
        collection_by_alias = {
            alias_entry.alias_name: alias_entry.collection_name for alias_entry in self._client.get_aliases().aliases
        }
        return collection_by_alias.get(alias)

    def switch(self, alias: str, collection: str) -> None:
        models = self._models
        operations = [
            models.CreateAliasOperation(create_alias=models.CreateAlias(collection_name=collection, alias_name=alias))
        ]
        if self.aliased_collection(alias) is not None:
            operations.insert(0, models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=alias)))
        self._client.update_collection_aliases(operations)  # the server applies all operations together

    def drop(self, collection: str) -> None:
        self._client.delete_collection(collection)


def _point_id(item_id: Id) -> int | str:
    is_unsigned = isinstance(item_id, int) and item_id >= 0
    return item_id if is_unsigned else str(uuid.uuid5(_UUID_NAMESPACE, str(item_id)))


def _payload_type_by_column_kind(models: Any) -> dict[str, Any]:
    """Return the type of the payload index by the kind of a filter column."""
    payload_types = models.PayloadSchemaType
    return {
        "boolean": payload_types.BOOL,
        "integer": payload_types.INTEGER,
        "float": payload_types.FLOAT,
        "time": payload_types.DATETIME,
        "text": payload_types.KEYWORD,
    }
