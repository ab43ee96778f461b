"""Configuration of the FAISS indexes."""

from typing import Literal

from pydantic import Field

from recsys_core.config import Settings

IndexKind = Literal["flat", "ivf_flat", "ivf_pq", "hnsw"]


class IndexConfig(Settings):
    """FAISS indexes that search the item vectors by inner product. For cosine similarity, the vectors have length 1."""

    served_kind: IndexKind = Field("hnsw", description="kind of the index in the served model")
    compared_kinds: tuple[IndexKind, ...] = Field(
        (),
        description="further kinds of indexes that are built and measured for comparison. flat is always built, because the "
        "recall of the other kinds is measured against it",
    )
    nlist: int = Field(
        100,
        ge=1,
        le=1_000_000,
        description="Number of cells of an IVF index. A catalogue with fewer than 39 items per cell gets fewer cells",
    )
    nprobe: int = Field(16, ge=1, le=1_000_000, description="Number of cells of an IVF index that a query searches")
    pq_m: int = Field(
        8,
        ge=1,
        le=16_384,
        description="number of sub-vectors of product quantization (ivf_pq). It must divide the width of the vectors",
    )
    pq_nbits: int = Field(8, ge=4, le=12, description="number of bits per sub-vector of product quantization (ivf_pq)")
    hnsw_m: int = Field(32, ge=4, le=1_024, description="Number of links per node of an HNSW index (M)")
    ef_construction: int = Field(
        200, ge=8, le=100_000, description="Size of the candidate list while an HNSW index is built (efConstruction)"
    )
    ef_search: int = Field(
        128, ge=8, le=100_000, description="Size of the candidate list while an HNSW index is searched (efSearch)"
    )
    recall_k: int = Field(20, ge=1, le=10_000, description="cut-off K of the recall of an index compared with an exact search")

    @property
    def built_kinds(self) -> tuple[IndexKind, ...]:
        """Index kinds to build, without repetitions. flat is first, because the others are measured against it.

        >>> IndexConfig(served_kind="hnsw", compared_kinds=("ivf_pq", "hnsw")).built_kinds
        ('flat', 'hnsw', 'ivf_pq')
        """
        return tuple(dict.fromkeys(("flat", self.served_kind, *self.compared_kinds)))
