"""Errors of constraints that the table, its optimizer or the device does not support."""

import pytest
from pydantic import ValidationError

from recsys_core.errors import InputError
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer
from recsys_core.sharding.config import ClusterConfig, QuantizedCommsConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.planner import make_plan
from tests.recsys_core.training.small_model import with_optimizer

SPEC = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=True), num_users=1000, num_items=500)
"""A model with unpooled tables."""
POOLED_SPEC = ModelSpec.sized(
    TwoTowerConfig(learn_user_embedding=True), num_users=1000, num_items=500, tables={"user": TableConfig(lookup="pooled")}
)
"""The same model with pooled lookups of users."""


def config_with(table_name: str = "item", *, cluster_settings: dict | None = None, **constraint_settings) -> ShardingConfig:
    return ShardingConfig(
        cluster=ClusterConfig(**({"device": "cuda", "processes_per_node": 2} | (cluster_settings or {}))),
        tables={table_name: TableConstraint(**constraint_settings)},
    )


def config_with_comms(quantized_comms: QuantizedCommsConfig, **constraint_settings) -> ShardingConfig:
    """Return a config with quantized comms and a constraint of the table `user`."""
    return config_with("user", **constraint_settings).model_copy(update={"quantized_comms": quantized_comms})


CONFIG_AND_MESSAGE_PATTERN_BY_CASE = {
    "int8 with row-wise types by default": (
        config_with_comms(QuantizedCommsConfig(forward="int8")),
        r"int8 cannot represent the partial.*sharding.tables.user.sharding_types is left to the planner; choose from",
    ),
    "int8 with a row-wise type": (
        config_with_comms(QuantizedCommsConfig(forward="int8"), sharding_types=("table_wise", "row_wise")),
        r"sharding.tables.user.sharding_types is \['table_wise', 'row_wise'\]",
    ),
    "an unknown table": (
        config_with("itm", sharding_types=("row_wise",)),
        r"sharding.tables.itm: the model has no such table; it has \['item', 'user'\]",
    ),
    "a pooled sharding type for an unpooled table": (
        config_with(sharding_types=("row_wise", "grid_shard")),
        r"sharding.tables.item: grid_shard supports pooled lookups only.*choose from",
    ),
    "an offloading kernel on a CPU": (
        config_with(cluster_settings={"device": "cpu"}, compute_kernels=("fused", "fused_uvm")),
        r"compute_kernels: fused_uvm stores rows outside of a GPU's memory, but the device is cpu.*choose fused",
    ),
    "a cache on a CPU": (
        config_with(cluster_settings={"device": "cpu"}, cache_load_factor=0.1),
        r"cache_load_factor is 0.1, but the device is cpu",
    ),
    "an SSD without a path": (
        config_with(cluster_settings={"ssd_gb": 100}, compute_kernels=("key_value",)),
        r"key_value stores rows on an SSD, but sharding.cluster.ssd_path is None and ssd_gb 100; set both",
    ),
    "the kernel dense without data_parallel": (
        config_with(compute_kernels=("dense",)),
        r"dense is the kernel of data_parallel only, but sharding_types are left to the planner",
    ),
    "data_parallel without the kernel dense": (
        config_with(sharding_types=("data_parallel",), compute_kernels=("fused",)),
        r"data_parallel supports only the kernel dense, but compute_kernels are \['fused'\]; add dense",
    ),
    "the kernel dense alone for several types": (
        config_with(sharding_types=("data_parallel", "row_wise"), compute_kernels=("dense",)),
        r"dense is the kernel of data_parallel only, but sharding_types are \['data_parallel', 'row_wise'\]",
    ),
}


@pytest.mark.parametrize(
    ("config", "message_pattern"), CONFIG_AND_MESSAGE_PATTERN_BY_CASE.values(), ids=CONFIG_AND_MESSAGE_PATTERN_BY_CASE.keys()
)
def test_an_unsupported_constraint_is_rejected_and_the_error_names_the_setting(config, message_pattern):
    with pytest.raises(InputError, match=message_pattern):
        make_plan(config, model=POOLED_SPEC, batch_size=64)


