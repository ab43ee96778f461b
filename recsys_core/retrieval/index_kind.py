"""Base class of the index kinds, with the methods that build, search and tune an index.

Shapes: B queries, D width, N rows returned by an index, R vectors that train an index.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self

from recsys_core.config import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VALUE_BYTES = 4
ROW_NUMBER_BYTES = 8


class IndexKind(Settings):
    """Settings and methods of a kind. The methods here suit an index that has no training and no search parameters.

    All settings except `kind` are integers, which IndexReport and package.json record as parameters.
    """

    has_readable_vectors: ClassVar[bool] = False
    """Whether the vectors of items can be read from the index, with a precision of at least one byte per value."""
    has_exact_vectors: ClassVar[bool] = False
    """Whether the index stores the vectors of items without compression."""

    def problem(self, dim: int) -> str | None:
        """Return an error message if the settings do not suit vectors of width `dim`, otherwise None."""
        return None

    def fitted(self, num_items: int, dim: int) -> Self:
        """Return the settings with all build parameters for a catalogue.

        Search parameters may be None, because they are tuned later.
        """
        return self

    def search_variants(self, depth: int) -> Iterator[list[Self]]:
        """Yield series of variants of these settings. In a series, recall and latency of a search for `depth` items increase.

        A parameter that the user has set does not vary. An index with one search parameter has one series, and
        an index with two parameters has a series for each value of the second parameter.
        """
        yield [self]

    @abstractmethod
    def min_bytes(self, *, num_items: int, dim: int) -> int:
        """Return a lower bound of the size of the index, in memory and as a file."""

    @abstractmethod
    def empty_index(self, dim: int) -> Any:
        """Return an untrained FAISS index for inner products. The settings must be the result of `fitted`."""

    def max_value(self) -> float | None:
        """Return the largest absolute value that a vector in the index may have; None if there is no limit."""
        return None

    def num_training_vectors(self) -> int:
        """Return the largest number of vectors on which FAISS trains the index; 0 for an index without training."""
        return 0

    def train(self, index: Any, training_vector_RD: "NDArray[np.float32]") -> None:
        """Train an empty index."""
        index.train(training_vector_RD)

    def builds_on_gpu(self) -> bool:
        """Return whether FAISS has an implementation of this index for GPUs."""
        return False

    def uses_one_thread(self, num_items: int) -> bool:
        """Return whether one thread adds the vectors. With several threads, the index would depend on timing."""
        return False

    def search_parameters(self, depth: int, selector: Any = None) -> Any:
        """Return the FAISS parameters of a search for `depth` items.

        selector: a FAISS IDSelector of the positions inside the index that are searched; None for all positions.
        """
        return faiss_module().SearchParameters(sel=selector)

    def search_exhaustively(
        self, index: Any, query_BD: "NDArray[np.float32]", depth: int, selector: Any = None
    ) -> "tuple[NDArray[np.float32], NDArray[np.int64]]":
        """Compare the queries with all selected vectors. Return inner products [B, N] and item rows [B, N].

        index: an IndexIDMap around the FAISS index of this kind.
        """
        return search_vectors(index.index, index, query_BD, depth, self.search_parameters(depth, selector))


def search_vectors(
    inner_index: Any, index: Any, query_BD: "NDArray[np.float32]", depth: int, parameters: Any
) -> "tuple[NDArray[np.float32], NDArray[np.int64]]":
    """Search `inner_index`, which has the vectors of the IndexIDMap `index` in the same order.

    Return scores and item rows [B, N].
    """
    score_BN, position_BN = inner_index.search(query_BD, depth, params=parameters)
    row_BN = item_row_by_position(index)[position_BN]
    row_BN[position_BN < 0] = -1  # FAISS found fewer than N vectors
    return score_BN, row_BN


def item_row_by_position(index: Any) -> "NDArray[np.int64]":
    """Return the item row of each vector of an IndexIDMap, in the order in which the vectors were added, without a copy."""
    rows: NDArray[np.int64] = faiss_module().rev_swig_ptr(index.id_map.data(), index.ntotal)
    return rows


def faiss_module() -> Any:
    """Return the FAISS module. It is imported only when it is used, because the import takes 0.3 s."""
    import faiss

    return faiss
