"""Items in Milvus: on a server, or in a file of Milvus Lite.

Shapes: B queries, D width of the vectors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import LocalFile
from recsys_core.errors import InputError, shown
from tasks import delivery
from tasks.delivery.vector_store import ServerUrl, StoreSettings, VectorStore

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys_core.serving.ids import Id

TOKEN_VARIABLE = "MILVUS_TOKEN"  # noqa: S105  the name of a variable
_MAX_TEXT_BYTES = 65_535
_FIELD_NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIMEOUT_S = 60


class MilvusSettings(StoreSettings):
    """A Milvus server, or a file of Milvus Lite."""

    libraries: ClassVar[tuple[str, ...]] = ("pymilvus",)

    kind: Literal["milvus"] = Field("milvus", description="Milvus on a server (`url`) or in a file of Milvus Lite (`file`)")
    url: ServerUrl | None = Field(
        None,
        description=f"address of a server, without credentials. A token or `user:password` is read from the environment "
        f"variable `{TOKEN_VARIABLE}`. Default: `file` is used",
    )
    file: LocalFile | None = Field(
        None,
        description="path of the Milvus Lite file, which ends in `.db`. One process at a time can open it. Default: `url` "
        "is used",
    )

    @model_validator(mode="after")
    def _require_one_location(self) -> Self:
        if (self.url is None) == (self.file is None):
            raise ValueError("set either url, for a Milvus server, or file, for Milvus Lite")
        if self.file is not None and self.file.suffix != ".db":
            raise ValueError(f"file is {str(self.file)[:80]!r}, but the path of Milvus Lite must end in .db")
        return self

    @property
    def location(self) -> str:
        """Kind and place of the store, for messages."""
        return f"milvus {self.url or self.file}"

    @contextmanager
    def connect(self) -> Iterator[VectorStore]:
        """Open a connection, and close it at the end."""
        library = self.import_library()
        if self.file is None:
            client = library.MilvusClient(self.url, token=os.environ.get(TOKEN_VARIABLE, ""), timeout=_TIMEOUT_S)
            try:
                yield _Milvus(client, library, self)
            finally:
                client.close()
            return
        from milvus_lite.server_manager import server_manager_instance

        self.file.parent.mkdir(parents=True, exist_ok=True)
        client = library.MilvusClient(str(self.file))
        try:
            yield _Milvus(client, library, self)
        finally:
            client.close()
            server_manager_instance.release_server(str(self.file))  # otherwise the file would be locked until this process ends


class _Milvus:
    batch_rows = 2_048

    def __init__(self, client: Any, library: Any, settings: MilvusSettings) -> None:
        self._client, self._library, self._settings = client, library, settings

    def collections(self) -> list[str]:
        return list(self._client.list_collections())

    def create(self, collection: str, schema: pa.Schema) -> None:
        data_types = self._library.DataType
        milvus_schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        for field in schema:
            if not _FIELD_NAME_PATTERN.fullmatch(field.name):
                raise InputError(
                    f"{self._settings.location}: the filter column {shown(field.name)} is not a valid name of a Milvus field, "
                    "which has letters, digits and _, and does not start with a digit; rename the column in the item file"
                )
            field_options: dict[str, Any] = {"is_primary": True} if field.name == "item_id" else {"nullable": True}
            if field.name == "vector":
                field_options = {"dim": field.type.list_size}
            data_type = _type_by_column_kind(data_types)[delivery.item_columns.column_kind(field.type)]
            if data_type == data_types.VARCHAR:
                field_options["max_length"] = _MAX_TEXT_BYTES
            milvus_schema.add_field(field.name, data_type, **field_options)
        index_parameters = self._client.prepare_index_params()
        index_parameters.add_index(
            "vector", index_type="FLAT" if self._settings.is_exact else "HNSW", metric_type="IP", params={}
        )
        # With a weaker consistency level, a search on a server may miss the last insert. Milvus Lite does not accept "Strong".
        consistency_options = {} if self._settings.url is None else {"consistency_level": "Strong"}
        self._client.create_collection(collection, schema=milvus_schema, index_params=index_parameters, **consistency_options)

    def add(self, collection: str, items: pa.Table) -> None:
        item_columns = delivery.item_columns
        scalar_columns = item_columns.with_finite_numbers(item_columns.with_integer_times(items)).drop_columns(["vector"])
        rows = [
            row | {"vector": vector}
            for row, vector in zip(scalar_columns.to_pylist(), item_columns.vectors_of(items), strict=True)
        ]
        self._client.insert(collection, rows)

    def finish(self, collection: str) -> None:
        self._client.flush(collection)
        self._client.load_collection(collection)

    def count(self, collection: str) -> int:
        self._client.load_collection(collection)
        return int(self._client.query(collection, filter="", output_fields=["count(*)"])[0]["count(*)"])

    def search(self, collection: str, query_BD: NDArray[np.float32], k: int) -> list[list[Id]]:
        self._client.load_collection(collection)
        hits_by_query = self._client.search(collection, data=list(query_BD), limit=k, output_fields=["item_id"])
        return [[hit["item_id"] for hit in hits] for hits in hits_by_query]

    def aliased_collection(self, alias: str) -> str | None:
        # describe_alias logs a traceback for an alias that does not exist.
        if alias not in self._client.list_aliases()["aliases"]:
            return None
        return str(self._client.describe_alias(alias)["collection_name"])

    def switch(self, alias: str, collection: str) -> None:
        if self.aliased_collection(alias) is None:
            self._client.create_alias(collection, alias)
        else:
            self._client.alter_alias(collection, alias)

    def drop(self, collection: str) -> None:
        self._client.drop_collection(collection)


def _type_by_column_kind(data_types: Any) -> dict[str, Any]:
    """Return the type of a Milvus field by the kind of a column."""
    return {
        "vector": data_types.FLOAT_VECTOR,
        "boolean": data_types.BOOL,
        "integer": data_types.INT64,
        "float": data_types.DOUBLE,
        "time": data_types.INT64,
        "text": data_types.VARCHAR,
    }
