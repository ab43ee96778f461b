"""Wishes that cannot be met are refused by name, with both values and a way out, before anything is launched."""

import pytest
from pydantic import ValidationError

from recsys_core.errors import InputError
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.optimizer_config import TableOptimizer
from recsys_core.models.spec import ModelSpec
from recsys_core.models.table_config import TableConfig
from recsys_core.sharding.config import ClusterConfig, QuantizedCommsConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.planner import make_plan

SPEC = ModelSpec.sized(TwoTowerConfig(user_id=True), num_users=1000, num_items=500)
POOLED = ModelSpec.sized(
    TwoTowerConfig(user_id=True), num_users=1000, num_items=500, tables={"user": TableConfig(lookup="pooled")}
)
"""Users in bags."""


def wished(table: str = "item", *, cluster: dict | None = None, **wish) -> ShardingConfig:
    return ShardingConfig(
        cluster=ClusterConfig(**({"device": "cuda", "processes_per_node": 2} | (cluster or {}))),
        tables={table: TableConstraint(**wish)},
    )


def sent(quantized_comms: QuantizedCommsConfig, **wish) -> ShardingConfig:
    return wished("user", **wish).model_copy(update={"quantized_comms": quantized_comms})


CASES = {
    "int8 for sums": (
        sent(QuantizedCommsConfig(forward="int8")),
        r"int8 cannot carry the sums.*sharding.tables.user.sharding_types is left to the planner; choose among \['table_wise'",
    ),
    "int8 for some sums": (
        sent(QuantizedCommsConfig(forward="int8"), sharding_types=("table_wise", "row_wise")),
        r"sharding.tables.user.sharding_types is \['table_wise', 'row_wise'\]",
    ),
    "a table that is not there": (
        wished("itm", sharding_types=("row_wise",)),
        r"sharding.tables.itm: no such table; the model has \['item', 'user'\]",
    ),
    "a type that pools, for rows": (
        wished(sharding_types=("row_wise", "grid_shard")),
        r"sharding.tables.item: grid_shard adds up pooled rows.*choose among",
    ),
    "rows beside a GPU, on a CPU": (
        wished(cluster={"device": "cpu"}, compute_kernels=("fused", "fused_uvm")),
        r"compute_kernels: fused_uvm keeps rows outside of a GPU's memory, but the device is cpu.*choose fused",
    ),
    "a cache on a CPU": (
        wished(cluster={"device": "cpu"}, cache_load_factor=0.1),
        r"cache_load_factor is 0.1, but the device is cpu",
    ),
    "an SSD without a path": (
        wished(cluster={"ssd_gb": 100}, compute_kernels=("key_value",)),
        r"key_value keeps rows on an SSD, but sharding.cluster.ssd_path is None and ssd_gb 100; set both",
    ),
    "dense without replicas": (
        wished(compute_kernels=("dense",)),
        r"dense is the kernel of data_parallel alone, but sharding_types are left to the planner",
    ),
    "replicas without dense": (
        wished(sharding_types=("data_parallel",), compute_kernels=("fused",)),
        r"data_parallel has the kernel dense alone, but compute_kernels are \['fused'\]; add dense",
    ),
    "dense alone for several types": (
        wished(sharding_types=("data_parallel", "row_wise"), compute_kernels=("dense",)),
        r"dense is the kernel of data_parallel alone, but sharding_types are \['data_parallel', 'row_wise'\]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wish_that_cannot_be_met_is_refused_by_name(case):
    config, message = CASES[case]
    with pytest.raises(InputError, match=message):
        make_plan(config, model=POOLED, batch_size=64)


def test_users_by_row_cannot_have_a_type_that_pools_and_are_told_how_they_can():
    with pytest.raises(InputError, match=r"sharding.tables.user: grid_shard adds up.*or set tables.user.lookup to pooled"):
        make_plan(wished("user", sharding_types=("grid_shard",)), model=SPEC, batch_size=64)
    make_plan(wished("user", sharding_types=("grid_shard",)), model=POOLED, batch_size=64)


def test_an_optimizer_that_a_kernel_has_not_is_refused():
    on_ssd = wished(cluster={"ssd_gb": 100, "ssd_path": "/ssd"}, compute_kernels=("key_value",))
    with pytest.raises(InputError, match=r"key_value has the optimizers .*, but the table's is sgd"):
        make_plan(on_ssd, model=SPEC, batch_size=64, optimizer=TableOptimizer(kind="sgd"))
    fused_only = wished(sharding_types=("data_parallel",))
    with pytest.raises(InputError, match=r"partial_rowwise_adam exists as a fused kernel alone"):
        make_plan(fused_only, model=SPEC, batch_size=64, optimizer=TableOptimizer(kind="partial_rowwise_adam"))


def test_adam_on_a_cpu_is_for_replicated_tables_and_frozen_tables_have_no_optimizer():
    adam, cpu = TableOptimizer(kind="adam"), ClusterConfig(device="cpu")
    with pytest.raises(InputError, match=r"tables.item: optimizer adam has no fused kernel on a CPU.*replicate it"):
        make_plan(ShardingConfig(cluster=cpu), model=SPEC, batch_size=64, optimizer=adam)
    replicated = dict.fromkeys(SPEC.tables, TableConstraint(sharding_types=("data_parallel",)))
    plan = make_plan(ShardingConfig(cluster=cpu, tables=replicated), model=SPEC, batch_size=64, optimizer=adam)
    assert {table.compute_kernel for table in plan.tables.values()} == {"dense"}
    frozen = ModelSpec.sized(
        TwoTowerConfig(), num_users=9, num_items=9, vector_dims={"item": 64}, tables={"item": TableConfig(transfer="frozen")}
    )
    table = make_plan(ShardingConfig(cluster=cpu), model=frozen, batch_size=64, optimizer=adam).tables["item"]
    assert table.sharding_type != "data_parallel" and table.optimizer == "none"


def test_a_cache_factor_without_a_cache_is_refused_when_the_config_is_read():
    with pytest.raises(ValueError, match=r"cache_load_factor is 0.1, but compute_kernels \['fused'\] have no cache"):
        TableConstraint(compute_kernels=("fused",), cache_load_factor=0.1)


def test_a_kernel_that_is_asked_for_is_taken_and_the_pooling_factor_is_the_users_word():
    plan = make_plan(
        wished(compute_kernels=("fused_uvm_caching",), cache_load_factor=0.5, pooling_factor=3.0), model=SPEC, batch_size=64
    )
    table = plan.tables["item"]
    assert (table.compute_kernel, table.cache_load_factor, table.values_per_query) == ("fused_uvm_caching", 0.5, 3.0)
    assert table.constraint == "compute_kernels: fused_uvm_caching; cache_load_factor: 0.5; pooling_factor: 3.0"
    assert plan.tables["user"].compute_kernel == "fused" and plan.tables["user"].constraint is None


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_gradients_are_not_sent_in_a_precision_that_loses_small_ones(precision):
    with pytest.raises(ValidationError, match=f"backward is {precision}: gradients below .* set backward to bf16"):
        QuantizedCommsConfig(backward=precision)


def test_int8_is_refused_for_a_width_that_it_cannot_carry():
    narrow = ModelSpec.sized(TwoTowerConfig(user_id=True, embedding_dim=48), num_users=1000, num_items=500)
    with pytest.raises(InputError, match=r"int8 takes widths that are multiples of 32, but table item has 48; choose fp16"):
        make_plan(sent(QuantizedCommsConfig(forward="int8"), sharding_types=("table_wise",)), model=narrow, batch_size=64)
