"""The cluster a plan is made for, and the user's wishes per table."""

from typing import Literal

from pydantic import Field

from recsys_core.config import Frozen

ShardingKind = Literal[
    "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel"
]


class ClusterConfig(Frozen):
    """Where training runs; it need not exist while planning."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes the GPUs of this machine if there are any")
    nodes: int = Field(1, ge=1, description="hosts")
    processes_per_node: int | None = Field(None, ge=1, description="ranks per host; empty: one per GPU, or 2 on CPU")
    hbm_gb: float = Field(80.0, gt=0, description="memory per GPU")
    ddr_gb: float = Field(16.0, gt=0, description="main memory per host")


class TableConstraint(Frozen):
    """What the planner may choose for one table."""

    sharding_types: tuple[ShardingKind, ...] | None = Field(
        None, min_length=1, description="allowed sharding types; empty: all"
    )


class ShardingConfig(Frozen):
    """Input of the planner."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="the hosts training runs on")
    tables: dict[str, TableConstraint] = Field(default_factory=dict, description="constraints by table name (item, user)")
