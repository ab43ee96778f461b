"""What the user says about the index."""

from typing import Literal

from pydantic import Field

from recsys_core.config import Settings

IndexKind = Literal["flat", "ivf_flat", "ivf_pq", "hnsw"]


class IndexConfig(Settings):
    """FAISS indexes. The metric is not a choice: it follows the model's similarity."""

    served: IndexKind = Field("hnsw", description="the kind that goes into the package")
    kinds: tuple[IndexKind, ...] = Field(
        (),
        description="more kinds to build and to compare; flat is always built, the recall of the others is measured against it",
    )
    centroids: int = Field(
        100, ge=1, le=1_000_000, description="IVF: cells (nlist), lowered where the catalogue is too small to train so many"
    )
    probes: int = Field(16, ge=1, le=1_000_000, description="IVF: cells searched per query (nprobe)")
    subquantizers: int = Field(8, ge=1, le=16_384, description="PQ: parts of a vector coded separately")
    bits_per_code: int = Field(8, ge=4, le=12, description="PQ: bits per part")
    hnsw_links: int = Field(32, ge=4, le=1_024, description="HNSW: links per node (M)")
    hnsw_build_depth: int = Field(200, ge=8, le=100_000, description="HNSW: candidates while building (efConstruction)")
    hnsw_search_depth: int = Field(128, ge=8, le=100_000, description="HNSW: candidates while searching (efSearch)")
    recall_k: int = Field(20, ge=1, le=10_000, description="recall against exact search is measured on the top k")

    @property
    def built(self) -> tuple[IndexKind, ...]:
        """The kinds that are built: flat first, since the others are measured against it.

        >>> IndexConfig(served="hnsw", kinds=("ivf_pq", "hnsw")).built
        ('flat', 'hnsw', 'ivf_pq')
        """
        return tuple(dict.fromkeys(("flat", self.served, *self.kinds)))
