"""IVF index kinds that store compressed vectors.

An index of these kinds can also store the vectors in half precision. FAISS's IndexRefine then computes the scores of the best
candidates again from these vectors, which are part of the index file.

Shapes: B queries, D width, N rows returned by an index, R vectors that train it.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from recsys_core.retrieval.index_kind import ROW_NUMBER_BYTES, faiss_module, search_vectors
from recsys_core.retrieval.ivf import MAX_VECTORS_PER_CENTROID, Ivf

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESCORE_FACTORS = (2, 4, 8, 16)
RESCORE_VALUE_BYTES = 2
MAX_HALF_PRECISION_VALUE = 65_504.0
_GPU_PQ_M_VALUES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)
"""Numbers of sub-vectors that FAISS's GPU implementation of IVF-PQ supports, with 8 bits each."""
_Rescore = Annotated[
    int | None,
    Field(
        ge=0,
        le=1_000,
        description="number of candidates per requested item whose scores are computed again from vectors in half precision. "
        "The index then holds these vectors too. With `0`, the scores are computed from the compressed vectors. Default: "
        "2, 4, 8 or 16, whichever reaches `index.recall_target` with the least latency",
    ),
]
_PqM = Annotated[
    int | None,
    Field(
        ge=1,
        le=16_384,
        description="number of sub-vectors of product quantization. It must divide the width of the vectors. Default: the "
        "largest divisor up to half the width",
    ),
]


class CompressedIvf(Ivf):
    """Base of the kinds whose cells hold compressed vectors, from which the scores are computed."""

    rescore: _Rescore = 0

    @abstractmethod
    def compressed_index(self, dim: int) -> Any:
        """Return an empty FAISS index of compressed vectors."""

    @abstractmethod
    def code_bytes(self, dim: int) -> int:
        """Return the number of bytes of a compressed vector. The settings must be the result of `fitted`."""

    def max_value(self) -> float | None:
        """Return the largest half-precision value; None if `rescore` is 0. FAISS replaces a larger value by infinity."""
        return None if self.rescore == 0 else MAX_HALF_PRECISION_VALUE

    def compressed_search_parameters(self, depth: int, selector: Any = None) -> Any:
        """Return the FAISS parameters of a search of the compressed vectors."""
        return super().search_parameters(depth, selector)

    def min_bytes(self, *, num_items: int, dim: int) -> int:
        """Return the bytes of the codes, of two row numbers per vector, and of any half-precision vectors."""
        vector_bytes = RESCORE_VALUE_BYTES * dim if self.rescore != 0 else 0
        return num_items * (self.fitted(num_items, dim).code_bytes(dim) + vector_bytes + 2 * ROW_NUMBER_BYTES)

    def empty_index(self, dim: int) -> Any:
        """Return the index of compressed vectors; with `rescore`, an IndexRefine that contains this index."""
        index = self.compressed_index(dim)
        if self.rescore == 0:
            return index
        faiss = faiss_module()
        refine_index = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
        return faiss.IndexRefine(index, refine_index)

    def search_variants(self, depth: int) -> Iterator[list[Self]]:
        """Yield a series of nprobe values for each tested value of `rescore`. If `rescore` is set, only this value is tested.

        >>> [[(variant.nprobe, variant.rescore) for variant in series] for series in PqFastScan(nlist=2).search_variants(10)]
        [[(1, 2), (2, 2)], [(1, 4), (2, 4)], [(1, 8), (2, 8)], [(1, 16), (2, 16)]]
        """
        for rescore in RESCORE_FACTORS if self.rescore is None else (self.rescore,):
            yield from super(CompressedIvf, self.model_copy(update={"rescore": rescore})).search_variants(depth)

    def search_parameters(self, depth: int, selector: Any = None) -> Any:
        """Return the FAISS parameters with nprobe, the selector and `rescore`."""
        parameters = self.compressed_search_parameters(depth, selector)
        if self.rescore == 0:
            return parameters
        return faiss_module().IndexRefineSearchParameters(
            k_factor=self.rescore or RESCORE_FACTORS[0], base_index_params=parameters
        )

    def search_exhaustively(
        self, index: Any, query_BD: "NDArray[np.float32]", depth: int, selector: Any = None
    ) -> "tuple[NDArray[np.float32], NDArray[np.int64]]":
        """Search all cells; with `rescore`, search the half-precision vectors, which are not in cells."""
        if self.rescore == 0:
            return super().search_exhaustively(index, query_BD, depth, selector)
        refine_index = faiss_module().downcast_index(index.index).refine_index
        return search_vectors(refine_index, index, query_BD, depth, faiss_module().SearchParameters(sel=selector))


