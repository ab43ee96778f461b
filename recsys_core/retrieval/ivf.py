"""IVF indexes of uncompressed vectors: k-means divides the vectors into cells, and a query searches the nearest cells.

Shapes: B queries, D width, N rows returned by an index.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from recsys_core.retrieval.index_kind import ROW_NUMBER_BYTES, VALUE_BYTES, IndexKind, faiss_module, search_vectors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_ITEMS_PER_CENTROID = 39
"""With fewer items per centroid, FAISS warns that k-means is undertrained."""
MAX_VECTORS_PER_CENTROID = 256
"""FAISS trains k-means on at most this many vectors per centroid."""
MIN_SAMPLED_CENTROIDS = 256
"""The k-means sample has enough vectors for at least this many centroids, because product quantization with 8 bits trains 256
centroids on the same sample."""
DEFAULT_NPROBE = 16
"""Number of cells that a query searches in an index that was not tuned."""


class Ivf(IndexKind):
    """Base of the IVF kinds."""

    nlist: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="number of cells of an IVF index. A catalogue with fewer than 39 items per cell gets fewer cells. Default: "
        "four times the square root of the number of items",
    )
    nprobe: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="number of cells of an IVF index that a query searches. Default: the smallest tested number that "
        "reaches `index.recall_target`",
    )

    def fitted(self, num_items: int, dim: int) -> Self:
        """Set nlist if it is None, and reduce nlist until each cell has enough items for k-means. nprobe is at most nlist.

        >>> [IvfFlat(nlist=100).fitted(num_items, 64).nlist for num_items in (12_101, 390, 20)]
        [100, 10, 1]
        >>> [IvfFlat().fitted(num_items, 64).nlist for num_items in (12_101, 1_000_000)]
        [310, 4000]
        """
        nlist = self.nlist if self.nlist is not None else 4 * math.isqrt(num_items)
        nlist = max(1, min(nlist, num_items // MIN_ITEMS_PER_CENTROID))
        return self.model_copy(update={"nlist": nlist, "nprobe": self.nprobe and min(self.nprobe, nlist)})

    @property
    def num_cells(self) -> int:
        """Return nlist of fitted settings."""
        assert self.nlist is not None, "the settings are not fitted to a catalogue"
        return self.nlist

    def search_variants(self, depth: int) -> Iterator[list[Self]]:
        """Yield one series, with nprobe 1, 2, 3, 4, 6, 8, 12, ... and all cells. If nprobe is set, yield only this value.

        >>> [[variant.nprobe for variant in series] for series in IvfFlat(nlist=30).search_variants(10)]
        [[1, 2, 3, 4, 6, 8, 12, 16, 24, 30]]
        """
        nprobe_steps = [1, *(nprobe for exponent in range(1, 20) for nprobe in (1 << exponent, 3 << (exponent - 1)))]
        tested_nprobes = [*(nprobe for nprobe in nprobe_steps if nprobe < self.num_cells), self.num_cells]
        nprobes = tested_nprobes if self.nprobe is None else [self.nprobe]
        yield [self.model_copy(update={"nprobe": nprobe}) for nprobe in nprobes]

    def num_training_vectors(self) -> int:
        """Return the size of the k-means sample. With many cells, the size is FAISS's minimum, because k-means takes long."""
        return max(MAX_VECTORS_PER_CENTROID * MIN_SAMPLED_CENTROIDS, MIN_ITEMS_PER_CENTROID * self.num_cells)

    def search_parameters(self, depth: int, selector: Any = None) -> Any:
        """Return FAISS's parameters with the nprobe of these settings, and the selector."""
        return faiss_module().SearchParametersIVF(nprobe=self.nprobe or DEFAULT_NPROBE, sel=selector)

    def search_exhaustively(
        self, index: Any, query_BD: "NDArray[np.float32]", depth: int, selector: Any = None
    ) -> "tuple[NDArray[np.float32], NDArray[np.int64]]":
        """Search all cells."""
        num_cells = faiss_module().extract_index_ivf(index).nlist
        parameters = self.model_copy(update={"nprobe": num_cells}).search_parameters(depth, selector)
        return search_vectors(index.index, index, query_BD, depth, parameters)


class IvfFlat(Ivf):
    """An IVF index that stores the vectors of each cell without compression."""

    has_readable_vectors: ClassVar[bool] = True
    has_exact_vectors: ClassVar[bool] = True

    kind: Literal["ivf_flat"] = Field(
        "ivf_flat",
        description="approximate search (IVF): the vectors are grouped into cells, and a query searches the nearest cells",
    )

    def min_bytes(self, *, num_items: int, dim: int) -> int:
        """Return the bytes of the vectors and of two row numbers per vector: one in its cell, one in the IndexIDMap."""
        return num_items * (VALUE_BYTES * dim + 2 * ROW_NUMBER_BYTES)

    def empty_index(self, dim: int) -> Any:
        """Return an IndexIVFFlat."""
        faiss = faiss_module()
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, self.num_cells, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1
        return index

    def builds_on_gpu(self) -> bool:
        """Return True."""
        return True
