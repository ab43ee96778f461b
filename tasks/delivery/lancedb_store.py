"""Items in LanceDB, in a folder on this machine.

LanceDB has no aliases. Instead, the table ALIASES_TABLE has one row per alias. A merge replaces a row in one commit.

Shapes: B queries, D width of the vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from recsys_core.config import Folder
from tasks.delivery.vector_store import StoreSettings, VectorStore

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys_core.serving.ids import Id

ALIASES_TABLE = "nightjar_aliases"
_TABLES_PER_PAGE = 1_000
_MAX_ALIASES_VERSION_AGE = timedelta(days=7)
"""Older versions of the table ALIASES_TABLE are deleted."""


class LanceDbSettings(StoreSettings):
    """A LanceDB database: a folder that any number of processes may read while nightjar writes it."""

    libraries: ClassVar[tuple[str, ...]] = ("lancedb",)

    kind: Literal["lancedb"] = Field("lancedb", description="LanceDB in a folder")
    folder: Folder = Field(description="folder of the database. It is created if it does not exist")

    @property
    def location(self) -> str:
        """Kind and place of the store, for messages."""
        return f"lancedb {self.folder}"

    @contextmanager
    def connect(self) -> Iterator[VectorStore]:
        """Open the database."""
        yield _LanceDb(self.import_library(), self)


class _LanceDb:
    batch_rows = 16_384

    def __init__(self, lancedb: Any, settings: LanceDbSettings) -> None:
        self._lancedb, self._settings = lancedb, settings
        self._database = lancedb.connect(str(settings.folder))

    def collections(self) -> list[str]:
        return [name for name in self._table_names() if name != ALIASES_TABLE]

    def create(self, collection: str, schema: pa.Schema) -> None:
        self._database.create_table(collection, schema=schema)

    def add(self, collection: str, items: pa.Table) -> None:
        self._database.open_table(collection).add(items)

    def finish(self, collection: str) -> None:
        table = self._database.open_table(collection)
        table.optimize()
        if not self._settings.is_exact and not table.list_indices():
            table.create_index("vector", config=self._lancedb.index.IvfFlat(distance_type="dot"))

    def count(self, collection: str) -> int:
        return int(self._database.open_table(collection).count_rows())

    def search(self, collection: str, query_BD: NDArray[np.float32], k: int) -> list[list[Id]]:
        table = self._database.open_table(collection)
        columns = ["item_id", "_distance"]  # the distance is 1 minus the inner product
        return [
            table.search(query).distance_type("dot").limit(k).select(columns).to_arrow()["item_id"].to_pylist()
            for query in query_BD
        ]

    def aliased_collection(self, alias: str) -> str | None:
        return dict(self._alias_collection_pairs()).get(alias)

    def switch(self, alias: str, collection: str) -> None:
        import pyarrow as pa

        alias_row = pa.table({"alias": [alias], "collection": [collection]})
        if ALIASES_TABLE not in self._table_names():
            self._database.create_table(ALIASES_TABLE, schema=alias_row.schema, exist_ok=True)
        aliases_table = self._database.open_table(ALIASES_TABLE)
        aliases_table.merge_insert("alias").when_matched_update_all().when_not_matched_insert_all().execute(alias_row)
        aliases_table.optimize(cleanup_older_than=_MAX_ALIASES_VERSION_AGE)

    def drop(self, collection: str) -> None:
        self._database.drop_table(collection)

    def _table_names(self) -> list[str]:
        table_names: list[str] = []
        page_token = None
        while True:
            page = self._database.list_tables(page_token=page_token, limit=_TABLES_PER_PAGE)
            table_names += page.tables
            page_token = page.page_token
            if not page_token:
                return table_names

    def _alias_collection_pairs(self) -> Iterator[tuple[str, str]]:
        if ALIASES_TABLE in self._table_names():
            alias_rows = self._database.open_table(ALIASES_TABLE).to_arrow().to_pylist()
            yield from ((row["alias"], row["collection"]) for row in alias_rows)
