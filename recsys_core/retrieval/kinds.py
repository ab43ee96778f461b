"""Exact search and HNSW as kinds of FAISS indexes, and AnyIndexKind, the union type of all kinds.

A new kind is a subclass of IndexKind and a member of AnyIndexKind. No other module distinguishes the kinds, except that
auto.py lists the kinds that are tried for a catalogue.

Shapes: B queries, D width, N rows returned by an index.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from recsys_core.retrieval.compressed import IvfPq, IvfSq8, OpqPq, PqFastScan
from recsys_core.retrieval.index_kind import ROW_NUMBER_BYTES, VALUE_BYTES, IndexKind, faiss_module, search_vectors
from recsys_core.retrieval.ivf import IvfFlat

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_SINGLE_THREAD_ITEMS = 100_000
"""Up to this number of items, one thread builds HNSW. Its links then do not depend on timing, so a rerun is identical."""
MIN_EF_SEARCH = 8
"""Smallest size of the candidate list. If ef_search is None, a search uses the larger of this size and `depth`."""
MAX_EF_SEARCH = 100_000
EF_SEARCH_PER_DEPTH = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Tested sizes of the candidate list, divided by the number of requested items (`depth`)."""


class Flat(IndexKind):
    """Exact search: every query is compared with every vector."""

    has_readable_vectors: ClassVar[bool] = True
    has_exact_vectors: ClassVar[bool] = True

    kind: Literal["flat"] = Field("flat", description="exact search, which compares every query with all vectors")

    def min_bytes(self, *, num_items: int, dim: int) -> int:
        """Return the bytes of the vectors and their row numbers."""
        return num_items * (VALUE_BYTES * dim + ROW_NUMBER_BYTES)

    def empty_index(self, dim: int) -> Any:
        """Return an IndexFlatIP."""
        return faiss_module().IndexFlatIP(dim)


class Hnsw(IndexKind):
    """Search of a graph that links each vector to similar vectors."""

    has_readable_vectors: ClassVar[bool] = True
    has_exact_vectors: ClassVar[bool] = True

    kind: Literal["hnsw"] = Field("hnsw", description="approximate search in a graph that links similar vectors (HNSW)")
    hnsw_m: int = Field(32, ge=4, le=1_024, description="number of links per node of an HNSW index (M)")
    ef_construction: int = Field(
        200, ge=8, le=100_000, description="size of the candidate list while an HNSW index is built (efConstruction)"
    )
    ef_search: int | None = Field(
        None,
        ge=MIN_EF_SEARCH,
        le=MAX_EF_SEARCH,
        description="size of the candidate list while an HNSW index is searched (efSearch). Default: the smallest tested size "
        "that reaches `index.recall_target`",
    )

    def search_variants(self, depth: int) -> Iterator[list[Self]]:
        """Yield one series: candidate lists of `depth` to 32 * `depth` items, at most MAX_EF_SEARCH.

        If ef_search is set, yield only this size.

        >>> [[variant.ef_search for variant in series] for series in Hnsw().search_variants(100)]
        [[100, 150, 200, 300, 400, 600, 800, 1200, 1600, 2400, 3200]]
        """
        sizes = (int(max(depth, MIN_EF_SEARCH) * factor) for factor in EF_SEARCH_PER_DEPTH)
        distinct_sizes = dict.fromkeys(min(size, MAX_EF_SEARCH) for size in sizes)
        ef_searches = distinct_sizes if self.ef_search is None else [self.ef_search]
        yield [self.model_copy(update={"ef_search": ef_search}) for ef_search in ef_searches]

    def min_bytes(self, *, num_items: int, dim: int) -> int:
        """Return the bytes of the vectors, their row numbers and the links."""
        return num_items * (VALUE_BYTES * dim + ROW_NUMBER_BYTES + 8 * self.hnsw_m)

    def empty_index(self, dim: int) -> Any:
        """Return an IndexHNSWFlat."""
        faiss = faiss_module()
        index = faiss.IndexHNSWFlat(dim, self.hnsw_m, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = self.ef_construction
        return index

    def uses_one_thread(self, num_items: int) -> bool:
        """Return whether there are at most MAX_SINGLE_THREAD_ITEMS items."""
        return num_items <= MAX_SINGLE_THREAD_ITEMS

    def search_parameters(self, depth: int, selector: Any = None) -> Any:
        """Return the FAISS parameters with the larger of ef_search and `depth`, and the selector."""
        return faiss_module().SearchParametersHNSW(efSearch=max(self.ef_search or MIN_EF_SEARCH, depth), sel=selector)

    def search_exhaustively(
        self, index: Any, query_BD: "NDArray[np.float32]", depth: int, selector: Any = None
    ) -> "tuple[NDArray[np.float32], NDArray[np.int64]]":
        """Search the vectors without the graph."""
        storage = faiss_module().downcast_index(index.index).storage
        return search_vectors(storage, index, query_BD, depth, faiss_module().SearchParameters(sel=selector))


AnyIndexKind = Annotated[
    Flat | IvfFlat | IvfSq8 | IvfPq | OpqPq | PqFastScan | Hnsw,
    Field(discriminator="kind"),
]
