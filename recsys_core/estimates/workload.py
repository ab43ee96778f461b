"""The sizes of a run whose resources are estimated: the data, the model, and the machines."""

from typing import Literal

from pydantic import Field

from recsys_core.config import Frozen


class DataSizes(Frozen):
    """Sizes of the data. num_held_out_users: number of users for whom the evaluation ranks the items."""

    num_users: int = Field(ge=1)
    num_items: int = Field(ge=1)
    num_events: int = Field(ge=1)
    num_held_out_users: int = Field(ge=0)
    num_vectors: int = Field(0, ge=0, description="pretrained vectors")
    vector_dim: int = Field(0, ge=0, description="width of the pretrained vectors")
    has_times: bool = True


class TrainingSizes(Frozen):
    """Sizes of the training.

    Attributes:
        num_candidates: number of candidates that a rank scores for each of its queries.
        lookups_ms: the sharding planner's estimate of the lookups of a step, on the slowest rank.
        rank_bytes: the planner's estimate of the tables and buffers of the fullest rank.
        table_bytes: weights and optimizer states of all tables.
    """

    dim: int = Field(ge=1, description="width of the query and candidate vectors")
    epochs: int = Field(ge=1)
    batch_size: int = Field(ge=1, description="queries of a rank in a step")
    num_candidates: int = Field(ge=1)
    lookups_ms: float = Field(ge=0)
    rank_bytes: int = Field(ge=0)
    table_bytes: int = Field(ge=0)
    num_saved_checkpoints: int = Field(1, ge=0, description="checkpoints that are written")
    num_kept_checkpoints: int = Field(3, ge=1, description="checkpoints that exist at the same time")


class IndexSizes(Frozen):
    """Sizes of a FAISS index that is built.

    Attributes:
        num_bytes: size of the index.
        build_factor: build time divided by the build time of the same index with the settings of the benchmark.
    """

    kind: str
    num_bytes: int = Field(ge=0)
    num_shards: int = Field(1, ge=1)
    build_factor: float = Field(1.0, gt=0)


class Machines(Frozen):
    """The hosts. The ingest with Spark uses the cores of all hosts; with DuckDB it runs on one host."""

    engine: Literal["duckdb", "spark"] = "duckdb"
    device: Literal["cpu", "cuda"] = "cpu"
    num_hosts: int = Field(1, ge=1)
    ranks_per_host: int = Field(2, ge=1)
    cores_per_host: int = Field(2, ge=1)
    memory_limit_bytes: int = Field(4 * 10**9, ge=1, description="memory limit of DuckDB")

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.num_hosts * self.ranks_per_host


class Workload(Frozen):
    """Everything that an estimate depends on."""

    data: DataSizes
    training: TrainingSizes
    indexes: tuple[IndexSizes, ...]
    package_bytes_per_item: float = Field(ge=0, description="bytes of an item's vectors and table rows in the package")
    needs_all_positions: bool = Field(True, description="whether the evaluation needs the position of every target")
    has_linear_baselines: bool = Field(True, description="whether `closed_form` or `cooccurrence` ranks all items")
    machines: Machines = Machines()
