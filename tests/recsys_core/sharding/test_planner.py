from itertools import pairwise

import psutil
import pytest

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

BAG = TableConfig(lookup="pooled")
SPEC = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=True), num_users=1000, num_items=500, tables={"user": BAG})
KINDS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel")


def config(*kinds: str, **cluster) -> ShardingConfig:
    """Return a constraint to `kinds` for every table; row_wise for item tables that do not support them."""
    possible = {
        name: kinds
        if not table.is_unpooled
        else tuple(kind for kind in kinds if kind in UNPOOLED_SHARDING_TYPES) or ("row_wise",)
        for name, table in SPEC.tables.items()
    }
    tables = {name: TableConstraint(sharding_types=of_table) for name, of_table in possible.items()} if kinds else {}
    return ShardingConfig(cluster=ClusterConfig(**({"device": "cpu"} | cluster)), tables=tables)


@pytest.mark.parametrize("kind", KINDS)
def test_every_sharding_type_can_be_planned_on_cpu_for_pooled_tables(kind):
    plan = make_plan(config(kind), model=SPEC, batch_size=64)
    assert plan.tables["user"].sharding_type == kind
    assert plan.tables["item"].sharding_type == (kind if kind in UNPOOLED_SHARDING_TYPES else "row_wise")


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_shards_cover_each_table_exactly_once(kind):
    plan = make_plan(config(kind, processes_per_node=4), model=SPEC, batch_size=64)
    for table in plan.tables.values():
        assert sum(shard.size[0] * shard.size[1] for shard in table.shards) == table.rows * table.dim
        assert len({shard.offset for shard in table.shards}) == len(table.shards)
        assert all(0 <= shard.rank < 4 for shard in table.shards)


def test_a_plan_for_another_cluster_allocates_no_tables():
    huge = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=True, embedding_dim=128), num_users=10**9, num_items=10**8)
    plan = make_plan(config(device="cuda", num_nodes=2, processes_per_node=8, hbm_gb=80), model=huge, batch_size=8192)
    assert plan.world_size == len(plan.ranks) == 16
    assert sum(rank.hbm_bytes for rank in plan.ranks) > (10**9 + 10**8) * 128 * 4


def test_twenty_billion_rows_are_planned_with_64_bit_row_numbers():
    vast = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=True, embedding_dim=128), num_users=19 * 10**9, num_items=10**9)
    plan = make_plan(
        config(device="cuda", num_nodes=32, processes_per_node=8, hbm_gb=80, ddr_gb=100), model=vast, batch_size=64
    )
    shards = plan.tables["user"].shards
    assert sum(shard.size[0] for shard in shards) == 19 * 10**9
    assert max(shard.offset[0] for shard in shards) > 2**34
    assert all(next_shard.offset[0] == shard.offset[0] + shard.size[0] for shard, next_shard in pairwise(shards))
    assert max(rank.hbm_bytes for rank in plan.ranks) < 80 * 2**30
    restored = PlanFile.model_validate_json(plan.model_dump_json())
    assert restored == plan
    restored.check_matches(spec=vast, world_size=256)


def test_plan_json_reads_back_as_it_was_and_rebuilds_torchrecs_plan(tmp_path):
    manifest = plan_sharding(config("row_wise"), model=SPEC, batch_size=64, folder=tmp_path / "plan")
    assert isinstance(manifest, PlanManifest) and manifest.world_size == 2
    plan = PlanFile.read(manifest.path("plan.json"))
    assert plan == make_plan(config("row_wise"), model=SPEC, batch_size=64)
    sharding = plan.to_torchrec("embedding_tables", spec=SPEC).plan[f"embedding_tables.{SPEC.tables['item'].collection}"][
        "item"
    ]
    assert sharding.sharding_type == "row_wise"
    assert [shard.shard_sizes for shard in sharding.sharding_spec.shards] == [[250, 64], [250, 64]]


def test_a_plan_for_another_world_size_or_model_is_rejected_with_both_numbers():
    plan = make_plan(config(), model=SPEC, batch_size=64)
    with pytest.raises(InputError, match="made for 2 ranks, but 3 ranks were started"):
        plan.check_matches(spec=SPEC, world_size=3)
    with pytest.raises(InputError, match=r"\(500, 64\).*\(501, 64\)"):
        plan.check_matches(spec=ModelSpec.sized(SPEC.config, num_users=1000, num_items=501, tables={"user": BAG}), world_size=2)


