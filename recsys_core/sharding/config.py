"""The cluster a plan is made for, and the user's wishes per table."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from recsys_core.config import FilePath, Settings

ShardingKind = Literal[
    "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel"
]
ComputeKernel = Literal["fused", "fused_uvm", "fused_uvm_caching", "key_value", "dense"]
Precision = Literal["fp32", "fp16", "bf16", "int8"]
GradientPrecision = Literal["fp32", "bf16"]


class ClusterConfig(Settings):
    """Where training runs; it need not exist while planning. 1 GB is 2^30 bytes.

    The default bandwidths are TorchRec's own; they decide which layout is estimated to be the fastest, never what fits.
    """

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes the GPUs of this machine if there are any")
    num_nodes: int = Field(1, ge=1, le=100_000, description="Number of hosts")
    processes_per_node: int | None = Field(None, ge=1, le=1_024, description="ranks per host; empty: one per GPU, or 2 on CPU")
    hbm_gb: float | None = Field(
        None, gt=0, le=1e6, description="memory per GPU; empty: that of this machine's GPUs under device auto, else 80"
    )
    ddr_gb: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="main memory per host; empty: what this machine or container has under device auto, else 16",
    )
    ssd_gb: float = Field(0.0, ge=0, le=1e9, description="SSD per host for tables with compute kernel key_value; 0: none")
    ssd_path: FilePath | None = Field(None, description="folder on that SSD; needed for key_value")
    intra_host_gb_s: float = Field(600.0, gt=0, le=1e6, description="GB/s between two GPUs of a host")
    inter_host_gb_s: float = Field(12.5, gt=0, le=1e6, description="GB/s from a GPU to one of another host")
    hbm_gb_s: float = Field(897.0, gt=0, le=1e6, description="GB/s of a GPU's memory")
    ddr_gb_s: float = Field(51.0, gt=0, le=1e6, description="GB/s of a host's main memory")
    pcie_gb_s: float = Field(32.0, gt=0, le=1e6, description="GB/s between a GPU and main memory")


class TableConstraint(Settings):
    """What the planner may choose for one table."""

    sharding_types: tuple[ShardingKind, ...] | None = Field(
        None, min_length=1, max_length=7, description="allowed sharding types; empty: all but data_parallel"
    )
    compute_kernels: tuple[ComputeKernel, ...] | None = Field(
        None,
        min_length=1,
        max_length=5,
        description="allowed kernels; empty: fused, and on GPUs rows in main memory (fused_uvm_caching, fused_uvm) where GPU "
        "memory is short",
    )
    cache_load_factor: float | None = Field(
        None, gt=0, le=1, description="fused_uvm_caching: share of the rows that is cached in GPU memory; empty: 0.2"
    )
    pooling_factor: float | None = Field(
        None, gt=0, le=1e6, description="values that a query looks up on average, instead of what was measured in the data"
    )

    @model_validator(mode="after")
    def _cache_is_there(self) -> Self:
        kernels = self.compute_kernels
        if self.cache_load_factor is not None and kernels is not None and "fused_uvm_caching" not in kernels:
            raise ValueError(
                f"cache_load_factor is {self.cache_load_factor:g}, but compute_kernels {list(kernels)} have no cache; add "
                "fused_uvm_caching, or leave cache_load_factor out"
            )
        return self


class QuantizedCommsConfig(Settings):
    """In what precision rows and their gradients travel between ranks; they are looked up, added up and updated in fp32."""

    forward: Precision = Field("fp32", description="of the rows")
    backward: GradientPrecision = Field("fp32", description="of their gradients")

    @field_validator("backward", mode="before")
    @classmethod
    def _keeps_small_gradients(cls, value: object) -> object:
        # TorchRec's loss scale is no help: its codec divides by it in fp16, before the gradients are fp32 again.
        if value in ("fp16", "int8"):
            lost = "below 6e-8" if value == "fp16" else "below 1/255 of the largest beside them"
            raise ValueError(
                f"backward is {value}: gradients {lost} become 0, and no loss scale prevents it; set backward to bf16, which "
                "has the range of fp32, or to fp32"
            )
        return value


class ShardingConfig(Settings):
    """Input of the planner."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="the hosts training runs on")
    tables: dict[str, TableConstraint] = Field(default_factory=dict, description="constraints by table name (item, user)")
    quantized_comms: QuantizedCommsConfig = Field(
        default_factory=QuantizedCommsConfig, description="fewer bytes between ranks for less precision"
    )