class IvfSq8(CompressedIvf):
    """Cells of vectors with one byte per value."""

    has_readable_vectors: ClassVar[bool] = True

    kind: Literal["ivf_sq8"] = Field("ivf_sq8", description="like `ivf_flat`, with one byte per value of a vector")

    def code_bytes(self, dim: int) -> int:
        """Return the vector width, because a value takes one byte."""
        return dim

    def compressed_index(self, dim: int) -> Any:
        """Return an IndexIVFScalarQuantizer."""
        faiss = faiss_module()
        codec, metric = faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        index = faiss.IndexIVFScalarQuantizer(faiss.IndexFlatIP(dim), dim, self.num_cells, codec, metric)
        index.cp.min_points_per_centroid = 1
        return index

    def builds_on_gpu(self) -> bool:
        """Return whether `rescore` is 0. FAISS does not build half-precision vectors for rescoring on GPUs."""
        return self.rescore == 0


class ProductQuantized(CompressedIvf):
    """Base of the kinds with product quantization: the sub-vectors of a vector are replaced by their nearest centroids."""

    pq_m: _PqM = 8

    def problem(self, dim: int) -> str | None:
        """Return an error message if pq_m does not divide the width, otherwise None."""
        if self.pq_m is None or dim % self.pq_m == 0:
            return None
        kind = type(self).model_fields["kind"].default
        return (
            f"pq_m of the kind {kind} is {self.pq_m}, which does not divide the vector width {dim}; set it to a divisor of "
            f"{dim}, or change the last size of model.query.layers and model.candidate.layers"
        )

    def fitted(self, num_items: int, dim: int) -> Self:
        """Also set pq_m, if it is None, to the largest divisor of the width up to half the width.

        >>> [PqFastScan().fitted(1_000, dim).pq_m for dim in (64, 50, 7)]
        [32, 25, 1]
        """
        divisors = [divisor for divisor in range(1, max(1, dim // 2) + 1) if dim % divisor == 0]
        pq_m = self.pq_m if self.pq_m is not None else divisors[-1]
        return super().fitted(num_items, dim).model_copy(update={"pq_m": pq_m})

    @property
    def num_sub_vectors(self) -> int:
        """Return pq_m of fitted settings."""
        assert self.pq_m is not None, "the settings are not fitted to a catalogue"
        return self.pq_m

    def min_training_vectors(self, dim: int) -> int:
        """Return the smallest number of vectors on which FAISS can train the index."""
        return 1

    def train(self, index: Any, training_vector_RD: "NDArray[np.float32]") -> None:
        """Train an empty index. If there are fewer vectors than FAISS needs, they are repeated."""
        import numpy as np

        num_vectors, dim = training_vector_RD.shape
        if num_vectors < (min_vectors := self.min_training_vectors(dim)):
            training_vector_RD = np.resize(training_vector_RD, (min_vectors, dim))
        index.train(training_vector_RD)


class IvfPq(ProductQuantized):
    """Cells of vectors that product quantization compresses."""

    kind: Literal["ivf_pq"] = Field(
        "ivf_pq", description="like `ivf_flat`, with vectors that are compressed by product quantization"
    )
    pq_nbits: int = Field(
        8,
        ge=1,
        le=12,
        description="number of bits per sub-vector of product quantization. A catalogue with fewer than 2^pq_nbits items gets "
        "fewer bits",
    )

    def fitted(self, num_items: int, dim: int) -> Self:
        """Also reduce pq_nbits until there is at least one item per centroid, as FAISS requires.

        MIN_ITEMS_PER_CENTROID does not apply to pq_nbits: it prevents k-means from overfitting a sample of the vectors, but
        the centroids of a small catalogue are trained on all vectors.

        >>> [IvfPq(pq_nbits=8).fitted(num_items, 64).pq_nbits for num_items in (12_101, 256, 255)]
        [8, 8, 7]
        """
        return super().fitted(num_items, dim).model_copy(update={"pq_nbits": min(self.pq_nbits, num_items.bit_length() - 1)})

    def code_bytes(self, dim: int) -> int:
        """Return the bytes of the code of a vector: one centroid number per sub-vector.

        >>> IvfPq(pq_m=3, pq_nbits=5).code_bytes(12)
        2
        """
        return math.ceil(self.num_sub_vectors * self.pq_nbits / 8)

    def compressed_index(self, dim: int) -> Any:
        """Return an IndexIVFPQ."""
        faiss = faiss_module()
        quantizer = faiss.IndexFlatIP(dim)
        index = faiss.IndexIVFPQ(
            quantizer, dim, self.num_cells, self.num_sub_vectors, self.pq_nbits, faiss.METRIC_INNER_PRODUCT
        )
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
        return index

    def num_training_vectors(self) -> int:
        """Return the larger of two sample sizes: for the k-means of the cells, and for the k-means of the sub-vectors."""
        return max(super().num_training_vectors(), MAX_VECTORS_PER_CENTROID << self.pq_nbits)

    def builds_on_gpu(self) -> bool:
        """Return whether FAISS can build an index with these settings on GPUs."""
        return self.rescore == 0 and self.pq_nbits == 8 and self.pq_m in _GPU_PQ_M_VALUES


class OpqPq(IvfPq):
    """IVF-PQ of vectors that are first rotated (OPQ), so that the sub-vectors have similar variances and fit their codes."""

    OPQ_ITERATIONS: ClassVar[int] = 10

    kind: Literal["opq_pq"] = Field(  # type: ignore[assignment]
        "opq_pq", description="like `ivf_pq`, with a rotation of the vectors that lowers the error of the compression (OPQ)"
    )

    def compressed_index(self, dim: int) -> Any:
        """Return an IndexPreTransform with an OPQMatrix and an IndexIVFPQ."""
        faiss = faiss_module()
        rotation = faiss.OPQMatrix(dim, self.num_sub_vectors)
        rotation.niter = self.OPQ_ITERATIONS
        # By default, the rotation is trained with 8 bits per sub-vector, for which a small catalogue has too few vectors.
        training_quantizer = faiss.ProductQuantizer(dim, self.num_sub_vectors, self.pq_nbits)
        training_quantizer.cp.min_points_per_centroid = 1
        rotation.pq = training_quantizer
        rotation.referenced_objects = [training_quantizer]  # FAISS's wrapper does not keep the quantizer alive
        return faiss.IndexPreTransform(rotation, super().compressed_index(dim))

    def min_training_vectors(self, dim: int) -> int:
        """Return the width: with fewer vectors, FAISS's OPQMatrix writes outside its memory."""
        return dim

    def compressed_search_parameters(self, depth: int, selector: Any = None) -> Any:
        """Return nprobe and the selector inside the parameters of an IndexPreTransform."""
        parameters = super().compressed_search_parameters(depth, selector)
        return faiss_module().SearchParametersPreTransform(index_params=parameters)

    def builds_on_gpu(self) -> bool:
        """Return False."""
        return False


class PqFastScan(ProductQuantized):
    """Cells of vectors with codes of 4 bits per sub-vector, which SIMD instructions compare."""

    kind: Literal["pq_fastscan"] = Field(
        "pq_fastscan",
        description="like `ivf_pq`, with 4 bits per sub-vector, so that SIMD instructions can compare the vectors. The scores "
        "of the best candidates are computed again from vectors in half precision (see `rescore`)",
    )
    pq_m: _PqM = None
    rescore: _Rescore = None

    def code_bytes(self, dim: int) -> int:
        """Return the bytes of the code of a vector: one centroid number per sub-vector.

        >>> PqFastScan(pq_m=3).code_bytes(12)
        2
        """
        return math.ceil(self.num_sub_vectors / 2)

    def compressed_index(self, dim: int) -> Any:
        """Return an IndexIVFPQFastScan."""
        faiss = faiss_module()
        quantizer = faiss.IndexFlatIP(dim)
        index = faiss.IndexIVFPQFastScan(quantizer, dim, self.num_cells, self.num_sub_vectors, 4, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
        return index

    def min_training_vectors(self, dim: int) -> int:
        """Return the number of centroids that 4 bits distinguish."""
        return 16