def test_a_plan_for_another_optimizer_or_one_changed_by_hand_is_rejected():
    spec = with_optimizer(SPEC, TableOptimizer(kind="sgd"))
    plan = make_plan(config(), model=spec, batch_size=64)
    plan.check_matches(spec=spec, world_size=2)
    with pytest.raises(InputError, match="table item was planned with optimizer sgd, but it has adagrad"):
        plan.check_matches(spec=with_optimizer(SPEC, TableOptimizer(kind="adagrad")), world_size=2)
    pooled_spec = ModelSpec.sized(
        SPEC.config,
        num_users=1000,
        num_items=500,
        tables={"user": TableConfig(lookup="pooled", optimizer=TableOptimizer(kind="adagrad"))},
        optimizer=TableOptimizer(kind="sgd"),
    )
    with pytest.raises(InputError, match="table user was planned with optimizer sgd, but it has adagrad"):
        plan.check_matches(spec=pooled_spec, world_size=2)
    item = plan.tables["item"].model_copy(update={"compute_kernel": "fused_uvm"})
    with pytest.raises(InputError, match="changed by hand"):
        plan.model_copy(update={"tables": plan.tables | {"item": item}}).check_matches(spec=spec, world_size=2)


def test_every_process_chooses_the_same_of_equally_good_layouts():
    equal_layouts = config("column_wise", "table_wise")  # 64 columns stay whole
    assert make_plan(equal_layouts, model=SPEC, batch_size=64).tables["user"].sharding_type == "table_wise"
    orders = []
    for kinds in (KINDS, KINDS[::-1]):
        planner = TorchrecPlanner(
            config=config(*kinds, hbm_gb=80, ddr_gb=16),
            model=SPEC,
            batch_size=64,
            device="cpu",
            processes_per_node=2,
            lookup_stats=None,
        )
        orders.append([layout.sharding_type for layout in planner.layouts()["user"]])
    assert sorted(orders[0]) == sorted(KINDS) and orders[0] == orders[1]


def test_a_cached_table_keeps_its_cache_settings_and_an_ssd_table_can_be_planned_but_not_trained(tmp_path):
    cached = TableConstraint(compute_kernels=("fused_uvm_caching",), cache_load_factor=0.3)
    plan = make_plan(ShardingConfig(cluster=ClusterConfig(device="cuda"), tables={"item": cached}), model=SPEC, batch_size=64)
    parameter = plan.to_torchrec("embedding_tables", spec=SPEC).plan[f"embedding_tables.{SPEC.tables['item'].collection}"][
        "item"
    ]
    assert parameter.compute_kernel == "fused_uvm_caching" and parameter.cache_params.load_factor == 0.3
    on_disk = ShardingConfig(
        cluster=ClusterConfig(device="cuda", ssd_gb=100, ssd_path="/ssd"),
        tables={"item": TableConstraint(compute_kernels=("key_value",))},
    )
    table = make_plan(on_disk, model=SPEC, batch_size=64).tables["item"]
    assert (table.compute_kernel, table.ssd_path) == ("key_value", "/ssd")
    with pytest.raises(InputError, match=r"sharding.tables.item.compute_kernels: key_value can be planned"):
        plan_sharding(on_disk, model=SPEC, batch_size=64, folder=tmp_path / "plan")


def test_device_auto_uses_the_memory_of_this_machine_and_other_devices_the_configured_or_default_memory() -> None:
    here = with_default_memory(ClusterConfig())
    limit = min(psutil.virtual_memory().total, cgroup_limits().memory_bytes or psutil.virtual_memory().total) / 2**30
    assert here.ddr_gb is not None and limit - 1 < here.ddr_gb <= limit
    elsewhere = with_default_memory(ClusterConfig(device="cuda"))
    assert (elsewhere.hbm_gb, elsewhere.ddr_gb) == (80, 16)
    configured = with_default_memory(ClusterConfig(hbm_gb=40, ddr_gb=3))
    assert (configured.hbm_gb, configured.ddr_gb) == (40, 3)
    plan = make_plan(ShardingConfig(), model=ModelSpec.sized(TwoTowerConfig(), num_users=9, num_items=9), batch_size=1)
    assert plan.cluster.ddr_gb == here.ddr_gb
