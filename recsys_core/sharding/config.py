"""Config of the sharding planner: the cluster, constraints per table, and quantized communication."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from recsys_core.config import FilePath, Settings

PLAN_NAME = "plan.json"
ShardingType = Literal[
    "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel"
]
ComputeKernel = Literal["fused", "fused_uvm", "fused_uvm_caching", "key_value", "dense"]
Precision = Literal["fp32", "fp16", "bf16", "int8"]
GradientPrecision = Literal["fp32", "bf16"]


class ClusterConfig(Settings):
    """The hosts of the training. The planner does not connect to them. 1 GB is 2^30 bytes.

    The default bandwidths are the defaults of TorchRec. Bandwidths change the estimated time of a layout, not its memory.
    """

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device of the ranks. With `auto`, it is `cuda` if this machine has a GPU, otherwise `cpu`"
    )
    num_nodes: int = Field(1, ge=1, le=100_000, description="Number of hosts")
    processes_per_node: int | None = Field(
        None, ge=1, le=1_024, description="Number of ranks per host. Default: the number of GPUs, or 2 on a CPU"
    )
    hbm_gb: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Memory of a GPU in GB. Default: the memory of this machine's GPUs with `device: auto`, otherwise 80",
    )
    ddr_gb: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Main memory of a host in GB. Default: the memory of this machine or container with `device: auto`, "
        "otherwise 16",
    )
    ssd_gb: float = Field(
        0.0, ge=0, le=1e9, description="SSD space of a host in GB for tables with the compute kernel `key_value`"
    )
    ssd_path: FilePath | None = Field(None, description="Folder on the SSD. Required for the compute kernel `key_value`")
    intra_host_gb_s: float = Field(600.0, gt=0, le=1e6, description="Bandwidth in GB/s between two GPUs of a host")
    inter_host_gb_s: float = Field(12.5, gt=0, le=1e6, description="Bandwidth in GB/s between two GPUs of different hosts")
    hbm_bandwidth_gb_s: float = Field(897.0, gt=0, le=1e6, description="Bandwidth in GB/s of a GPU's memory")
    ddr_bandwidth_gb_s: float = Field(51.0, gt=0, le=1e6, description="Bandwidth in GB/s of a host's main memory")
    pcie_gb_s: float = Field(32.0, gt=0, le=1e6, description="Bandwidth in GB/s between a GPU and main memory")


class TableConstraint(Settings):
    """Constraints on the layout that the planner chooses for one table."""

    sharding_types: tuple[ShardingType, ...] | None = Field(
        None,
        min_length=1,
        max_length=7,
        description="Sharding types that the planner may choose. Default: all types except `data_parallel`",
    )
    compute_kernels: tuple[ComputeKernel, ...] | None = Field(
        None,
        min_length=1,
        max_length=5,
        description="Compute kernels that the planner may choose. Default: `fused`; on GPUs with too little memory also "
        "`fused_uvm_caching` or `fused_uvm`, which store rows in main memory",
    )
    cache_load_factor: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the rows for which `fused_uvm_caching` has a cache in GPU memory. Default: `0.2`",
    )
    pooling_factor: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Mean number of values that a query looks up in the table. Default: computed from the data",
    )

    @model_validator(mode="after")
    def _require_cached_kernel(self) -> Self:
        kernels = self.compute_kernels
        if self.cache_load_factor is not None and kernels is not None and "fused_uvm_caching" not in kernels:
            raise ValueError(
                f"cache_load_factor is {self.cache_load_factor:g}, but compute_kernels {list(kernels)} have no cache; add "
                "fused_uvm_caching, or remove cache_load_factor"
            )
        return self


class QuantizedCommsConfig(Settings):
    """Quantized communication (TorchRec QComms). Lookups, pooling and updates of the tables stay in fp32."""

    forward: Precision = Field("fp32", description="Precision of the embeddings sent between ranks in the forward pass")
    backward: GradientPrecision = Field(
        "fp32", description="Precision of the gradients sent between ranks in the backward pass"
    )

    @field_validator("backward", mode="before")
    @classmethod
    def _reject_lossy_precision(cls, precision: object) -> object:
        # TorchRec's loss scale does not help: its codec divides the received fp16 values by the scale before it casts them to
        # fp32, so small gradients become 0 in fp16.
        if precision in ("fp16", "int8"):
            lost_range = "below 6e-8" if precision == "fp16" else "below 1/255 of the largest gradient of their row"
            raise ValueError(
                f"backward is {precision}: gradients {lost_range} would become 0, even with a loss scale; "
                "set backward to bf16, which has the range of fp32, or to fp32"
            )
        return precision


class ShardingConfig(Settings):
    """Config of the sharding planner."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="The hosts of the training")
    tables: dict[str, TableConstraint] = Field(
        default_factory=dict, description="Constraints by table name, such as `item` and `user`"
    )
    quantized_comms: QuantizedCommsConfig = Field(
        default_factory=QuantizedCommsConfig,
        description="Precision of the values sent between ranks; a lower precision sends fewer bytes",
    )
