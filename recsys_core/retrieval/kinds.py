"""The kinds of FAISS indexes: the settings of each kind, and how it is built, searched and measured.

A new kind is a subclass of IndexKind and a member of AnyIndexKind. No other module distinguishes the kinds.

Shapes: B queries, D width, N rows returned by an index.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field

from recsys_core.config import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_ITEMS_PER_CENTROID = 39
"""With fewer items per centroid, FAISS warns that k-means is undertrained."""
MAX_VECTORS_PER_CENTROID = 256
"""FAISS trains k-means on at most this many vectors per centroid."""
MIN_CENTROIDS = 256
"""Fewer cells are trained on a sample for this many centroids."""
MAX_SINGLE_THREAD_ITEMS = 100_000
"""Up to this number of items, one thread builds HNSW. Its links then do not depend on timing, so a rerun is identical."""
DEFAULT_NPROBE, MIN_EF_SEARCH = 16, 8
"""Search settings of an index that is not tuned."""
VALUE_BYTES = 4
ROW_NUMBER_BYTES = 8


class IndexKind(Settings):
    """The methods of a kind. These defaults are for an index that has no training and no search parameters.

    The settings of a kind except `kind` are integers. They are the parameters of an IndexReport and of package.json.
    """

    def problem(self, dim: int) -> str | None:
        """Return the problem of the settings with vectors of width `dim`, and its fix; None if there is no problem."""
        return None

    def fitted(self, num_items: int) -> Self:
        """Return the settings for a catalogue of `num_items` items. Some settings are limited by the number of items."""
        return self

    def search_variants(self, depth: int) -> Iterator[Self]:
        """Yield the settings with increasing recall and latency of a search for `depth` items. Settings of the user stay."""
        yield self

    @abstractmethod
    def min_bytes(self, *, num_items: int, dim: int) -> int:
        """Return a lower bound of the size of the index file."""

    @abstractmethod
    def empty_index(self, dim: int) -> Any:
        """Return a FAISS index for inner products, without vectors and untrained."""

    def num_training_vectors(self) -> int:
        """Return the number of vectors on which FAISS trains the index at most; 0 for an index without training."""
        return 0

    def uses_one_thread(self, num_items: int) -> bool:
        """Return whether one thread adds the vectors, because the index depends on the timing of the threads otherwise."""
        return False

    def search_parameters(self, depth: int) -> Any:
        """Return the FAISS parameters of a search for `depth` items."""
        return None

    def search_exhaustively(
        self, index: Any, query_BD: "NDArray[np.float32]", depth: int
    ) -> "tuple[NDArray[np.float32], NDArray[np.int64]]":
        """Return inner products [B, N] and item rows [B, N] after a comparison of the queries with all vectors of `index`.

        index: an IndexIDMap around the FAISS index of this kind.
        """
        scores_and_rows: tuple[NDArray[np.float32], NDArray[np.int64]] = index.search(query_BD, depth)
        return scores_and_rows


class Flat(IndexKind):
    """Exact search: every query is compared with every vector."""

    kind: Literal["flat"] = Field("flat", description="exact search, which compares every query with all vectors")

    def min_bytes(self, *, num_items: int, dim: int) -> int:
        """Return the bytes of the vectors and their row numbers."""
        return num_items * (VALUE_BYTES * dim + ROW_NUMBER_BYTES)

    def empty_index(self, dim: int) -> Any:
        """Return an IndexFlatIP."""
        return _faiss().IndexFlatIP(dim)


class _Ivf(IndexKind):
    """Base of the IVF kinds: k-means divides the vectors into cells, and a query searches the nearest cells."""

    nlist: int = Field(
        100,
        ge=1,
        le=1_000_000,
        description="number of cells of an IVF index. A catalogue with fewer than 39 items per cell gets fewer cells",
    )
    nprobe: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="number of cells of an IVF index that a query searches. Default: the smallest tested number that reaches "
        "`index.recall_target`",
    )

    def fitted(self, num_items: int) -> Self:
        """Limit nlist to the largest number with enough items per cell for k-means, and nprobe to nlist.

        >>> [IvfFlat(nlist=100).fitted(num_items).nlist for num_items in (12_101, 390, 20)]
        [100, 10, 1]
        """
        nlist = max(1, min(self.nlist, num_items // MIN_ITEMS_PER_CENTROID))
        return self.model_copy(update={"nlist": nlist, "nprobe": self.nprobe and min(self.nprobe, nlist)})

    def search_variants(self, depth: int) -> Iterator[Self]:
        """Yield 1, 2, 4, ... searched cells, and at last all cells.

        >>> [variant.nprobe for variant in IvfFlat(nlist=100).search_variants(10)]
        [1, 2, 4, 8, 16, 32, 64, 100]
        """
        powers = (1 << exponent for exponent in range((self.nlist - 1).bit_length()))
        for nprobe in [self.nprobe] if self.nprobe is not None else [*powers, self.nlist]:
            yield self.model_copy(update={"nprobe": nprobe})

    def num_training_vectors(self) -> int:
        """Return at least the size of the sample that FAISS draws from these vectors."""
        return MAX_VECTORS_PER_CENTROID * max(self.nlist, MIN_CENTROIDS)

    def search_parameters(self, depth: int) -> Any:
        """Return nprobe."""
        return _faiss().SearchParametersIVF(nprobe=self.nprobe or DEFAULT_NPROBE)

    def search_exhaustively(
        self, index: Any, query_BD: "NDArray[np.float32]", depth: int
    ) -> "tuple[NDArray[np.float32], NDArray[np.int64]]":
        """Search all cells."""
        faiss = _faiss()
        all_cells = faiss.SearchParametersIVF(nprobe=faiss.downcast_index(index.index).nlist)
        scores_and_rows: tuple[NDArray[np.float32], NDArray[np.int64]] = index.search(query_BD, depth, params=all_cells)
        return scores_and_rows


class IvfFlat(_Ivf):
    """Cells of whole vectors."""

    kind: Literal["ivf_flat"] = Field("ivf_flat", description="search of the nearest cells of vectors (IVF)")

    def min_bytes(self, *, num_items: int, dim: int) -> int:
        """Return the bytes of the vectors and their row numbers, which the cells store again."""
        return num_items * (VALUE_BYTES * dim + 2 * ROW_NUMBER_BYTES)

    def empty_index(self, dim: int) -> Any:
        """Return an IndexIVFFlat."""
        faiss = _faiss()
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, self.nlist, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1
        return index


class IvfPq(_Ivf):
    """Cells of vectors that product quantization compresses. Scores are computed from the compressed vectors."""

    kind: Literal["ivf_pq"] = Field(
        "ivf_pq", description="search of the nearest cells of vectors that are compressed by product quantization"
    )
    pq_m: int = Field(
        8,
        ge=1,
        le=16_384,
        description="number of sub-vectors of product quantization. It must divide the width of the vectors",
    )
    pq_nbits: int = Field(
        8,
        ge=1,
        le=12,
        description="number of bits per sub-vector of product quantization. A catalogue with fewer than `2^pq_nbits` items "
        "gets fewer bits",
    )

    def problem(self, dim: int) -> str | None:
        """Require that pq_m divides the width."""
        if dim % self.pq_m == 0:
            return None
        return (
            f"pq_m of the kind ivf_pq is {self.pq_m}, which does not divide the vector width {dim}; set it to a divisor of "
            f"{dim}, or change the last size of model.query.layers and model.candidate.layers"
        )

    def fitted(self, num_items: int) -> Self:
        """Also limit pq_nbits to the largest number with at least one item per centroid, as FAISS requires.

        MIN_ITEMS_PER_CENTROID does not apply to pq_nbits. Its purpose is that centroids fit more vectors than the sample on
        which they are trained. In a small catalogue, the sample contains all vectors.

        >>> [IvfPq(pq_nbits=8).fitted(num_items).pq_nbits for num_items in (12_101, 256, 255)]
        [8, 8, 7]
        """
        return super().fitted(num_items).model_copy(update={"pq_nbits": min(self.pq_nbits, num_items.bit_length() - 1)})

    def min_bytes(self, *, num_items: int, dim: int) -> int:
        """Return the bytes of the codes and the row numbers, which the cells store again."""
        return num_items * (self.pq_m * self.fitted(num_items).pq_nbits // 8 + 2 * ROW_NUMBER_BYTES)

    def empty_index(self, dim: int) -> Any:
        """Return an IndexIVFPQ."""
        faiss = _faiss()
        quantizer = faiss.IndexFlatIP(dim)
        index = faiss.IndexIVFPQ(quantizer, dim, self.nlist, self.pq_m, self.pq_nbits, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
        return index

    def num_training_vectors(self) -> int:
        """Return the larger sample of the two k-means: that of the cells and that of the sub-vectors."""
        return MAX_VECTORS_PER_CENTROID * max(self.nlist, 1 << self.pq_nbits)


class Hnsw(IndexKind):
    """Search of a graph that links each vector to similar vectors."""

    kind: Literal["hnsw"] = Field("hnsw", description="search of a graph that links similar vectors (HNSW)")
    hnsw_m: int = Field(32, ge=4, le=1_024, description="number of links per node of an HNSW index (M)")
    ef_construction: int = Field(
        200, ge=8, le=100_000, description="size of the candidate list while an HNSW index is built (efConstruction)"
    )
    ef_search: int | None = Field(
        None,
        ge=8,
        le=100_000,
        description="size of the candidate list while an HNSW index is searched (efSearch). Default: the smallest tested size "
        "that reaches `index.recall_target`",
    )

    def search_variants(self, depth: int) -> Iterator[Self]:
        """Yield candidate lists of `depth` items, and of up to 32 times as many.

        >>> [variant.ef_search for variant in Hnsw().search_variants(100)]
        [100, 200, 400, 800, 1600, 3200]
        """
        sizes = [max(depth, MIN_EF_SEARCH) << exponent for exponent in range(6)]
        for ef_search in sizes if self.ef_search is None else [self.ef_search]:
            yield self.model_copy(update={"ef_search": ef_search})

    def min_bytes(self, *, num_items: int, dim: int) -> int:
        """Return the bytes of the vectors, their row numbers and the links."""
        return num_items * (VALUE_BYTES * dim + ROW_NUMBER_BYTES + 8 * self.hnsw_m)

    def empty_index(self, dim: int) -> Any:
        """Return an IndexHNSWFlat."""
        faiss = _faiss()
        index = faiss.IndexHNSWFlat(dim, self.hnsw_m, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = self.ef_construction
        return index

    def uses_one_thread(self, num_items: int) -> bool:
        """Return whether the catalogue is small."""
        return num_items <= MAX_SINGLE_THREAD_ITEMS

    def search_parameters(self, depth: int) -> Any:
        """Return ef_search, raised to `depth` if it is smaller."""
        return _faiss().SearchParametersHNSW(efSearch=max(self.ef_search or MIN_EF_SEARCH, depth))

    def search_exhaustively(
        self, index: Any, query_BD: "NDArray[np.float32]", depth: int
    ) -> "tuple[NDArray[np.float32], NDArray[np.int64]]":
        """Search the vectors without the graph."""
        faiss = _faiss()
        score_BN, index_BN = faiss.downcast_index(index.index).storage.search(query_BD, depth)
        return score_BN, faiss.vector_to_array(index.id_map)[index_BN]


AnyIndexKind = Annotated[Flat | IvfFlat | IvfPq | Hnsw, Field(discriminator="kind")]


def _faiss() -> Any:
    """Import FAISS at the first use: reading a config takes .3 s less without it."""
    import faiss

    return faiss
