"""Estimates of memory and time in plan.json, and the reason for each table's sharding type."""

import pytest

from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.lookup_stats import LookupStats
from recsys_core.sharding.plan_file import PlanFile, to_html
from recsys_core.sharding.planner import make_plan
from tests.recsys_core.training.small_model import with_optimizer

MODEL = ModelSpec.sized(
    TwoTowerConfig(learn_user_embedding=True, embedding_dim=128),
    num_users=10**9,
    num_items=10**7,
    tables={"user": TableConfig(lookup="pooled")},
)


def planned(*, tables: dict | None = None, optimizer: str = "rowwise_adagrad", **changes) -> PlanFile:
    cluster = ClusterConfig(**({"device": "cuda", "num_nodes": 2, "processes_per_node": 8, "ddr_gb": 1000} | changes))
    return make_plan(
        ShardingConfig(cluster=cluster, tables=tables or {}),
        model=with_optimizer(MODEL, TableOptimizer(kind=optimizer)),
        batch_size=1024,
    )


STATE = {"sgd": 0, "rowwise_adagrad": 10**7 * 4, "adagrad": 10**7 * 128 * 4, "adam": 2 * 10**7 * 128 * 4}


@pytest.mark.parametrize("optimizer", STATE)
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "fused_uvm_caching"])
def test_the_parts_of_a_ranks_memory_add_up_to_what_the_planner_packs(optimizer: str, kernel: str) -> None:
    item = TableConstraint(compute_kernels=(kernel,))
    user = TableConstraint(compute_kernels=("fused_uvm",))
    plan = planned(tables={"item": item, "user": user}, optimizer=optimizer, ddr_gb=10_000)
    item_memory_by_rank = [rank.tables["item"] for rank in plan.ranks if "item" in rank.tables]
    assert sum(memory.weights for memory in item_memory_by_rank) == 10**7 * 128 * 4
    assert sum(memory.optimizer for memory in item_memory_by_rank) == pytest.approx(STATE[optimizer], rel=1e-6)
    assert all((memory.cache > 0) == (kernel == "fused_uvm_caching") for memory in item_memory_by_rank)
    assert all(memory.buffers > 0 for memory in item_memory_by_rank)
    for rank in plan.ranks:
        near = sum(memory.cache + memory.buffers for memory in rank.tables.values())
        if kernel == "fused" and "item" in rank.tables:
            near += rank.tables["item"].weights + rank.tables["item"].optimizer
        assert near == pytest.approx(rank.hbm_bytes, abs=8)


def test_the_parts_of_a_ranks_time_add_up() -> None:
    for rank in planned().ranks:
        parts = rank.forward_compute_ms + rank.forward_comms_ms + rank.backward_compute_ms + rank.backward_comms_ms
        assert parts + rank.prefetch_ms == pytest.approx(rank.step_ms)


def test_more_bandwidth_between_hosts_makes_the_step_shorter() -> None:
    assert planned(inter_host_gb_s=50.0).step_ms < planned(inter_host_gb_s=12.5).step_ms


def test_estimates_depend_on_the_lookups_of_a_batch_and_cache_misses_are_prefetched() -> None:
    cached = {"item": TableConstraint(compute_kernels=("fused_uvm_caching",))}
    config = ShardingConfig(cluster=ClusterConfig(device="cuda"), tables=cached)
    model = ModelSpec.sized(TwoTowerConfig(embedding_dim=128), num_users=1, num_items=10**7)

    def step(values: float, hottest: tuple[float, ...]) -> tuple[float, float]:
        lookup_stats = LookupStats(values_per_query={"item": values}, hot_row_curve={"item": hottest})
        (rank,) = make_plan(config, model=model, batch_size=1024, lookup_stats=lookup_stats).ranks
        return rank.step_ms, rank.prefetch_ms

    flat = tuple(percent / 100 for percent in range(1, 101))
    hot = (*(1 - 0.5 ** (percent / 2) for percent in range(1, 100)), 1.0)
    assert step(2.0, flat)[0] == pytest.approx(2 * step(1.0, flat)[0], rel=0.02)
    assert step(2.0, flat)[1] > 100 * step(2.0, hot)[1] > 0


def test_the_page_names_every_table_and_loads_nothing() -> None:
    plan = planned(tables={"item": TableConstraint(sharding_types=("row_wise",))})
    page = to_html(plan)
    assert all(f"<code>{table_name}</code>" in page for table_name in plan.tables)
    assert "constraint: sharding_types: row_wise" in page
    assert plan.fingerprint[:12] in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "") and "prefers-color-scheme: dark" in page