def test_a_sharding_type_for_pooled_lookups_is_rejected_for_an_unpooled_table():
    with pytest.raises(
        InputError, match=r"sharding.tables.user: grid_shard supports pooled.*or set tables.user.lookup to pooled"
    ):
        make_plan(config_with("user", sharding_types=("grid_shard",)), model=SPEC, batch_size=64)
    make_plan(config_with("user", sharding_types=("grid_shard",)), model=POOLED_SPEC, batch_size=64)


def test_an_optimizer_that_the_kernel_does_not_support_is_rejected():
    ssd_config = config_with(cluster_settings={"ssd_gb": 100, "ssd_path": "/ssd"}, compute_kernels=("key_value",))
    with pytest.raises(InputError, match=r"key_value supports the optimizers .*, but the table has sgd"):
        make_plan(ssd_config, model=with_optimizer(SPEC, TableOptimizer(kind="sgd")), batch_size=64)
    replicated_config = config_with(sharding_types=("data_parallel",))
    with pytest.raises(InputError, match=r"partial_rowwise_adam, which has a fused kernel only"):
        make_plan(replicated_config, model=with_optimizer(SPEC, TableOptimizer(kind="partial_rowwise_adam")), batch_size=64)


def test_on_a_cpu_adam_needs_replicated_tables():
    adam_spec, cpu_cluster = with_optimizer(SPEC, TableOptimizer(kind="adam")), ClusterConfig(device="cpu")
    with pytest.raises(InputError, match=r"tables.item: optimizer adam has no fused kernel on a CPU.*replicate it"):
        make_plan(ShardingConfig(cluster=cpu_cluster), model=adam_spec, batch_size=64)
    constraints = dict.fromkeys(SPEC.tables, TableConstraint(sharding_types=("data_parallel",)))
    plan = make_plan(ShardingConfig(cluster=cpu_cluster, tables=constraints), model=adam_spec, batch_size=64)
    assert {table.compute_kernel for table in plan.tables.values()} == {"dense"}


def test_on_a_cpu_a_frozen_table_needs_no_replicas_because_it_has_no_optimizer():
    frozen_spec = ModelSpec.sized(
        TwoTowerConfig(),
        num_users=9,
        num_items=9,
        vector_dim_by_table={"item": 64},
        tables={"item": TableConfig(transfer="frozen")},
    )
    frozen_spec_with_adam = with_optimizer(frozen_spec, TableOptimizer(kind="adam"))
    planned_table = make_plan(
        ShardingConfig(cluster=ClusterConfig(device="cpu")), model=frozen_spec_with_adam, batch_size=64
    ).tables["item"]
    assert planned_table.sharding_type != "data_parallel" and planned_table.optimizer == "none"


def test_a_cache_load_factor_without_a_cache_is_rejected_when_the_config_is_read():
    with pytest.raises(ValueError, match=r"cache_load_factor is 0.1, but compute_kernels \['fused'\] have no cache"):
        TableConstraint(compute_kernels=("fused",), cache_load_factor=0.1)


def test_a_configured_kernel_and_pooling_factor_are_used():
    plan = make_plan(
        config_with(compute_kernels=("fused_uvm_caching",), cache_load_factor=0.5, pooling_factor=3.0),
        model=SPEC,
        batch_size=64,
    )
    item_plan = plan.tables["item"]
    assert (item_plan.compute_kernel, item_plan.cache_load_factor, item_plan.values_per_query) == (
        "fused_uvm_caching",
        0.5,
        3.0,
    )
    assert item_plan.constraint == "compute_kernels: fused_uvm_caching; cache_load_factor: 0.5; pooling_factor: 3.0"
    assert plan.tables["user"].compute_kernel == "fused" and plan.tables["user"].constraint is None


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_gradient_precisions_that_lose_small_values_are_rejected(precision):
    with pytest.raises(ValidationError, match=f"backward is {precision}: gradients below .* set backward to bf16"):
        QuantizedCommsConfig(backward=precision)


def test_int8_is_rejected_for_an_unsupported_width():
    narrow_spec = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=True, embedding_dim=48), num_users=1000, num_items=500)
    with pytest.raises(InputError, match=r"int8 supports widths that are multiples of 32, but table item has 48; choose fp16"):
        make_plan(
            config_with_comms(QuantizedCommsConfig(forward="int8"), sharding_types=("table_wise",)),
            model=narrow_spec,
            batch_size=64,
        )
