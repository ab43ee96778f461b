"""Sharding plans: shards of every sharding type, plans of large clusters, plan.json and its checks."""

from itertools import pairwise

import psutil
import pytest
from torchrec.distributed.types import ParameterSharding

from recsys_core.errors import InputError
from recsys_core.manifests import PlanManifest
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer
from recsys_core.preflight import cgroup_limits
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.constraints import UNPOOLED_SHARDING_TYPES
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import make_plan, plan_sharding, with_default_memory
from recsys_core.sharding.torchrec_planner import TorchrecPlanner
from tests.recsys_core.training.small_model import with_optimizer

POOLED_TABLE = TableConfig(lookup="pooled")
SPEC = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=True), num_users=1000, num_items=500, tables={"user": POOLED_TABLE})
SHARDING_TYPES = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel")


def sharding_config(*sharding_types: str, **cluster_settings) -> ShardingConfig:
    """Return a config that restricts each table to the `sharding_types` that it supports.

    A table that supports none of them is restricted to row_wise. Without `sharding_types`, the planner chooses freely.
    """
    unpooled_types = tuple(name for name in sharding_types if name in UNPOOLED_SHARDING_TYPES) or ("row_wise",)
    constraints = {
        table_name: TableConstraint(sharding_types=unpooled_types if table.is_unpooled else sharding_types)
        for table_name, table in SPEC.tables.items()
        if sharding_types
    }
    return ShardingConfig(cluster=ClusterConfig(**({"device": "cpu"} | cluster_settings)), tables=constraints)


def torchrec_sharding(plan: PlanFile, table_name: str) -> ParameterSharding:
    """Return the sharding of a table of SPEC in the form of TorchRec."""
    collection = f"embedding_tables.{SPEC.tables[table_name].collection}"
    return plan.to_torchrec("embedding_tables", spec=SPEC).plan[collection][table_name]


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
def test_every_sharding_type_can_be_planned_for_a_pooled_table_on_a_cpu(sharding_type):
    plan = make_plan(sharding_config(sharding_type), model=SPEC, batch_size=64)
    assert plan.tables["user"].sharding_type == sharding_type
    item_sharding_type = sharding_type if sharding_type in UNPOOLED_SHARDING_TYPES else "row_wise"
    assert plan.tables["item"].sharding_type == item_sharding_type


@pytest.mark.parametrize("sharding_type", [name for name in SHARDING_TYPES if name != "data_parallel"])
def test_shards_cover_each_table_exactly_once(sharding_type):
    plan = make_plan(sharding_config(sharding_type, processes_per_node=4), model=SPEC, batch_size=64)
    for table in plan.tables.values():
        assert sum(shard.size[0] * shard.size[1] for shard in table.shards) == table.rows * table.dim
        assert len({shard.offset for shard in table.shards}) == len(table.shards)
        assert all(0 <= shard.rank < 4 for shard in table.shards)


def test_the_plan_of_a_large_cluster_is_made_without_allocating_its_tables():
    huge_spec = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=True, embedding_dim=128), num_users=10**9, num_items=10**8)
    plan = make_plan(
        sharding_config(device="cuda", num_nodes=2, processes_per_node=8, hbm_gb=80), model=huge_spec, batch_size=8192
    )
    assert plan.world_size == len(plan.ranks) == 16
    assert sum(rank.hbm_bytes for rank in plan.ranks) > (10**9 + 10**8) * 128 * 4


def test_twenty_billion_rows_are_planned_with_64_bit_row_numbers():
    vast_spec = ModelSpec.sized(
        TwoTowerConfig(learn_user_embedding=True, embedding_dim=128), num_users=19 * 10**9, num_items=10**9
    )
    plan = make_plan(
        sharding_config(device="cuda", num_nodes=32, processes_per_node=8, hbm_gb=80, ddr_gb=100),
        model=vast_spec,
        batch_size=64,
    )
    shards = plan.tables["user"].shards
    assert sum(shard.size[0] for shard in shards) == 19 * 10**9
    assert max(shard.offset[0] for shard in shards) > 2**34
    assert all(next_shard.offset[0] == shard.offset[0] + shard.size[0] for shard, next_shard in pairwise(shards))
    assert max(rank.hbm_bytes for rank in plan.ranks) < 80 * 2**30
    plan_from_json = PlanFile.model_validate_json(plan.model_dump_json())
    assert plan_from_json == plan
    plan_from_json.check_matches(spec=vast_spec, world_size=256)


def test_plan_json_contains_the_whole_plan_and_gives_the_same_plan_to_torchrec(tmp_path):
    manifest = plan_sharding(sharding_config("row_wise"), model=SPEC, batch_size=64, folder=tmp_path / "plan")
    assert isinstance(manifest, PlanManifest) and manifest.world_size == 2
    plan = PlanFile.read(manifest.path("plan.json"))
    assert plan == make_plan(sharding_config("row_wise"), model=SPEC, batch_size=64)
    item_sharding = torchrec_sharding(plan, "item")
    assert item_sharding.sharding_type == "row_wise"
    assert [shard.shard_sizes for shard in item_sharding.sharding_spec.shards] == [[250, 64], [250, 64]]


