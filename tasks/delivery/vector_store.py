"""Vector stores: settings and methods that every kind of store has.

Shapes: B queries, D width of the vectors.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from recsys_core.config import Settings
from recsys_core.errors import InputError, NightjarError, StageError, redacted

if TYPE_CHECKING:  # the settings are read by commands that need none of these libraries
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys_core.serving.ids import Id


ServerUrl = Annotated[str, Field(max_length=1_000, pattern=r"^https?://[^/\s@?#]+(/[^\s@?#]*)?$")]
"""Address of a server, without credentials."""


class VectorStore(Protocol):
    """A connection to a vector store. A collection holds the items of one version, and an alias names the served collection.

    Attributes:
        batch_rows: largest number of items that a call of `add` may get.
    """

    batch_rows: int

    def collections(self) -> list[str]:
        """Return the names of all collections."""

    def create(self, collection: str, schema: pa.Schema) -> None:
        """Create an empty collection. The columns of `schema` are item_id, vector, and possibly title and filter columns."""

    def add(self, collection: str, items: pa.Table) -> None:
        """Add items."""

    def finish(self, collection: str) -> None:
        """Make all added items searchable. If the store needs an index that it does not have, build the index."""

    def count(self, collection: str) -> int:
        """Return the number of items."""

    def search(self, collection: str, query_BD: NDArray[np.float32], k: int) -> list[list[Id]]:
        """Return the ids of the k items with the largest inner products for each query, best first."""

    def aliased_collection(self, alias: str) -> str | None:
        """Return the collection that an alias names; None if the alias does not exist."""

    def switch(self, alias: str, collection: str) -> None:
        """Switch an alias to `collection` in one step. Create the alias if it does not exist."""

    def drop(self, collection: str) -> None:
        """Delete a collection."""


class StoreSettings(Settings):
    """Settings of every kind of vector store.

    A kind of store is a subclass with a value of `kind`, the libraries that it needs, its location, and `connect`.

    Attributes:
        libraries: modules that the kind needs, from the pip extra `stores`; `connect` imports the first module.
    """

    libraries: ClassVar[tuple[str, ...]]

    alias: str | None = Field(
        None,
        max_length=100,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="alias that names the served collection. The collections are called `<alias>_v<version>_<space_id>`. "
        "Default: `registry.model_name`, with `_` instead of `-`",
    )
    index: Literal["exact", "approximate"] = Field(
        "exact",
        description="how the store searches: it compares a query with all vectors (`exact`), or it builds an index "
        "(`approximate`), which is faster for more than about 100,000 items",
    )
    min_overlap: float = Field(
        0.9,
        ge=0,
        le=1,
        description="smallest share of the exact best 10 items that an approximate search must return for the golden queries. "
        "An exact search must return all of them",
    )

    @property
    @abstractmethod
    def location(self) -> str:
        """Kind and place of the store, for messages."""

    @property
    def is_exact(self) -> bool:
        """Whether a search compares the query with all vectors."""
        return self.index == "exact"

    @abstractmethod
    def connect(self) -> AbstractContextManager[VectorStore]:
        """Return a context manager that opens and closes a connection."""

    def require_libraries(self) -> None:
        """Raise InputError if a library of the kind is not installed."""
        if missing_libraries := [library for library in self.libraries if find_spec(library) is None]:
            raise InputError(
                f"delivery.stores: {self.location} needs {', '.join(missing_libraries)}, which is not installed; install "
                'nightjar with the extra stores, e.g. pip install ".[stores]"'
            )

    def import_library(self) -> Any:
        """Return the first library of the kind; raise InputError if a library is not installed."""
        self.require_libraries()
        return importlib.import_module(self.libraries[0])


@contextmanager
def store_errors(location: str) -> Iterator[None]:
    """Convert any error of a store's library to a StageError with the location. The libraries have no common base class."""
    try:
        yield
    except NightjarError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())[:500]
        raise StageError(redacted(f"{location}: {type(error).__name__}: {message}")) from error
