import pytest

from recsys_core.errors import InputError
from recsys_core.manifests import PlanManifest
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.optimizer_config import TableOptimizer
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables import TableConfig
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import make_plan, plan_sharding
from recsys_core.sharding.sharders import ROW_LOOKUP_KINDS

SPEC = ModelSpec.sized(TwoTowerConfig(user_id=True), users=1000, items=500)
KINDS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel")


def config(*kinds: str, **cluster) -> ShardingConfig:
    """Every table of one of `kinds`; item tables row_wise where they cannot be."""
    possible = {
        name: kinds if table.side == "query" else tuple(k for k in kinds if k in ROW_LOOKUP_KINDS) or ("row_wise",)
        for name, table in SPEC.tables.items()
    }
    tables = {name: TableConstraint(sharding_types=of_table) for name, of_table in possible.items()} if kinds else {}
    return ShardingConfig(cluster=ClusterConfig(**({"device": "cpu"} | cluster)), tables=tables)


@pytest.mark.parametrize("kind", KINDS)
def test_every_sharding_type_can_be_planned_on_cpu_for_what_is_pooled(kind):
    plan = make_plan(config(kind), model=SPEC, batch_size=64)
    assert plan.tables["user"].sharding_type == kind
    assert plan.tables["item"].sharding_type == (kind if kind in ROW_LOOKUP_KINDS else "row_wise")


def test_a_sharding_type_that_pools_is_refused_for_item_tables():
    pooling = ShardingConfig(tables={"item": TableConstraint(sharding_types=("row_wise", "grid_shard"))})
    with pytest.raises(InputError, match=r"sharding.tables.item: grid_shard adds up pooled rows.*choose among"):
        make_plan(pooling, model=SPEC, batch_size=64)


def test_adam_on_a_cpu_is_for_replicated_tables_and_frozen_tables_have_no_optimizer():
    adam = TableOptimizer(kind="adam")
    with pytest.raises(InputError, match=r"tables.item: optimizer adam has no fused kernel on a CPU.*replicate it"):
        make_plan(config(), model=SPEC, batch_size=64, optimizer=adam)
    make_plan(config("data_parallel"), model=SPEC, batch_size=64, optimizer=adam)
    frozen = ModelSpec.sized(
        TwoTowerConfig(), users=9, items=9, vector_dims={"item": 64}, tables={"item": TableConfig(transfer="frozen")}
    )
    assert make_plan(config(), model=frozen, batch_size=64, optimizer=adam).tables["item"].sharding_type != "data_parallel"
    with pytest.raises(InputError, match=r"partial_rowwise_adam exists as a fused kernel alone"):
        make_plan(config("data_parallel"), model=SPEC, batch_size=64, optimizer=TableOptimizer(kind="partial_rowwise_adam"))


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_shards_cover_each_table_exactly_once(kind):
    plan = make_plan(config(kind, processes_per_node=4), model=SPEC, batch_size=64)
    for table in plan.tables.values():
        assert sum(shard.size[0] * shard.size[1] for shard in table.shards) == table.rows * table.dim
        assert len({shard.offset for shard in table.shards}) == len(table.shards)
        assert all(0 <= shard.rank < 4 for shard in table.shards)


def test_a_plan_for_a_cluster_that_is_not_there_needs_no_memory_for_its_tables():
    huge = ModelSpec.sized(TwoTowerConfig(user_id=True, embedding_dim=128), users=10**9, items=10**8)
    plan = make_plan(config(device="cuda", nodes=2, processes_per_node=8, hbm_gb=80), model=huge, batch_size=8192)
    assert plan.world_size == len(plan.ranks) == 16
    assert sum(rank.hbm_bytes for rank in plan.ranks) > (10**9 + 10**8) * 128 * 4


def test_a_plan_that_does_not_fit_says_what_was_wanted_and_what_there_is():
    huge = ModelSpec.sized(TwoTowerConfig(user_id=True, embedding_dim=128), users=10**9, items=10**8)
    with pytest.raises(InputError, match=r"no plan for tables .* on 2 ranks with 80 GB HBM"):
        make_plan(config(device="cuda", processes_per_node=2), model=huge, batch_size=8192)


def test_a_constraint_on_an_unknown_table_is_refused():
    wrong = ShardingConfig(tables={"itm": TableConstraint(sharding_types=("row_wise",))})
    with pytest.raises(InputError, match=r"sharding.tables.itm: no such table; the model has \['item', 'user'\]"):
        make_plan(wrong, model=SPEC, batch_size=64)


def test_plan_json_reads_back_as_it_was_and_rebuilds_torchrecs_plan(tmp_path):
    manifest = plan_sharding(config("row_wise"), model=SPEC, batch_size=64, folder=tmp_path / "plan")
    assert isinstance(manifest, PlanManifest) and manifest.world_size == 2
    plan = PlanFile.read(manifest.path("plan.json"))
    assert plan == make_plan(config("row_wise"), model=SPEC, batch_size=64)
    sharding = plan.to_torchrec("lookups", spec=SPEC).plan[f"lookups.{SPEC.tables['item'].collection}"]["item"]
    assert sharding.sharding_type == "row_wise"
    assert [shard.shard_sizes for shard in sharding.sharding_spec.shards] == [[250, 64], [250, 64]]


def test_a_plan_for_another_world_size_or_model_is_refused_with_both_numbers():
    plan = make_plan(config(), model=SPEC, batch_size=64)
    with pytest.raises(InputError, match="made for 2 ranks, but 3 were started"):
        plan.require(spec=SPEC, world_size=3)
    with pytest.raises(InputError, match=r"\(500, 64\).*\(501, 64\)"):
        plan.require(spec=ModelSpec.sized(SPEC.config, users=1000, items=501), world_size=2)