def test_a_plan_for_another_world_size_or_model_is_rejected_and_the_error_has_both_numbers():
    plan = make_plan(sharding_config(), model=SPEC, batch_size=64)
    with pytest.raises(InputError, match="made for 2 ranks, but 3 ranks were started"):
        plan.check_matches(spec=SPEC, world_size=3)
    with pytest.raises(InputError, match=r"\(500, 64\).*\(501, 64\)"):
        plan.check_matches(
            spec=ModelSpec.sized(SPEC.config, num_users=1000, num_items=501, tables={"user": POOLED_TABLE}), world_size=2
        )


def test_a_plan_for_another_optimizer_and_a_plan_that_was_edited_are_rejected():
    sgd_spec = with_optimizer(SPEC, TableOptimizer(kind="sgd"))
    plan = make_plan(sharding_config(), model=sgd_spec, batch_size=64)
    plan.check_matches(spec=sgd_spec, world_size=2)
    with pytest.raises(InputError, match="table item was planned with optimizer sgd, but it has adagrad"):
        plan.check_matches(spec=with_optimizer(SPEC, TableOptimizer(kind="adagrad")), world_size=2)
    spec_with_adagrad_users = ModelSpec.sized(
        SPEC.config,
        num_users=1000,
        num_items=500,
        tables={"user": TableConfig(lookup="pooled", optimizer=TableOptimizer(kind="adagrad"))},
        optimizer=TableOptimizer(kind="sgd"),
    )
    with pytest.raises(InputError, match="table user was planned with optimizer sgd, but it has adagrad"):
        plan.check_matches(spec=spec_with_adagrad_users, world_size=2)
    edited_item = plan.tables["item"].model_copy(update={"compute_kernel": "fused_uvm"})
    with pytest.raises(InputError, match="changed by hand"):
        plan.model_copy(update={"tables": plan.tables | {"item": edited_item}}).check_matches(spec=sgd_spec, world_size=2)


def test_the_order_of_the_sharding_types_does_not_change_the_plan():
    config_of_equal_types = sharding_config("column_wise", "table_wise")  # both types keep a table of 64 columns in one shard
    assert make_plan(config_of_equal_types, model=SPEC, batch_size=64).tables["user"].sharding_type == "table_wise"
    sharding_type_orders = []
    for sharding_types in (SHARDING_TYPES, SHARDING_TYPES[::-1]):
        planner = TorchrecPlanner(
            config=sharding_config(*sharding_types, hbm_gb=80, ddr_gb=16),
            model=SPEC,
            batch_size=64,
            device="cpu",
            processes_per_node=2,
            lookup_stats=None,
        )
        sharding_type_orders.append([layout.sharding_type for layout in planner.layouts()["user"]])
    assert sorted(sharding_type_orders[0]) == sorted(SHARDING_TYPES) and sharding_type_orders[0] == sharding_type_orders[1]


def test_a_cached_table_keeps_its_settings_and_an_ssd_table_cannot_be_trained(tmp_path):
    cached_constraint = TableConstraint(compute_kernels=("fused_uvm_caching",), cache_load_factor=0.3)
    plan = make_plan(
        ShardingConfig(cluster=ClusterConfig(device="cuda"), tables={"item": cached_constraint}), model=SPEC, batch_size=64
    )
    item_sharding = torchrec_sharding(plan, "item")
    assert item_sharding.compute_kernel == "fused_uvm_caching" and item_sharding.cache_params.load_factor == 0.3
    ssd_config = ShardingConfig(
        cluster=ClusterConfig(device="cuda", ssd_gb=100, ssd_path="/ssd"),
        tables={"item": TableConstraint(compute_kernels=("key_value",))},
    )
    ssd_table = make_plan(ssd_config, model=SPEC, batch_size=64).tables["item"]
    assert (ssd_table.compute_kernel, ssd_table.ssd_path) == ("key_value", "/ssd")
    with pytest.raises(InputError, match=r"sharding.tables.item.compute_kernels: key_value can be planned"):
        plan_sharding(ssd_config, model=SPEC, batch_size=64, folder=tmp_path / "plan")


def test_only_device_auto_plans_with_the_memory_of_this_machine() -> None:
    automatic_cluster = with_default_memory(ClusterConfig())
    memory_limit_gb = min(psutil.virtual_memory().total, cgroup_limits().memory_bytes or psutil.virtual_memory().total) / 2**30
    assert automatic_cluster.ddr_gb is not None and memory_limit_gb - 1 < automatic_cluster.ddr_gb <= memory_limit_gb
    cuda_cluster = with_default_memory(ClusterConfig(device="cuda"))
    assert (cuda_cluster.hbm_gb, cuda_cluster.ddr_gb) == (80, 16)  # the documented defaults
    configured_cluster = with_default_memory(ClusterConfig(hbm_gb=40, ddr_gb=3))
    assert (configured_cluster.hbm_gb, configured_cluster.ddr_gb) == (40, 3)
    plan = make_plan(ShardingConfig(), model=ModelSpec.sized(TwoTowerConfig(), num_users=9, num_items=9), batch_size=1)
    assert plan.cluster.ddr_gb == automatic_cluster.ddr_gb
