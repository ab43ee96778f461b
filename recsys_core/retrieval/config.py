"""Configuration of the FAISS indexes."""

from typing import Literal

from pydantic import Field

from recsys_core.config import Settings

IndexKind = Literal["flat", "ivf_flat", "ivf_pq", "hnsw"]


class IndexConfig(Settings):
    """FAISS indexes that search the item vectors by inner product. For cosine similarity, the vectors have length 1."""

    served_kind: IndexKind = Field("hnsw", description="index kind of the packaged model")
    compared_kinds: tuple[IndexKind, ...] = Field(
        (),
        description="further index kinds to build and measure. flat is always built, because recall is measured against it",
    )
    nlist: int = Field(
        100,
        ge=1,
        le=1_000_000,
        description="IVF: number of cells. A catalogue with fewer than 39 items per cell gets fewer cells",
    )
    nprobe: int = Field(16, ge=1, le=1_000_000, description="IVF: number of cells searched per query")
    pq_m: int = Field(8, ge=1, le=16_384, description="product quantization: number of sub-vectors; divides the vector width")
    pq_nbits: int = Field(8, ge=4, le=12, description="product quantization: bits per sub-vector")
    hnsw_m: int = Field(32, ge=4, le=1_024, description="HNSW: links per node (M)")
    ef_construction: int = Field(200, ge=8, le=100_000, description="HNSW: candidate list size while building (efConstruction)")
    ef_search: int = Field(128, ge=8, le=100_000, description="HNSW: candidate list size while searching (efSearch)")
    recall_k: int = Field(20, ge=1, le=10_000, description="cut-off K of the recall against exact search")

    @property
    def built_kinds(self) -> tuple[IndexKind, ...]:
        """Index kinds to build, without repetitions. flat is first, because the others are measured against it.

        >>> IndexConfig(served_kind="hnsw", compared_kinds=("ivf_pq", "hnsw")).built_kinds
        ('flat', 'hnsw', 'ivf_pq')
        """
        return tuple(dict.fromkeys(("flat", self.served_kind, *self.compared_kinds)))
